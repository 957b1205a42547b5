"""Where text is found: files, folders, archives within archives and standard input, opened one stream at a time."""

import bz2
import gzip
import io
import lzma
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

from gptworks import file_errors, limits
from gptworks.data import hf_folder, sample_corpus
from gptworks.errors import DataError

Kind = Literal["text", "jsonl", "json", "wikitext", "csv", "tsv", "parquet", "arrow", "sample"]

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
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_ARCHIVES = (".tar", ".tgz", ".txz")
_TAR_MAGIC_AT = 257
_BZIP2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")  # a block, or the end of an empty file
_FRAME_BYTES = 4096  # at 32,000 to 1, the most that zstandard can pack, these make 130 MB
_BUFFER_BYTES = 1 << 20
_HARMLESS_BYTES = 64 << 20  # out of a compressed file, however small it is
_XZ_MEMORY = 1 << 30  # for a dictionary; `xz -9` needs 65 MB
_TAR_HEADER_BYTES = 1 << 20  # of an extended header: names, owners, dates
_EXTENDED_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


@dataclass(frozen=True)
class TextStream:
    """One stream of text. `path` is set when it is a plain file, which several readers may open at once."""

    name: str  # for messages; "archive.tar!member.txt" within an archive
    kind: Kind
    file: IO[bytes]
    position: Callable[[], int]  # bytes of the inputs read so far, compressed as they are
    path: Path | None = None


@dataclass(frozen=True)
class _Source:
    """What an input and all that is packed in it have in common."""

    kind: str  # that the user says it is; "auto": by its name
    passed_over: list[str]
    position: Callable[[], int]  # as in TextStream
    taken: Callable[[], int]  # bytes of this input read so far


@dataclass(frozen=True)
class InputFile:
    """A file as the user named it, or found in a folder that the user named."""

    name: str
    path: Path | None  # None: standard input or a sample
    size: int = 0
    modified: int = 0


def list_inputs(inputs: Sequence[str], kind: str = "auto") -> tuple[list[InputFile], list[str]]:
    """Every input file in order, folders walked and sorted; and the files in folders that are no known kind of text.

    All unusable inputs are complained about at once, before any work is done.
    """
    files: list[InputFile] = []
    passed_over: list[str] = []
    problems = []
    for name in (each for path in inputs for each in matching(path) or [path]):  # a pattern: what it matches
        path = Path(name)
        if name.startswith(sample_corpus.PREFIX):
            sample_corpus.check(name)
            files.append(InputFile(name, None))
        elif name == STDIN:
            files.append(InputFile(name, None))
        elif path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
            inside = _without_what_is_no_text(inside)
            known = [file for file in inside if _is_known(file.name) and not _is_ours(file)]
            passed_over += [str(file) for file in inside if not _is_known(file.name) or _is_ours(file)]
            if not known:
                problems.append(f"{name}: no text in this folder. Needed: files ending in {_known_names()}.")
            files += [_input_file(file) for file in known]
        elif not path.exists():
            file_errors.refuse_unreadable(path)
            problems.append(f"{name}: no such file. Check the path.")
        elif kind == "auto" and not _is_known(path.name):
            problems.append(
                f"{name}: kind of file not known from its name. Needed: {_known_names()}, or "
                f"{sample_corpus.PREFIX}NAME; or say what it is with --input-format."
            )
        else:
            files.append(_input_file(path))
    if problems:
        raise DataError("\n".join(problems))
    if sum(each.name == STDIN for each in files) > 1:
        raise DataError("- (standard input): given twice, but it can be read only once.")
    return files, passed_over


def matching(path: str) -> list[str] | None:
    """What a pattern such as `texts/*.txt` matches, in the order of names; None for the path of a file or folder."""
    if not any(sign in path for sign in "*?[") or Path(path).exists():
        return None
    root = Path(Path(path).anchor)
    return [str(each) for each in sorted(root.glob(str(Path(path).relative_to(root))))]


def is_text(path: str) -> bool:
    """Whether a path is a file or folder of text, judged by names; a folder with something else in it may be, too."""
    if (matched := matching(path)) is not None:
        return bool(matched) and all(is_text(each) for each in matched)
    if Path(path).is_dir():
        return any(_is_known(file.name) and not _is_ours(file) for file in Path(path).rglob("*") if file.is_file())
    return Path(path).is_file() and _is_known(path)


def open_streams(files: list[InputFile], kind: str, passed_over: list[str]) -> Iterator[TextStream]:
    """The text in these files, one stream after another. `kind` overrides what names say, unless it is "auto".

    Members of archives that are no known kind of text are added to `passed_over`.
    """
    done = 0
    for each in files:
        if each.name == STDIN:
            piped = _Filled(sys.stdin.buffer, "<stdin>")
            yield from _within("<stdin>", piped, _Source(kind, passed_over, partial(int, done), piped.taken))
        elif each.path is None:
            yield TextStream(each.name, "sample", io.BytesIO(), partial(int, done))
        else:
            try:
                raw = each.path.open("rb")
            except OSError as error:
                raise DataError(f"{each.name}: cannot be read ({error.strerror}).") from None
            with raw:
                if raw.seekable():
                    source = _Source(kind, passed_over, partial(_place, raw, done), raw.tell)
                    yield from _within(each.name, raw, source, each.path)
                else:  # a named pipe, such as the shell's <(...)
                    piped = _Filled(raw, each.name)
                    yield from _within(each.name, piped, _Source(kind, passed_over, partial(int, done), piped.taken))
        done += each.size


