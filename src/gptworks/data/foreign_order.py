"""The samples of other systems, one for one: megatron-core's GPTDataset (0.16), PaddleNLP's and FleetX's (2022), and
those of OneFlow's loader in C++ (2021).

Our own orders (order.py) are functions of seed and index. These are tables, and they change with the number of samples
asked for. They take 4 bytes a sequence and epoch and 12 bytes a sample.

document index  the sequences of the split, repeated for each epoch; shuffled, but for Paddle, which keeps their order
sample index    where each sample begins: place in the document index, and offset in that sequence
shuffle index   in which order the samples are given out

When the last epoch is needed for less than 80 % of its samples, it is shuffled apart from the others.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from gptworks.config.schema import DataConfig
from gptworks.data.cxx_shuffle import CxxShuffle
from gptworks.data.split import SPLITS, boundaries, core_boundaries, oneflow_boundaries
from gptworks.data.store import Store
from gptworks.data.windows import Sample
from gptworks.errors import DataError, EmptySplitError

Shuffle = Callable[[np.ndarray], None]

ORDERS = {"megatron": "megatron-core", "paddle": "PaddleNLP and FleetX", "oneflow": "OneFlow"}
_RULES = {"megatron": core_boundaries, "paddle": boundaries, "oneflow": oneflow_boundaries}
_SURPLUS = 0.005  # megatron-core lays out so much more of each store of a blend than its weight says
_MOST_ENTRIES = 2**31  # 25 GB of tables: a slip of the pen in train.steps, not a plan
_MOST_STORES = 32767


def num_samples(split: str, *, steps: int, global_size: int, evaluate_every: int, evaluate_batches: int) -> int | None:
    """How many samples the originals would ask for in a run of `steps`; None = one epoch of the split."""
    if split == "train":
        return steps * global_size
    if not evaluate_batches:
        return None
    times = steps // evaluate_every + 1 if evaluate_every else 1
    return times * evaluate_batches * global_size


def refuse_unfit(stores: list[Store], cfg: DataConfig, seed: int) -> None:
    """What cannot be laid out so at all."""
    for store in stores:
        is_examples = store.sidecar is not None and store.sidecar.kind == "examples"
        if is_examples or store.contents.is_rows:
            kind = "prompts and completions" if is_examples else "rows that are samples already"
            raise DataError(
                f"data.order: {cfg.order} cuts running text into samples, but {store.file} holds {kind}. Use "
                "data.order: shuffled or sequential."
            )
    if len(stores) > _MOST_STORES:
        raise DataError(f"data.path: {len(stores)} stores; data.order: {cfg.order} mixes up to {_MOST_STORES}.")
    if seed >= 2**32:
        raise DataError(f"train.seed: {seed}; data.order: {cfg.order} needs one below {2**32}.")


class IndexedSource:
    """The samples of one split of one store."""

    def __init__(self, store: Store, split: str, cfg: DataConfig, seed: int, asked: int | None) -> None:
        self.store, self.seq_len = store, cfg.seq_len
        sequences = _sequences(store, split, cfg)
        self.per_epoch = per_epoch(store, split, cfg)
        tokens = _num_tokens(store, sequences)
        asked = self.per_epoch if asked is None else asked
        self.epochs = max(1, -(-(asked * self.seq_len + 1) // tokens))
        total = (self.epochs * tokens - 1) // self.seq_len
        before_last = ((self.epochs - 1) * tokens - 1) // self.seq_len
        self.last_apart = self.epochs > 1 and asked - before_last < _enough_of_last(self.per_epoch, cfg.order)
        entries = self.epochs * len(sequences) + total
        if entries > _MOST_ENTRIES:
            raise DataError(
                f"{store.file}: data.order: {cfg.order} keeps a table of all samples, and {asked:,} samples in "
                f"{self.epochs:,} epochs make one of {entries:,} entries; up to {_MOST_ENTRIES:,} are allowed. Train "
                "for fewer steps, or use data.order: shuffled, which needs no table."
            )
        shuffle: Shuffle = CxxShuffle(seed) if cfg.order == "oneflow" else np.random.RandomState(seed).shuffle
        self.document_index = document_index(
            sequences, self.epochs, shuffle if cfg.order != "paddle" else None, last_apart=self.last_apart
        )
        self.sample_index = sample_index(store.contents.sizes, self.document_index, self.seq_len, total)
        self.shuffle_index = shuffle_index(before_last if self.last_apart else total, total, shuffle)
        self.note = (
            f"{store.file}: samples as {ORDERS[cfg.order]} would lay out {asked:,} of them, {self.epochs:,} "
            f"epoch{'s' * (self.epochs > 1)} of {len(sequences):,} sequences"
            + (", the last epoch shuffled apart" if self.last_apart else "")
        )

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def sample(self, number: int) -> Sample:
        return Sample(
            np.concatenate([self.store.tokens[begin:end] for begin, end in self.spans(number)]).astype(np.int64), None
        )

    def spans(self, number: int) -> list[tuple[int, int]]:
        row = int(self.shuffle_index[number])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        starts = self.store.sequence_starts
        spans = []
        for place, sequence in enumerate(self.document_index[first : last + 1].tolist(), first):
            start, stop = int(starts[sequence]), int(starts[sequence + 1])
            stop = start + end + 1 if place == last else stop
            spans.append((start + begin if place == first else start, stop))
        return spans


class ForeignSamples:
    """The samples of one split of all stores: a finite list, mixed as megatron-core's BlendedDataset mixes several."""

    def __init__(self, sources: list[IndexedSource], blend: tuple[np.ndarray, np.ndarray] | None, available: int):
        self.sources, self.blend, self.available = sources, blend, available

    @property
    def per_epoch(self) -> int:
        return sum(source.per_epoch for source in self.sources)

    def at(self, first: int, count: int) -> list[Sample]:
        return [self.sources[source].sample(number) for source, number in self.where(first, count)]

    def where(self, first: int, count: int) -> list[tuple[int, int]]:
        if first + count > self.available:
            raise DataError(
                f"samples {first} to {first + count - 1}: the order was laid out for {self.available} samples. With "
                "the order of another system the number is decided before the first step (train.steps x "
                "batch.global_size); use data.order: shuffled to go on without end."
            )
        if self.blend is None:
            return [(0, number) for number in range(first, first + count)]
        which, numbers = (index[first : first + count].tolist() for index in self.blend)
        return list(zip(which, numbers, strict=True))


