"""A dataset from one format to another, streamed: tokens are never all in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gptworks import staging_folder
from gptworks.data.formats.contents import Contents, Tokens, as_rows, blocks, document_starts
from gptworks.data.formats.registry import FORMATS, Format, Located, locate, mains
from gptworks.data.inspect import damage_in
from gptworks.data.publish import check_row_length, describe, output_prefix, publish
from gptworks.data.store import Sidecar, Store, locate_stores
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer


@dataclass(frozen=True)
class Converted:
    sources: list[Located]
    files: list[Path]
    documents: int
    tokens: int
    notes: list[str]


def convert(
    sources: list[str],
    destination: str | Path,
    to: Format,
    *,
    from_format: Format | None = None,
    tokenizer: Tokenizer | None = None,
    row_length: int | None = None,
    verify: bool = False,
) -> Converted:
    """Read the datasets and write them as one. Nothing appears at `destination` before all of it is there.

    `tokenizer`: of sources that do not say; it also tells where the documents of a bare stream end.
    """
    stores = [Store(each) for source in sources for each in located(source, from_format)]
    prefix = output_prefix(destination)
    check_row_length(to, row_length, "--to")
    notes: list[str] = []
    sidecar, tokenizer = _common_sidecar(stores, tokenizer)
    if sidecar and sidecar.kind == "examples" and not to.KEEPS_SEQUENCES:
        able = ", ".join(name for name, format_ in FORMATS.items() if format_.KEEPS_SEQUENCES)
        raise DataError(
            f"{stores[0].file}: holds prompts and completions, which {to.NAME} cannot keep apart. Use one of {able}."
        )
    # A new sidecar would vouch for what is wrong already.
    if problems := [each for store in stores for each in damage_in(store, tokenizer, checksums=verify)]:
        raise DataError("\n".join([*problems, "It is damaged, or --tokenizer is not the one it was made with."]))
    contents = _joined([_with_documents(store.contents, tokenizer, store, notes) for store in stores])
    if row_length is not None:
        left = contents.num_tokens % row_length
        contents = as_rows(contents, row_length, stores[0].file)
        if left:
            notes.append(f"the last {left:,} tokens do not fill a row of {row_length} and are left out")
    elif to.NEEDS_ROWS and not contents.is_rows:
        raise DataError(f"--to {to.NAME}: its rows are training samples. Needed: --row-length, seq_len + 1.")
    if to.LARGEST_ID is not None and contents.has_documents:
        marked = "only the end-of-document token" if sidecar and sidecar.eod_appended else "nothing"
        notes.append(f"{to.NAME} keeps no document borders: {marked} marks them")
    if sidecar is None:
        notes.append("the tokenizer is not known, so no sidecar is written; --tokenizer names it")
    with _staging(prefix) as folder:
        written = to.write(folder / prefix.name, contents, sidecar.vocab_size if sidecar else None)
        if verify:
            _compare(contents, [to.read(main) for main in mains(to, written)], to, prefix)
        _refuse_own_source(written, prefix, stores)
        files = publish(written, {}, contents, prefix, to, sidecar, tokenizer, notes)
    return Converted([store.located for store in stores], files, contents.num_documents, contents.num_tokens, notes)


def located(source: str, from_format: Format | None) -> list[Located]:
    if from_format is None:
        return locate_stores(source)
    main = from_format.find(Path(source))
    if main is None:
        dataset = locate(Path(source))
        raise DataError(f"{source}: --from {from_format.NAME}, but it is of format {dataset.format.NAME}.")
    return [Located(from_format, main)]


def _common_sidecar(stores: list[Store], named: Tokenizer | None) -> tuple[Sidecar | None, Tokenizer | None]:
    """What is known of all sources together, and their tokenizer."""
    described = [store for store in stores if store.sidecar]
    if described and len(described) < len(stores) and named is None:
        without = next(store for store in stores if not store.sidecar)
        raise DataError(
            f"{without.file}: its tokenizer is not known, that of {described[0].file} is. Name it with --tokenizer, "
            "or convert them one by one."
        )
    if described:
        tokenizer = described[0].load_tokenizer() or named
        sidecars = [store.sidecar for store in described if store.sidecar]
        for store, sidecar in zip(described, sidecars, strict=True):
            if tokenizer:
                tokenizer.require(sidecar.tokenizer_identity, source=str(store.file))
            if named:
                named.require(sidecar.tokenizer_identity, source=str(store.file))
            if (sidecar.kind, sidecar.eod_id) != (sidecars[0].kind, sidecars[0].eod_id):
                raise DataError(
                    f"{store.file}: holds {sidecar.kind} ending with id {sidecar.eod_id}, but {described[0].file} "
                    f"holds {sidecars[0].kind} ending with {sidecars[0].eod_id}. Convert them one by one."
                )
        return replace(sidecars[0], eod_appended=all(each.eod_appended for each in sidecars)), tokenizer
    named = named or stores[0].load_tokenizer()
    if named is None:
        return None, None
    for store in stores:
        if beside := store.load_tokenizer():
            named.require(beside.identity, source=f"{store.file} ({beside.name})")
    return describe(named, kind="text", eod_appended=all(_ends_with_eod(store, named) for store in stores)), named


def _ends_with_eod(store: Store, tokenizer: Tokenizer) -> bool:
    """Whether documents end with the end-of-document token, judged by the first thousand."""
    if tokenizer.eod_id is None:
        return False
    if not store.contents.has_documents:
        return bool((store.tokens[: 1 << 20] == tokenizer.eod_id).any())
    ends = store.document_starts[1:1001]
    return bool(len(ends)) and all(
        int(end) > 0 and int(store.tokens[int(end) - 1 : int(end)][0]) == tokenizer.eod_id for end in ends
    )


def _with_documents(contents: Contents, tokenizer: Tokenizer | None, store: Store, notes: list[str]) -> Contents:
    """A bare stream cut after each end-of-document token, when that is known."""
    if contents.has_documents:
        return contents
    eod_id = tokenizer.eod_id if tokenizer else None
    if eod_id is None:
        notes.append(f"{store.file}: where its documents end is not known; --tokenizer would tell. Kept as one")
        return contents
    ends, before = [], 0
    for block in blocks(contents.tokens, contents.tokens.dtype, store.file):
        ends.append(np.flatnonzero(block == eod_id).astype(np.int64) + before + 1)
        before += len(block)
    borders = np.unique(np.concatenate([[0], *ends, [contents.num_tokens]]))
    sizes = np.diff(borders)
    return Contents(contents.tokens, sizes, np.arange(len(sizes) + 1, dtype=np.int64))


class _JoinedTokens:
    """The tokens of several datasets in a row."""

    def __init__(self, streams: list[Tokens]) -> None:
        self.streams = streams
        self.starts = np.cumsum([0, *(len(stream) for stream in streams)])
        self.dtype = np.result_type(*(stream.dtype for stream in streams))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        first, end, _ = where.indices(len(self))
        pieces = [
            stream[max(0, first - start) : max(0, end - start)].astype(self.dtype, copy=False)
            for stream, start in zip(self.streams, self.starts.tolist(), strict=False)
            if start < end and first < start + len(stream)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])


def _joined(datasets: list[Contents]) -> Contents:
    if len(datasets) == 1:
        return datasets[0]
    before = np.cumsum([0, *(len(dataset.sizes) for dataset in datasets)])
    documents = [dataset.documents[1:] + start for dataset, start in zip(datasets, before, strict=False)]
    return Contents(
        _JoinedTokens([dataset.tokens for dataset in datasets]),
        np.concatenate([dataset.sizes for dataset in datasets]),
        np.concatenate([[0], *documents]).astype(np.int64),
        has_documents=all(dataset.has_documents for dataset in datasets),
        is_rows=all(dataset.is_rows for dataset in datasets),
    )


@contextmanager
def _staging(prefix: Path) -> Iterator[Path]:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder.beside(prefix) as folder:
        yield folder


def _refuse_own_source(written: list[Path], prefix: Path, stores: list[Store]) -> None:
    sources = {file.resolve() for store in stores for file in store.located.files}
    for file in written:
        if prefix.with_name(file.name).resolve() in sources:
            raise DataError(f"{prefix.with_name(file.name)}: is the source itself. Choose another destination.")


def _compare(contents: Contents, written: list[Contents], format_: Format, prefix: Path) -> None:
    """Every token again, and every border that the format keeps."""
    whole = _joined(written)
    if len(whole.tokens) != len(contents.tokens):
        raise DataError(f"{prefix}: {len(whole.tokens)} tokens came back of {len(contents.tokens)}: nothing is kept.")
    step = 1 << 22
    for start in range(0, len(contents.tokens), step):
        before, after = contents.tokens[start : start + step], whole.tokens[start : start + step]
        if not np.array_equal(before, after):
            where = start + int(np.flatnonzero(before != after)[0])
            raise DataError(f"{prefix}: token {where} came back different: nothing is kept.")
    if format_.KEEPS_SEQUENCES and not np.array_equal(whole.sizes, contents.sizes):
        raise DataError(f"{prefix}: the lengths of sequences came back different: nothing is kept.")
    # A document without tokens may be lost on the way.
    before, after = (np.unique(document_starts(each)) for each in (contents, whole))
    if whole.has_documents and not np.array_equal(before, after):
        raise DataError(f"{prefix}: the borders of documents came back different: nothing is kept.")