def _place(raw: IO[bytes], before: int) -> int:
    return before + raw.tell()


def _within(
    name: str,
    raw: io.RawIOBase | IO[bytes],
    source: _Source,
    path: Path | None = None,
    depth: int = 0,
    unpacked: bool = False,
) -> Iterator[TextStream]:
    """The text inside a stream: itself, or what is in it when it is compressed or an archive.

    `depth`: how many archives and compressed files it lies in. Some files hold themselves.
    """
    if depth > limits.ARCHIVE_DEPTH.value:
        raise DataError(
            f"{name}: the {depth}th archive or compressed file within another, needed at most "
            f"{limits.ARCHIVE_DEPTH.value}. Unpack it. {limits.ARCHIVE_DEPTH.advice(2 * depth)}"
        )
    file = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, _BUFFER_BYTES)  # type: ignore[type-var]
    start = file.peek(512)[:512]
    opened = _decompressed(start, file, name, source.taken)
    if opened is not None:
        yield from _within(name, opened, source, depth=depth + 1, unpacked=True)
    elif _is_tar(start):
        yield from _tar_members(name, file, source, depth)
    elif promised := _broken_promise(name, unpacked):
        raise DataError(f"{name}: named {promised}, but its content is something else or damaged. Copy it again.")
    elif source.kind == "auto" and "!" in name and not _is_known(name):
        source.passed_over.append(name)
    else:
        yield TextStream(name, _kind_of(name, source.kind, start), file, source.position, path)


def _kind_of(name: str, kind: str, start: bytes) -> Kind:
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if kind == "auto" and name == "<stdin>":
        known: Kind = "json" if first in (b"{", b"[") else "text"
    else:
        known = cast(Kind, kind) if kind != "auto" else _kind_of_name(name) or "text"
    return "jsonl" if known == "json" and first != b"[" else known


def _tar_members(name: str, file: IO[bytes], source: _Source, depth: int) -> Iterator[TextStream]:
    try:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # all are kept else, and there can be millions
                inner = archive.extractfile(member) if member.isfile() else None
                if inner is None and not member.isdir():
                    source.passed_over.append(f"{name}!{member.name}")  # a link or a device
                elif inner is not None and not any(part.startswith(".") for part in Path(member.name).parts):
                    inside = f"{name}!{member.name}"
                    held = _Filled(inner, inside, source.taken)  # of a hole, there is nothing in the archive
                    yield from _within(inside, held, source, depth=depth + 1)
    except tarfile.TarError as error:
        raise DataError(f"{name}: the archive is damaged or cut off ({error}). Copy it again.") from None
    while file.read(1 << 20):  # a compressed archive has its checksum at the very end
        pass


