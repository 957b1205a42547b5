"""Unigram, bigram and gzip on the held-out text of a dataset, as rows beside the models."""

from typing import Any

from gptworks.data.dataset import Dataset
from gptworks.data.windows import Windows
from gptworks.errors import UsageError
from gptworks.evaluate import baselines
from gptworks.tokenizer import Tokenizer


def baseline_rows(dataset: Dataset, split: str, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    if split == "train":
        raise UsageError(
            "--baselines: they learn from the training split, so measure another one (--split held-out or test)."
        )
    if dataset.has_foreign_order:
        raise UsageError(
            f"--baselines: need text in the order of the store, but the model was trained with data.order: "
            f"{dataset.cfg.order}, which is evaluated as it cuts its samples."
        )
    if len(dataset.stores) != 1 or tokenizer is None or tokenizer.byte_lengths is None:
        raise UsageError("--baselines: needs one store of plain text with a known byte-level tokenizer.")
    train, measured = (dataset.samples(name).sources[0] for name in ("train", split))
    if not isinstance(train, Windows) or not isinstance(measured, Windows):
        raise UsageError("--baselines: needs a store of plain text, not of prompts and completions.")
    tokens = measured.tokens[measured.first : measured.first + len(measured) * measured.seq_len + 1]
    learned = train.tokens[train.first : train.end]
    vocab_size = tokenizer.vocab_size
    text_bytes = int(tokenizer.byte_lengths[tokens[1:]].sum())
    text = tokenizer.decode(tokens[1:][tokens[1:] != tokenizer.eod_id])
    bits = {
        "unigram (tokens)": baselines.unigram_bits(learned, tokens[1:], vocab_size),
        "bigram (tokens)": baselines.bigram_bits(learned, tokens[:-1], tokens[1:], vocab_size),
        "gzip -9": baselines.gzip_bits(text),
    }
    return [{"model": name, "bits_per_byte": value / text_bytes} for name, value in bits.items()]
