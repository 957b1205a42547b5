"""Documents to samples. A sample is T + 1 tokens: T inputs and, shifted by one, T targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gptworks.config.schema import DataConfig
from gptworks.counted import counted
from gptworks.data import order
from gptworks.data.formats.contents import Tokens
from gptworks.data.mixture import Mixture, Stage
from gptworks.data.split import SPLITS, boundaries
from gptworks.data.store import Store
from gptworks.errors import DataError, EmptySplitError


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray  # int64 [T + 1]
    scored: np.ndarray | None  # bool [T], which targets count; None = all


class Source(Protocol):
    """Numbered samples of one split of one store. `note`: what the user should know about them."""

    note: str

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample: ...

    def spans(self, number: int) -> list[tuple[int, int]]:
        """Which tokens of the store a sample is made of, as (first, end)."""


class OrderedSamples(Protocol):
    """The samples of one split of all stores, in the order in which they are read."""

    @property
    def sources(self) -> Sequence[Source]: ...

    @property
    def per_epoch(self) -> int: ...

    def at(self, first: int, count: int) -> list[Sample]: ...


class LocatedSamples(OrderedSamples, Protocol):
    """Ordered samples of stores, which can be found again there."""

    def where(self, first: int, count: int) -> list[tuple[int, int]]:
        """For each: which source it is of, and the number of the sample there."""


class Windows:
    """Consecutive windows over the concatenated documents. Neighbours share one token, so every token is predicted."""

    note = ""

    def __init__(self, tokens: Tokens, seq_len: int, first: int = 0, end: int | None = None) -> None:
        """Over tokens[first:end]."""
        # A plain array over the same mapped memory: numpy's memmap class makes every slice cost several times more.
        self.tokens = tokens.view(np.ndarray) if isinstance(tokens, np.memmap) else tokens
        self.seq_len = seq_len
        self.first, self.end = first, len(tokens) if end is None else end

    def __len__(self) -> int:
        return max(0, (self.end - self.first - 1) // self.seq_len)

    def sample(self, number: int) -> Sample:
        ((start, end),) = self.spans(number)
        return Sample(self.tokens[start:end].astype(np.int64), None)

    def spans(self, number: int) -> list[tuple[int, int]]:
        start = self.first + number * self.seq_len
        return [(start, start + self.seq_len + 1)]


class Rows:
    """Samples as whoever made the file cut them: each row is one, and neighbours share no token."""

    note = ""

    def __init__(self, store: Store, rows: range, seq_len: int, too_long: str = "refuse") -> None:
        self.store, self.rows, self.seq_len = store, rows, seq_len
        sizes = store.contents.sizes
        wrong = np.flatnonzero(sizes < seq_len + 1 if too_long == "truncate" else sizes != seq_len + 1)
        if too_long == "truncate" and not len(wrong) and (sizes != seq_len + 1).any():
            self.note = f"{store.file}: rows have {int(sizes.max())} tokens and are cut off after {seq_len + 1}"
        if len(wrong):
            length = int(store.contents.sizes[wrong[0]])
            raise DataError(
                f"{store.file}: row {wrong[0]} has {length} tokens, but a row is one sample, and data.seq_len + 1 is "
                f"{seq_len + 1}. Set data.seq_len={length - 1}, or cut it anew: gptworks convert {store.file} PREFIX "
                "--to megatron; data.too_long: truncate cuts longer rows off."
            )

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, number: int) -> Sample:
        ((begin, end),) = self.spans(number)
        return Sample(self.store.tokens[begin:end].astype(np.int64), None)

    def spans(self, number: int) -> list[tuple[int, int]]:
        begin, end = self.store.sequence_starts[self.rows[number] : self.rows[number] + 2].tolist()
        return [(begin, min(end, begin + self.seq_len + 1))]


class Examples:
    """One prompt and completion per sample, padded on the right; only the completion is scored."""

    def __init__(self, store: Store, documents: range, seq_len: int, too_long: str) -> None:
        self.store = store
        self.seq_len = seq_len
        pieces = np.diff(store.contents.documents)
        if store.sidecar is None or store.sidecar.eod_id is None or (pieces != 2).any():
            raise DataError(
                f"{store.located.sidecar}: says prompts and completions, but document {int((pieces != 2).argmax())} of "
                "the store is not such a pair, or the end-of-document token is missing. Prepare the data again."
            )
        self.pad = store.sidecar.eod_id
        lengths = np.diff(store.document_starts)[documents.start : documents.stop]
        over = np.flatnonzero(lengths > seq_len + 1)
        if len(over) and too_long == "refuse":
            raise DataError(
                f"{store.file}: {len(over)} of {len(lengths)} examples do not fit data.seq_len + 1 = "
                f"{seq_len + 1} tokens "
                f"(longest {lengths.max()}, first is document {documents[int(over[0])]}). "
                f"Set data.seq_len={lengths.max() - 1}, or data.too_long: truncate or skip."
            )
        done = {"truncate": "cut off", "skip": "left out"}.get(too_long)
        of_all = f"{len(over)} of {len(lengths)} examples"
        self.note = f"{store.file}: {of_all} are longer than {seq_len + 1} tokens and are {done}" if len(over) else ""
        keep = np.ones(len(lengths), dtype=bool)
        if too_long == "skip":
            keep[over] = False
        self.numbers = np.flatnonzero(keep) + documents.start

    def __len__(self) -> int:
        return len(self.numbers)

    def sample(self, number: int) -> Sample:
        first_sequence = self.store.contents.documents[self.numbers[number]]
        begin, completion, end = self.store.sequence_starts[first_sequence : first_sequence + 3]
        text = self.store.tokens[begin:end][: self.seq_len + 1]
        tokens = np.full(self.seq_len + 1, self.pad, dtype=np.int64)
        tokens[: len(text)] = text
        scored = np.zeros(self.seq_len, dtype=bool)
        scored[max(0, completion - begin - 1) : max(0, len(text) - 1)] = True
        return Sample(tokens, scored)

    def spans(self, number: int) -> list[tuple[int, int]]:
        """The prompt and the completion, without what pads them."""
        document = self.numbers[number]
        begin, end = self.store.document_starts[document : document + 2].tolist()
        return [(begin, min(end, begin + self.seq_len + 1))]


class Samples:
    """An endless, ordered stream over one split of all stores: sample i depends on the seed and i alone.

    Without weights the sources are one long list, and an epoch has each of its samples once.
    """

    def __init__(self, sources: list[Source], stages: Sequence[Stage], *, seed: int, shuffled: bool) -> None:
        """`stages`: the weights of the sources, from which sample on; none = no weights."""
        self.sources = sources
        self.mixture = Mixture(stages, seed) if stages and len(sources) > 1 else None
        self.seed = seed
        self.shuffled = shuffled
        self.starts = np.cumsum([0, *(len(source) for source in sources)])

    @property
    def per_epoch(self) -> int:
        return int(self.starts[-1])

    def at(self, first: int, count: int) -> list[Sample]:
        return [self.sources[source].sample(number) for source, number in self.where(first, count)]

    def where(self, first: int, count: int) -> list[tuple[int, int]]:
        index = np.arange(first, first + count)
        if self.mixture:
            which, numbers = self.mixture.where(index)
            places = np.empty_like(numbers)
            for k in np.unique(which):
                here = which == k
                places[here] = self._places(numbers[here], len(self.sources[k]), int(k))
        else:
            in_list = self._places(index, self.per_epoch, 0)
            which = np.searchsorted(self.starts, in_list, side="right") - 1
            places = in_list - self.starts[which]
        return list(zip(which.tolist(), places.tolist(), strict=True))

    def _places(self, numbers: np.ndarray, size: int, list_number: int) -> np.ndarray:
        """Places in a list of `size` samples that is gone through again and again, each time in another order."""
        epochs, places = np.divmod(numbers, size)
        if self.shuffled:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                places[here] = order.permute_nearby(places[here], size, self.seed, list_number, int(epoch))
        return places


def build_samples(stores: list[Store], split: str, cfg: DataConfig, seed: int, stages: Sequence[Stage] = ()) -> Samples:
    """The samples of one split ("train", "held_out" or "test"). Evaluation splits are read in order, store by store.

    `stages`: instead of the weights of the configuration.
    """
    if split != "train":
        return Samples(_sources_to_measure(stores, split, cfg), (), seed=seed, shuffled=False)
    sources = [build_source(store, split, cfg) for store in stores]
    stages = stages or ([Stage(0, cfg.weights)] if cfg.weights else [])
    return Samples(sources, stages, seed=seed, shuffled=cfg.order == "shuffled")


def _sources_to_measure(stores: list[Store], split: str, cfg: DataConfig) -> list[Source]:
    """The sources of those stores that have anything in this split."""
    empty = empty_stores(stores, split, cfg)
    if len(empty) == len(stores):
        raise empty[0]
    return [build_source(store, split, cfg) for number, store in enumerate(stores) if number not in empty]


def empty_stores(stores: list[Store], split: str, cfg: DataConfig) -> dict[int, EmptySplitError]:
    """The stores, by number, that have no sample in this split, and why."""
    empty: dict[int, EmptySplitError] = {}
    for number, store in enumerate(stores):
        try:
            build_source(store, split, cfg)
        except EmptySplitError as error:
            empty[number] = error
    return empty


def build_source(store: Store, split: str, cfg: DataConfig) -> Source:
    which = SPLITS.index(split)
    if not store.contents.has_documents:
        # A bare stream has no documents to share out: its tokens are.
        borders = boundaries(cfg.split, len(store.tokens))
        is_left_out = False
        source: Source = Windows(store.tokens, cfg.seq_len, borders[which], borders[which + 1])
        amount = f"{borders[which + 1] - borders[which]} of {counted(len(store.tokens), 'token')}"
    else:
        borders = boundaries(cfg.split, store.num_documents)
        documents = range(borders[which], borders[which + 1])
        source = _source_of_documents(store, documents, cfg)
        tokens = int(store.document_starts[documents.stop] - store.document_starts[documents.start])
        is_left_out = not documents and store.num_documents == 1
        amount = f"{len(documents)} of {counted(store.num_documents, 'document')} and {counted(tokens, 'token')}"
    if not len(source):
        raise EmptySplitError(
            f"{store.file}: the {split} split has {amount}; one sample needs {cfg.seq_len + 1}. "
            + _more_text(cfg, split, is_left_out)
        )
    return source


def _more_text(cfg: DataConfig, split: str, is_left_out: bool) -> str:
    """What to do about an empty split. `is_left_out`: the only document of the store is in another one."""
    shares = f"data.split (now {','.join(f'{share:g}' for share in cfg.split)})"
    if is_left_out:
        return (
            "One document cannot be divided: give held-out text of its own (data.held_out_path), or prepare it as "
            "several documents (`gptworks prepare --doc-separator`)."
        )
    apart = ", or held-out text of its own (data.held_out_path)" if split == "held_out" else ""
    return f"Use more text, a smaller data.seq_len, {'' if apart else 'or '}another {shares}{apart}."


def _source_of_documents(store: Store, documents: range, cfg: DataConfig) -> Source:
    if store.sidecar and store.sidecar.kind == "examples":
        return Examples(store, documents, cfg.seq_len, cfg.too_long)
    if store.contents.is_rows:
        return Rows(store, documents, cfg.seq_len, cfg.too_long)
    starts = store.document_starts
    return Windows(store.tokens, cfg.seq_len, int(starts[documents.start]), int(starts[documents.stop]))