class _Member(tarfile.TarInfo):
    """The library takes a damaged header, and the end of a file that was cut off, for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """The library reads an extended header into memory, whatever its size."""
        member = super().frombuf(buf, encoding, errors)
        if member.type in _EXTENDED_HEADERS and member.size > _TAR_HEADER_BYTES:
            raise tarfile.HeaderError(f"a header of {member.size:,} bytes, needed at most {_TAR_HEADER_BYTES:,}")
        return member

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise  # the mark of the end
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise tarfile.ReadError("its end is missing") from None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def _is_tar(start: bytes) -> bool:
    """By its magic or, before there was one, by the checksum of its first header; a zero block is an empty archive."""
    if start[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return True
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        return isinstance(error, tarfile.EOFHeaderError)  # type: ignore[attr-defined]
    return True


def _broken_promise(name: str, unpacked: bool) -> str:
    """The ending of a name that says what was not found inside."""
    name = name.lower()
    if not unpacked and name.endswith((*_COMPRESSED, ".tgz", ".txz")):
        return name[name.rindex(".") :]
    return ".tar" if _without_compression(name).endswith((".tar", ".tgz", ".txz")) else ""


def _decompressed(start: bytes, file: IO[bytes], name: str, taken: Callable[[], int]) -> io.RawIOBase | None:
    if start.startswith(b"\x1f\x8b"):
        return _Filled(gzip.GzipFile(fileobj=file), name, taken)
    if start.startswith(b"\xfd7zXZ\x00"):
        return _Filled(_Frames(file, _xz_frame, padding=b"\0"), name, taken)
    if _BZIP2.match(start):
        return _Filled(_Frames(file, bz2.BZ2Decompressor), name, taken)
    # The second is a skippable frame, with which some tools begin.
    if start.startswith(b"\x28\xb5\x2f\xfd") or (start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F):
        return _Filled(_Frames(file, _zstandard(name)), name, taken)
    return None


def _xz_frame() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)


class _Filled(io.RawIOBase):
    """Reads as much as is asked for, where pipes and decompressors give less; answers damage in our own words."""

    def __init__(self, inner: Any, name: str, taken_of_source: Callable[[], int] | None = None) -> None:
        """`taken_of_source`: bytes of the input that this is packed in, read so far; None: it is not packed."""
        self.inner, self.name, self.taken_of_source = inner, name, taken_of_source
        self.count = 0
        # What the buffers between here and the input hold was taken already.
        self.taken_before = max(0, taken_of_source() - 2 * _BUFFER_BYTES) if taken_of_source else 0

    def taken(self) -> int:
        return self.count

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
        except (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
            raise DataError(
                f"{self.name}: damaged or cut off after {self.count} bytes of text ({error}). Copy it again."
            ) from None
        self.count += len(data)
        if self.taken_of_source is not None and self.count > _HARMLESS_BYTES:
            self._require_little_expansion(self.taken_of_source() - self.taken_before)
        return data

    def _require_little_expansion(self, taken: int) -> None:
        most = limits.EXPANSION.value
        if self.count > most * taken:
            raise DataError(
                f"{self.name}: {self.count:,} bytes came out of {taken:,}, more than {most} for each, which no text "
                f"gives. Unpack it yourself and look at it. {limits.EXPANSION.advice(self.count // max(1, taken) * 2)}"
            )


class _Frames(io.RawIOBase):
    """Compressed frames one after another, as parallel compressors write them. The libraries' own readers take what
    comes behind the first frame for the end when it is damaged, or a cut-off file for a whole one."""

    def __init__(self, file: IO[bytes], new_frame: Callable[[], Any], padding: bytes = b"") -> None:
        self.file, self.new_frame, self.padding = file, new_frame, padding
        self.frame: Any = None
        self.ready = memoryview(b"")
        self.left = b""

    def read(self, size: int = -1) -> bytes:
        while not self.ready:
            wants_input = self.frame is None or self.frame.needs_input
            data = (self.left or self.file.read(_FRAME_BYTES)) if wants_input else b""
            self.left = b""
            if not data and wants_input:
                if self.frame is not None:
                    raise EOFError("its end is missing")
                return b""
            if self.frame is None:
                data = data.lstrip(self.padding) if self.padding else data
                if not data:
                    continue
                self.frame = self.new_frame()
            self.ready = memoryview(self.frame.decompress(data, _BUFFER_BYTES))
            if self.frame.eof:
                self.left, self.frame = self.frame.unused_data, None
        part, self.ready = self.ready[:size], self.ready[size:]
        return bytes(part)


def _zstandard(name: str) -> Callable[[], Any]:
    try:
        import zstandard
    except ImportError:
        raise DataError(f'{name}: reading .zst needs a package: pip install "gptworks[interop]".') from None

    class Frame:
        needs_input = True  # it gives all it can at once

        def __init__(self) -> None:
            # OpenWebText2 and others were written with long windows.
            self.inner = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

        def decompress(self, data: bytes, max_length: int) -> bytes:
            try:
                return self.inner.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None

        @property
        def eof(self) -> bool:
            return self.inner.eof

        @property
        def unused_data(self) -> bytes:
            return self.inner.unused_data

    return Frame


def _input_file(path: Path) -> InputFile:
    stat = path.stat()
    return InputFile(str(path), path, stat.st_size, stat.st_mtime_ns)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _is_ours(file: Path) -> bool:
    """What `prepare` itself writes, when its --out is in the folder that it reads: not text, though named .json."""
    if (file.parent / "plan.json").is_file() and (file.parent / "lock").is_file():
        return True
    if file.suffix != ".json":
        return False
    with file.open("rb") as opened:
        start = opened.read(4096)
    return file.name.endswith(".tokenizer.json") or b'"format": "gptworks-store"' in start


def _without_what_is_no_text(files: list[Path]) -> list[Path]:
    """The files, but of folders of Hugging Face `datasets` only those that are read."""
    for folder in sorted({file.parent for file in files if hf_folder.is_mark(file)}):
        is_left = any(file.parent == folder for file in files)  # not taken off with a folder around it
        dataset = hf_folder.recognise(folder) if is_left else None
        if dataset is not None:
            wanted = set(dataset.files)
            files = [file for file in files if folder not in file.parents or file in wanted]
    return files


def _without_compression(name: str) -> str:
    name = name.lower()
    while name.endswith(_COMPRESSED):
        name = name[: name.rindex(".")]
    return name


def _kind_of_name(name: str) -> Kind | None:
    return _KINDS.get(Path(_without_compression(name)).suffix)


def _is_known(name: str) -> bool:
    """Whatever is compressed is taken for text or an archive until it is opened."""
    return _kind_of_name(name) is not None or name.lower().endswith((*_ARCHIVES, *_COMPRESSED))


def _known_names() -> str:
    return f"{', '.join(_KINDS)}, any of them with {', '.join(_COMPRESSED)}, or {', '.join(_ARCHIVES)}"
