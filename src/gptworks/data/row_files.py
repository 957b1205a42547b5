"""Rows of parquet and arrow files, of which only the columns that are asked for are read."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gptworks.data.text_files import TextStream
from gptworks.errors import DataError

_ARROW_FILE = b"ARROW1"  # the kind with an index at its end; `datasets` writes the other, a stream


def rows(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Any]:
    """One value per row, or one tuple where there are two keys."""
    with _pyarrow_errors(stream):
        batches = _parquet(stream, keys) if stream.kind == "parquet" else _arrow(stream, keys)
        for batch in batches:
            columns = [_column(batch, key) for key in keys]
            yield from columns[0] if len(keys) == 1 else zip(*columns, strict=True)


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
        yield from table.iter_batches(batch_size=1024, columns=list(keys))


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


def _column(batch: Any, key: str) -> list[Any]:
    """The library checks the UTF-8 of texts only when they are taken out, all at once. A broken one stays bytes."""
    import pyarrow

    column = batch.column(key)
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pyarrow.large_binary()).to_pylist()
        for number, value in enumerate(values):
            with suppress(UnicodeDecodeError):
                values[number] = value if value is None else value.decode()
    return values
