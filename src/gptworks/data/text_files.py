"""Where text is found: files, folders, archives within archives and standard input, opened one stream at a time."""

import bz2
import gzip
import io
import lzma
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, cast

from gptworks.data import sample_corpus
from gptworks.errors import DataError

Kind = Literal["text", "jsonl", "json", "wikitext", "parquet", "sample"]

STDIN = "-"
_KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",  # one array, or one object a line: its first byte tells
    ".tokens": "wikitext",
    ".raw": "wikitext",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_ARCHIVES = (".tar", ".tgz", ".txz")
_TAR_MAGIC_AT = 257


@dataclass(frozen=True)
class TextStream:
    """One stream of text. `path` is set when it is a plain file, which several readers may open at once."""

    name: str  # for messages; "archive.tar!member.txt" within an archive
    kind: Kind
    file: IO[bytes]
    position: Callable[[], int]  # bytes of the inputs read so far, compressed as they are
    path: Path | None = None


@dataclass(frozen=True)
class InputFile:
    """A file as the user named it, or found in a folder that the user named."""

    name: str
    path: Path | None  # None: standard input or a sample
    size: int = 0
    modified: int = 0


def list_inputs(inputs: list[str], kind: str = "auto") -> tuple[list[InputFile], list[str]]:
    """Every input file in order, folders walked and sorted; and the files in folders that are no known kind of text.

    All unusable inputs are complained about at once, before any work is done.
    """
    found: list[InputFile] = []
    passed_over: list[str] = []
    problems = []
    for name in inputs:
        path = Path(name)
        if name.startswith(sample_corpus.PREFIX):
            sample_corpus.check(name)
            found.append(InputFile(name, None))
        elif name == STDIN:
            found.append(InputFile(name, None))
        elif path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
            known = [file for file in inside if _is_known(file.name)]
            passed_over += [str(file) for file in inside if not _is_known(file.name)]
            if not known:
                problems.append(f"{name}: no text in this folder. Needed: files ending in {_known_names()}.")
            found += [_input_file(file) for file in known]
        elif not path.exists():
            problems.append(f"{name}: no such file. Check the path.")
        elif kind == "auto" and not _is_known(path.name):
            problems.append(
                f"{name}: kind of file not known from its name. Needed: {_known_names()}, or "
                f"{sample_corpus.PREFIX}NAME; or say what it is with --input-format."
            )
        else:
            found.append(_input_file(path))
    if problems:
        raise DataError("\n".join(problems))
    if sum(each.name == STDIN for each in found) > 1:
        raise DataError("- (standard input): given twice, but it can be read only once.")
    return found, passed_over


def open_streams(files: list[InputFile], kind: str, passed_over: list[str]) -> Iterator[TextStream]:
    """The text in these files, one stream after another. `kind` overrides what names say, unless it is "auto".

    Members of archives that are no known kind of text are added to `passed_over`.
    """
    done = 0
    for each in files:
        if each.name == STDIN:
            start: Callable[[], int] = partial(int, done)
            yield from _within("<stdin>", _Filled(sys.stdin.buffer, "<stdin>"), kind, start, None, passed_over)
        elif each.path is None:
            yield TextStream(each.name, "sample", io.BytesIO(), partial(int, done))
        else:
            try:
                raw = each.path.open("rb")
            except OSError as error:
                raise DataError(f"{each.name}: cannot be read ({error.strerror}).") from None
            with raw:
                yield from _within(each.name, raw, kind, partial(_place, raw, done), each.path, passed_over)
        done += each.size


def _place(raw: IO[bytes], before: int) -> int:
    return before + raw.tell()


