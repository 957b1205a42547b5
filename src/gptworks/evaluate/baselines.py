"""How well simple models predict the same text, in bits per byte: what a GPT has to beat."""

import gzip

import numpy as np

_DISCOUNT = 0.75  # absolute discounting, the usual constant


def unigram_bits(train: np.ndarray, targets: np.ndarray, vocab_size: int) -> float:
    """Total bits of the targets under add-one smoothed token frequencies."""
    return float(-np.log2(_unigram(train, vocab_size)[targets]).sum())


def bigram_bits(train: np.ndarray, contexts: np.ndarray, targets: np.ndarray, vocab_size: int) -> float:
    """Total bits under token pairs, with absolute discounting that backs off to the unigram."""
    unigram = _unigram(train, vocab_size)
    pairs = train[:-1].astype(np.int64) * vocab_size + train[1:]
    seen, counts = np.unique(pairs, return_counts=True)
    context_counts = np.bincount(train[:-1], minlength=vocab_size)
    followers = np.bincount(seen // vocab_size, minlength=vocab_size)  # different tokens seen after each token
    asked = contexts.astype(np.int64) * vocab_size + targets
    at = np.minimum(np.searchsorted(seen, asked), len(seen) - 1)
    pair_counts = np.where(seen[at] == asked, counts[at], 0)
    total = np.maximum(context_counts[contexts], 1)
    backed_off = np.where(context_counts[contexts] > 0, _DISCOUNT * followers[contexts] / total, 1.0)
    probability = np.maximum(pair_counts - _DISCOUNT, 0) / total + backed_off * unigram[targets]
    return float(-np.log2(probability).sum())


def gzip_bits(text: str) -> float:
    return 8.0 * len(gzip.compress(text.encode("utf-8"), 9))


def _unigram(train: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return counts / counts.sum()
