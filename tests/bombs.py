"""Small files that ask for much: memory, time, or an end that never comes. Each function writes one and returns it.

Sizes are parameters, so that a test can take the smallest that passes a limit, and the soak the largest.
"""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

MB = 1 << 20


def _packed(path: Path, pieces: Iterable[bytes]) -> Path:
    """Compressed as the name says. A piece that comes again is compressed once: frames may follow each other."""

    def zstandard_frame(data: bytes) -> bytes:
        import zstandard

        return zstandard.ZstdCompressor(level=3).compress(data)

    frames: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".bz2": bz2.compress,
        ".zst": zstandard_frame,
    }
    done: dict[int, bytes] = {}
    with path.open("wb") as file:
        for piece in pieces:
            if id(piece) not in done:
                done[id(piece)] = frames[path.suffix](piece)
            file.write(done[id(piece)])
    return path


def one_line(path: Path, size: int, filling: bytes = b"word ") -> Path:
    """One JSON line of `size` bytes of text, compressed as the name says (.gz, .xz, .bz2, .zst) or plain."""
    piece = (filling * (MB // len(filling) + 1))[:MB]
    pieces = [b'{"text": "', *[piece] * (size // MB), b'"}\n']
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(pieces))
        return path
    return _packed(path, pieces)


def blanks(path: Path, size: int, blank: bytes = b" ") -> Path:
    """`size` bytes of blanks, compressed as the name says: in frames of 32 MB, which are a few hundred bytes."""
    return _packed(path, [blank * 32 * MB] * (size // (32 * MB)))


def csv_line(path: Path, size: int) -> Path:
    """A table whose one row is long."""
    with path.open("wb") as file:
        file.write(b"text\n")
        for _ in range(size // MB):
            file.write(b"word " * (MB // 5))
        file.write(b"\n")
    return path


def one_element(path: Path, size: int) -> Path:
    """A JSON array with one string of `size` bytes in its one object, compressed as the name says."""
    return _packed(path, [b'[{"text": "', *[b"word " * (MB // 5)] * (size // MB), b'"}]\n'])


def sparse_tar(path: Path, size: int) -> Path:
    """A tar whose one member says that it has `size` bytes and holds one: the rest is a hole."""
    name, block = b"a.txt", bytearray(512)
    block[: len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136], block[136:148] = b"%011o\0" % 512, b"%011o\0" % 0
    block[156:157] = b"S"
    block[257:265] = b"ustar  \0"
    block[386:398], block[398:410] = b"%011o\0" % (size - 512), b"%011o\0" % 512
    block[483:495] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path.write_bytes(bytes(block) + b"x" * 512 + bytes(1024))
    return path


def long_tar_header(path: Path, size: int) -> Path:
    """A compressed tar whose extended header has `size` bytes."""
    head = tarfile.TarInfo("pax")
    head.type, head.size = tarfile.XHDTYPE, size
    return _packed(path, [head.tobuf(tarfile.USTAR_FORMAT), *[b"\0" * MB] * (size // MB), bytes(1024)])


def nested(path: Path, times: int) -> Path:
    """A line of text in gzip in gzip in gzip ... Beyond a few hundred times they would only take long to make."""
    data = b"some text\n"
    for _ in range(times):
        data = gzip.compress(data)
    path.write_bytes(data)
    return path


def repeated_parquet(path: Path, rows: int, size: int) -> Path:
    """A column in which one text of `size` bytes is repeated: the file holds it once."""
    import pyarrow
    import pyarrow.parquet

    values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["word " * (size // 5)])
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), path, compression="zstd")
    return path


def empty_parquet(path: Path, rows: int) -> Path:
    """Rows without a text take next to nothing."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.nulls(rows)}), path, row_group_size=rows)
    return path


def empty_arrow(path: Path, rows: int) -> Path:
    """The same in arrow, where they take nothing at all: the number is written in, not the rows."""
    import pyarrow

    few = 1_234_577
    made = io.BytesIO()
    table = pyarrow.table({"text": pyarrow.nulls(few)})
    with pyarrow.ipc.new_stream(made, table.schema) as stream:
        stream.write_table(table)
    data = made.getvalue()
    assert few.to_bytes(8, "little") in data
    path.write_bytes(data.replace(few.to_bytes(8, "little"), rows.to_bytes(8, "little")))
    return path


def long_parquet(path: Path, size: int) -> Path:
    """A column with one text of `size` bytes, which zstandard makes small."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": pyarrow.array(["word " * (size // 5)], pyarrow.large_string())})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    return path


def high_id(path: Path, id_: int) -> Path:
    """A tokenizer.json of 256 bytes and one more token, whose id is `id_`."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    spec = json.loads(backend.to_str())
    spec["model"]["vocab"]["zz"] = id_
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


def aliases(path: Path, levels: int, width: int = 10) -> Path:
    """YAML whose lists hold an earlier list ten times, and that another ten times, and so on."""
    lines = ["a0: &a0 [x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def alias_blocks(path: Path, levels: int, width: int = 10) -> Path:
    """The same with mappings."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        inner = ", ".join(f"k{i}: *a{level - 1}" for i in range(width))
        lines.append(f"a{level}: &a{level} {{{inner}}}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def merges(path: Path, levels: int, width: int = 10) -> Path:
    """The same with merge keys."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * width)}]}}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def deep_yaml(path: Path, levels: int) -> Path:
    path.write_text("a: " + "[" * levels + "]" * levels + "\n", encoding="utf-8")
    return path


def long_comment(path: Path, size: int) -> Path:
    path.write_text("# " + "c" * size + "\nmodel:\n  num_layers: 2\n", encoding="utf-8")
    return path


def long_value(path: Path, size: int) -> Path:
    path.write_text("run:\n  out: " + "v" * size + "\n", encoding="utf-8")
    return path


def deep_pickle(path: Path, levels: int) -> Path:
    """A torch file whose one value is a list in a list in a list ..."""
    import zipfile

    program = b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", b"3\n")
    return path


def packed_pickle(path: Path, size: int) -> Path:
    """A torch file whose program is compressed, and `size` bytes long."""
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("archive/data.pkl", "w") as file:
        file.write(b"\x80\x02")
        for _ in range(size // MB):
            file.write(b"N0" * (MB // 2))
        file.write(b"N.")
    return path


def packed_npz(path: Path, size: int) -> Path:
    """Arrays that are compressed, and `size` bytes long."""
    import numpy as np

    np.savez_compressed(path, ids=np.zeros(size // 2, np.uint16), lens=np.array([size // 2]), docs=np.array([0, 1]))
    return path


def deep_json(path: Path, levels: int) -> Path:
    path.write_text("[" * levels + "]" * levels, encoding="utf-8")
    return path