def build_samples(stores: list[Store], split: str, cfg: DataConfig, seed: int, asked: int | None) -> ForeignSamples:
    """`asked`: how many samples; None = each one of the split once, whatever the weights."""
    if len(stores) == 1 and (not cfg.weights or asked is None):
        alone = IndexedSource(stores[0], split, cfg, seed, asked)
        return ForeignSamples([alone], None, alone.per_epoch if asked is None else asked)
    if asked is None:
        sources = [IndexedSource(store, split, cfg, seed, None) for store in stores]
        everything = exhaustive_blend([len(source) for source in sources])
        return ForeignSamples(sources, everything, len(everything[0]))
    if cfg.weights or cfg.order != "megatron":
        # Paddle and OneFlow read one store. Of several each gives as large a share as it has samples.
        shares = _normalized(cfg.weights or [per_epoch(store, split, cfg) for store in stores])
        targets = [math.ceil(asked * share) for share in shares]
        sources = [
            IndexedSource(store, split, cfg, seed, math.ceil(target * (1 + _SURPLUS)))
            for store, target in zip(stores, targets, strict=True)
        ]
        size = sum(targets)
    else:  # megatron-core then goes through each store at most once
        sources = [IndexedSource(store, split, cfg, seed, None) for store in stores]
        shares = _normalized([len(source) for source in sources])
        size = min(asked, sum(len(source) for source in sources))
        if size < asked and split == "train":
            raise DataError(
                f"data.weights: not set, and without them data.order: megatron goes through several stores once: "
                f"{size:,} samples, but the run asks for {asked:,}. Set data.weights, or train for fewer steps."
            )
    blend = weighted_blend(_normalized(shares), size)  # normalised twice, as there: the last bit may matter
    for number, source in enumerate(sources):
        used = int((blend[0] == number).sum())
        if used > len(source):
            raise DataError(
                f"{source.store.file}: the blend takes {used} samples of its {split} split, which megatron-core lays "
                f"out for {len(source)}, and so stops. Change data.weights or the number of samples ({asked})."
            )
    return ForeignSamples(sources, blend, min(asked, size))