def _within(
    name: str,
    raw: io.RawIOBase | IO[bytes],
    kind: str,
    position: Callable[[], int],
    path: Path | None,
    passed_over: list[str],
) -> Iterator[TextStream]:
    """The text inside a stream: itself, or what is in it when it is compressed or an archive."""
    file = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, 1 << 20)  # type: ignore[type-var]
    start = file.peek(512)[:512]
    opened = _decompressed(start, file, name)
    if opened is not None:
        yield from _within(name, opened, kind, position, None, passed_over)
    elif start[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        yield from _tar_members(name, file, kind, position, passed_over)
    elif kind == "auto" and "!" in name and not _is_known(name):
        passed_over.append(name)
    else:
        yield TextStream(name, _kind_of(name, kind, start), file, position, path)


def _kind_of(name: str, kind: str, start: bytes) -> Kind:
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if kind == "auto" and name == "<stdin>":
        known: Kind = "json" if first in (b"{", b"[") else "text"
    else:
        known = cast(Kind, kind) if kind != "auto" else _kind_of_name(name) or "text"
    return "jsonl" if known == "json" and first != b"[" else known


def _tar_members(
    name: str, file: IO[bytes], kind: str, position: Callable[[], int], passed_over: list[str]
) -> Iterator[TextStream]:
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                inner = archive.extractfile(member) if member.isfile() else None
                if inner is not None and not Path(member.name).name.startswith("."):
                    yield from _within(f"{name}!{member.name}", inner, kind, position, None, passed_over)
    except tarfile.TarError as error:
        raise DataError(f"{name}: the archive is damaged or cut off ({error}). Copy it again.") from None


def _decompressed(start: bytes, file: IO[bytes], name: str) -> io.RawIOBase | None:
    if start.startswith(b"\x1f\x8b"):
        return _Filled(gzip.GzipFile(fileobj=file), name)
    if start.startswith(b"\xfd7zXZ\x00"):
        return _Filled(lzma.LZMAFile(file), name)
    if start.startswith(b"BZh"):
        return _Filled(bz2.BZ2File(file), name)
    # The second is a skippable frame, with which some tools begin.
    if start.startswith(b"\x28\xb5\x2f\xfd") or (start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F):
        return _Filled(_Zstandard(file, name), name)
    return None


class _Filled(io.RawIOBase):
    """Reads as much as is asked for, where pipes and decompressors give less; answers damage in our own words."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        filled = 0
        while filled < len(buffer):
            data = self._more(len(buffer) - filled)
            if not data:
                break
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def _more(self, size: int) -> bytes:
        try:
            data: bytes = self.inner.read(size) or b""
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise DataError(
                f"{self.name}: the compressed data is damaged or cut off after {self.count} bytes of text ({error}). "
                "Copy it again."
            ) from None
        self.count += len(data)
        return data


class _Zstandard(io.RawIOBase):
    """Frames one after another, as parallel compressors write them. The library's own reader would take a cut-off
    file for a whole one."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(f'{name}: reading .zst needs a package: pip install "gptworks[interop]".') from None
        self.file = file
        self.errors = zstandard.ZstdError
        # OpenWebText2 and others were written with long windows.
        self.new_frame = lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
        self.frame = self.new_frame()
        self.in_frame = False
        self.ready = b""
        self.left = b""

    def read(self, size: int = -1) -> bytes:
        while not self.ready:
            data = self.left or self.file.read(1 << 17)
            self.left = b""
            if not data:
                if self.in_frame:
                    raise EOFError("the last frame has no end")
                return b""
            self.in_frame = True
            try:
                self.ready = self.frame.decompress(data)
            except self.errors as error:
                raise OSError(str(error)) from None
            if self.frame.eof:
                self.left, self.in_frame = self.frame.unused_data, False
                self.frame = self.new_frame()
        part, self.ready = self.ready[:size], self.ready[size:]
        return part


def _input_file(path: Path) -> InputFile:
    stat = path.stat()
    return InputFile(str(path), path, stat.st_size, stat.st_mtime_ns)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _kind_of_name(name: str) -> Kind | None:
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return _KINDS.get(Path(name).suffix.lower())


def _is_known(name: str) -> bool:
    """Whatever is compressed is taken for text or an archive until it is opened."""
    return _kind_of_name(name) is not None or name.lower().endswith((*_ARCHIVES, *_COMPRESSED))


def _known_names() -> str:
    return f"{', '.join(_KINDS)}, any of them with {', '.join(_COMPRESSED)}, or {', '.join(_ARCHIVES)}"
