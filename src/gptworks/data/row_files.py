"""Rows of parquet and arrow files, of which only the columns that are asked for are read."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gptworks.data import bounded_rows
from gptworks.data.text_files import TextStream
from gptworks.errors import DataError

_ARROW_FILE = b"ARROW1"  # the kind with an index at its end; `datasets` writes the other, a stream


def rows(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Any]:
    """One value per row, or one tuple where there are two keys."""
    with _pyarrow_errors(stream):
        batches = _parquet(stream, keys) if stream.kind == "parquet" else _arrow(stream, keys)
        file_bytes = stream.path.stat().st_size if stream.path is not None else 0
        for row in bounded_rows.values(batches, keys, stream.name, file_bytes):
            yield row[0] if len(keys) == 1 else row


@contextmanager
def _pyarrow_errors(stream: TextStream) -> Iterator[None]:
    try:
        from pyarrow.lib import ArrowException
    except ImportError:
        raise DataError(
            f'{stream.name}: reading .{stream.kind} needs a package: pip install "gptworks[interop]".'
        ) from None
    try:
        yield
    except (ArrowException, OSError) as error:
        raise DataError(f"{stream.name}: not a readable {stream.kind} file ({error}). Copy it again.") from None


def _parquet(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow.parquet

    if stream.path is None:
        raise DataError(f"{stream.name}: a parquet file is read from its end, so not from an archive. Unpack it first.")
    with pyarrow.parquet.ParquetFile(stream.path) as table:
        _require_columns(stream, table.schema_arrow.names, keys)
    yield from bounded_rows.parquet_batches(stream.path, keys, stream.name)


def _arrow(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow

    if stream.file.peek(8)[:6] == _ARROW_FILE:  # type: ignore[attr-defined]
        if stream.path is None:
            raise DataError(
                f"{stream.name}: an arrow file with an index is read from its end, so not from an archive. Unpack it "
                "first."
            )
        with pyarrow.ipc.open_file(stream.path) as table:
            _require_columns(stream, table.schema.names, keys)
            yield from (table.get_batch(number) for number in range(table.num_record_batches))
        return
    with pyarrow.ipc.open_stream(stream.file) as batches:
        _require_columns(stream, batches.schema.names, keys)
        yield from batches


def _require_columns(stream: TextStream, names: Iterable[str], keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if key not in names]
    if missing:
        raise DataError(f"{stream.name}: no column '{missing[0]}'. Columns: {', '.join(names)}. Choose one with --key.")
