"""Rows of parquet and arrow files, of which only the columns that are asked for are read."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from gptworks.data import bounded_rows
from gptworks.data.columns import advice, all_columns
from gptworks.data.text_files import TextStream
from gptworks.errors import DataError

_PIECE_BYTES = 4 << 20
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
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{stream.name}: not a readable {stream.kind} file ({error}). Copy it again.") from None


def _parquet(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow.parquet

    if stream.path is None:
        raise DataError(f"{stream.name}: a parquet file is read from its end, so not from an archive. Unpack it first.")
    with pyarrow.parquet.ParquetFile(stream.path) as table:
        columns = _columns(stream, table.schema_arrow.names, keys)
    yield from bounded_rows.parquet_batches(stream.path, columns, stream.name)


def _arrow(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow

    if stream.file.peek(8)[:6] == _ARROW_FILE:  # type: ignore[attr-defined]
        if stream.path is None:
            raise DataError(
                f"{stream.name}: an arrow file with an index is read from its end, so not from an archive. Unpack it "
                "first."
            )
        with pyarrow.ipc.open_file(stream.path) as table:
            columns = _columns(stream, table.schema.names, keys)
            yield from (_sound(table.get_batch(number), columns) for number in range(table.num_record_batches))
        return
    with pyarrow.ipc.open_stream(_InPieces(stream.file)) as batches:
        columns = _columns(stream, batches.schema.names, keys)
        yield from (_sound(batch, columns) for batch in batches)


class _InPieces(io.RawIOBase):
    """A file of which no more is set aside than there is, however much an arrow file says that it has."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        pieces: list[bytes] = []
        while size and (piece := self._file.read(_PIECE_BYTES if size < 0 else min(size, _PIECE_BYTES))):
            pieces.append(piece)
            size -= len(piece) if size > 0 else 0
        return b"".join(pieces)


def _sound(batch: Any, columns: tuple[str, ...]) -> Any:
    """The library believes what an arrow file says of where its texts lie; what is not so would be read all the same.

    Whether texts are UTF-8 is asked later, of each.
    """
    for name in columns:
        column = batch.column(name)
        column.validate()
        parts = [column.indices, column.dictionary] if hasattr(column, "dictionary") else [column]
        for part in parts:
            _as_bytes(part).validate(full=True)
        if hasattr(column, "dictionary"):
            type(column).from_arrays(column.indices, _as_bytes(column.dictionary))  # refuses indices that lie outside
    return batch


def _as_bytes(column: Any) -> Any:
    import pyarrow

    same = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    return column.view(same[column.type]) if column.type in same else column


def _columns(stream: TextStream, names: list[str], keys: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that are read for these keys."""
    columns = all_columns(keys, names)
    missing = [column for column in columns if column not in names]
    if missing:
        listed = f"no column '{missing[0]}'. Columns: {', '.join(names)}"
        raise DataError(f"{stream.name}: {listed}. {advice(missing[0], names)}")
    return columns