def _enough_of_last(per_epoch: int, order: str) -> int:
    """Samples of the last epoch from which on it is shuffled with the others: 80 % of it."""
    return int(np.float32(0.8) * np.float32(per_epoch)) if order == "oneflow" else int(0.80 * per_epoch)


def per_epoch(store: Store, split: str, cfg: DataConfig) -> int:
    """Samples in one epoch of the split; at least one, or it is an error."""
    sequences = _sequences(store, split, cfg)
    tokens = _num_tokens(store, sequences)
    if tokens <= cfg.seq_len:
        raise EmptySplitError(
            f"{store.file}: the {split} split has {len(sequences)} of {len(store.contents.sizes)} sequences and "
            f"{tokens} tokens; one sample needs {cfg.seq_len + 1}. Use more text, a smaller data.seq_len, or another "
            f"data.split (now {','.join(f'{share:g}' for share in cfg.split)}; with data.order: {cfg.order} it "
            "counts sequences)."
        )
    return (tokens - 1) // cfg.seq_len


# The tables


def document_index(sequences: range, epochs: int, shuffle: Shuffle | None, *, last_apart: bool) -> np.ndarray:
    """int32 [epochs x sequences]. Without `shuffle` the sequences stay in order."""
    once = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    groups = [np.tile(once, times) for times in ((epochs - 1, 1) if last_apart else (epochs,))]
    if shuffle is not None:
        for group in groups:
            shuffle(group)
    return np.concatenate(groups)


def sample_index(sizes: np.ndarray, documents: np.ndarray, seq_len: int, total: int) -> np.ndarray:
    """[total + 1, 2]: place in `documents` and offset there of each sample's first token, which the one before shares.

    int32 unless a place or an offset may need more.
    """
    lengths = sizes[documents]
    ends = np.cumsum(lengths, dtype=np.int64)
    first_tokens = np.arange(total + 1, dtype=np.int64) * seq_len
    # The sequence that holds the token: those without tokens are passed over, but for one at the very beginning.
    places = np.searchsorted(ends, first_tokens, side="right")
    places[0] = 0
    fits = max(len(documents), int(sizes.max())) <= np.iinfo(np.int32).max
    index = np.empty((total + 1, 2), np.int32 if fits else np.int64)
    index[:, 0] = places
    index[:, 1] = first_tokens - (ends[places] - lengths[places])
    return index


def shuffle_index(first: int, total: int, shuffle: Shuffle) -> np.ndarray:
    """range(first) and range(first, total), each shuffled."""
    groups = [np.arange(first, dtype=np.uint32), np.arange(first, total, dtype=np.uint32)]
    for group in groups:
        shuffle(group)
    return np.concatenate(groups)


def weighted_blend(shares: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each sample: the store that is furthest behind its share, and the how-manieth sample of it."""
    return _blend(np.array(shares, np.float64), size, np.full(len(shares), np.inf))


def exhaustive_blend(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`weighted_blend` with sizes for shares; a store that is used up drops out, so each sample comes once."""
    limits = np.array(sizes, np.float64)
    return _blend(limits / limits.sum(), sum(sizes), limits)


def _blend(shares: np.ndarray, size: int, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    which, numbers = np.empty(size, np.int16), np.empty(size, np.int64)
    taken, behind = np.zeros(len(shares)), np.empty(len(shares))
    ends = limits.tolist()
    for at in range(size):
        np.multiply(shares, max(at, 1), out=behind)
        np.subtract(behind, taken, out=behind)
        chosen = int(behind.argmax())  # the first of equals
        number = taken[chosen]
        which[at], numbers[at] = chosen, number
        taken[chosen] = number + 1 if number + 1 < ends[chosen] else np.inf
    return which, numbers


def _normalized(weights: Sequence[float]) -> list[float]:
    values = np.array(weights, np.float64)
    return (values / values.sum()).tolist()


# The split


def _sequences(store: Store, split: str, cfg: DataConfig) -> range:
    """These systems split sequences, not documents. In a store of text that is the same."""
    borders = _RULES[cfg.order](cfg.split, len(store.contents.sizes))
    which = SPLITS.index(split)
    return range(borders[which], borders[which + 1])


def _num_tokens(store: Store, sequences: range) -> int:
    return int(store.sequence_starts[sequences.stop] - store.sequence_starts[sequences.start])
