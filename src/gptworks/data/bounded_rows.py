"""Rows of parquet and arrow files, a few megabytes at a time, however much a small file says it holds.

A text that is repeated is stored once, and pages are compressed: what comes out is measured before it is built.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptworks import limits
from gptworks.data.columns import all_columns, texts
from gptworks.errors import DataError

_ROWS = 1024  # read at a time; fewer where they are long
_PIECE_BYTES = 4 << 20  # of texts, built at a time
_HARMLESS_BYTES = 64 << 20


def values(batches: Iterable[Any], keys: tuple[str, ...], name: str, file_bytes: int) -> Iterator[tuple[Any, ...]]:
    """The values of these keys, each of one column or of several. Texts that are not UTF-8 are bytes.

    `file_bytes`: of the file; 0 where not known.
    """
    text_bytes = 0
    for batch in batches:
        text_bytes += batch.num_rows  # a row without a text is a line without one: it takes its time
        if file_bytes:
            _require_little_text(text_bytes, file_bytes, name)
        columns = all_columns(keys, batch.schema.names)
        for piece, size in _pieces(batch, [_sizes(batch.column(column)) for column in columns], name):
            text_bytes += size
            if file_bytes:
                _require_little_text(text_bytes, file_bytes, name)
            rows = zip(*(_values(piece.column(column)) for column in columns), strict=True)
            if columns == keys:
                yield from rows
            else:
                records = (texts(dict(zip(columns, row, strict=True)), keys) for row in rows)
                yield from (tuple(each[key] for key in keys) for each in records)


def parquet_batches(path: Path, keys: tuple[str, ...], name: str) -> Iterator[Any]:
    """With texts as dictionaries: one that is repeated stays one text until its rows are looked at."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        _require_texts(table.schema_arrow, name, keys)
        _require_little_expansion(table, name, keys)
        _require_little_text(table.metadata.num_rows, path.stat().st_size, name)
    with pyarrow.parquet.ParquetFile(path, read_dictionary=list(keys)) as table:
        yield from table.iter_batches(batch_size=_batch_rows(table, keys), columns=list(keys))


def _require_texts(schema: Any, name: str, keys: tuple[str, ...]) -> None:
    import pyarrow

    for key in keys:
        if pyarrow.types.is_nested(schema.field(key).type):
            raise DataError(
                f"{name}: column '{key}' holds {schema.field(key).type}, needed text. Choose another with --key."
            )


def _chunks(table: Any, keys: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    """(rows, what the file says of one column in one group of rows)"""
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        for index in range(group.num_columns):
            if group.column(index).path_in_schema in keys:
                yield group.num_rows, group.column(index)


def _require_little_expansion(table: Any, name: str, keys: tuple[str, ...]) -> None:
    """A page is unpacked as a whole by the library."""
    most = limits.EXPANSION.value
    for _, chunk in _chunks(table, keys):
        packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
        if unpacked > max(_HARMLESS_BYTES, most * packed):
            raise DataError(
                f"{name}: column '{chunk.path_in_schema}' has {unpacked:,} bytes packed into {packed:,}, more than "
                f"{most} for each, which no text gives. {limits.EXPANSION.advice(2 * unpacked // max(1, packed))}"
            )


def _require_little_text(text_bytes: int, file_bytes: int, name: str) -> None:
    most = limits.EXPANSION.value
    if text_bytes > max(_HARMLESS_BYTES, most * file_bytes):
        advice = limits.EXPANSION.advice(4 * text_bytes // max(1, file_bytes))
        raise DataError(
            f"{name}: {text_bytes:,} rows and bytes of text came out of {file_bytes:,}, more than {most} for each: the "
            f"same texts are repeated, or rows are empty. {advice}"
        )


def _batch_rows(table: Any, keys: tuple[str, ...]) -> int:
    longest = max((chunk.total_uncompressed_size // max(1, rows) for rows, chunk in _chunks(table, keys)), default=0)
    return max(1, min(_ROWS, 4 * _PIECE_BYTES // max(1, longest)))


def _sizes(column: Any) -> Any:
    """Bytes of each value; None where it is no text."""
    import pyarrow
    import pyarrow.compute as compute

    types = pyarrow.types
    if isinstance(column, pyarrow.DictionaryArray):
        sizes = compute.binary_length(column.dictionary).take(column.indices)
    elif any(
        check(column.type) for check in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    ):
        sizes = compute.binary_length(column)
    else:
        return None
    return sizes.fill_null(0).to_numpy(zero_copy_only=False)


def _pieces(batch: Any, columns: list[Any], name: str) -> Iterator[tuple[Any, int]]:
    """Slices of a batch of some megabytes of text, and how many bytes that is."""
    texts = [sizes for sizes in columns if sizes is not None]
    most = limits.DOCUMENT_BYTES.value
    whole = sum(int(sizes.sum()) for sizes in texts)
    if whole <= min(_PIECE_BYTES, most):
        yield batch, whole
        return
    start, total = 0, 0
    for row in range(batch.num_rows):
        size = int(sum(int(sizes[row]) for sizes in texts))
        if size > most:
            raise DataError(
                f"{name}: a row of {size:,} bytes; one document may have at most {most:,}. Cut it into several, or "
                f"look at what it is. {limits.DOCUMENT_BYTES.advice(size)}"
            )
        if total and total + size > _PIECE_BYTES:
            yield batch.slice(start, row - start), total
            start, total = row, 0
        total += size
    yield batch.slice(start), total


def _values(column: Any) -> list[Any]:
    """The library checks the UTF-8 of texts only when they are taken out, all at once. A broken one stays bytes."""
    import pyarrow

    if isinstance(column, pyarrow.DictionaryArray):
        column = column.dictionary_decode()
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pyarrow.large_binary()).to_pylist()
        for number, value in enumerate(values):
            with suppress(UnicodeDecodeError):
                values[number] = value if value is None else value.decode()
    return values
