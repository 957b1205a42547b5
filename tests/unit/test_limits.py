"""Files that ask for more than any real one: each is refused by name, within the memory that limits.py states."""

import os
from collections.abc import Callable
from pathlib import Path

import bombs
import bounded_child
import pytest
from bombs import MB

from gptworks import limits

GB = 1 << 30
UNITS = {"MB": MB, "GB": GB}


def stated(limit: limits.Limit) -> int:
    number, unit = limit.memory.split()
    return int(number) * UNITS[unit]


# (limit that refuses it, command with the file, words of the message)
Case = tuple[limits.Limit, Callable[[Path], list[str | Path]], list[str]]


def _prepare(file: Callable[[Path], Path], *options: str) -> Callable[[Path], list[str | Path]]:
    return lambda folder: ["prepare", file(folder), "--out", folder / "out", "--workers", "1", *options]


def _check(file: Callable[[Path], Path]) -> Callable[[Path], list[str | Path]]:
    return lambda folder: ["config", "check", "-c", file(folder)]


CASES: dict[str, Case] = {
    "id": (
        limits.VOCAB_GAP,
        lambda d: [
            "prepare",
            __file__,
            "--input-format",
            "text",
            "--tokenizer",
            bombs.high_id(d / "t.json", 2**31 - 1),
            "--out",
            d / "o",
        ],
        ["t.json: the token 'zz' has the id 2,147,483,647", "GPTWORKS_MAX_VOCAB_GAP=2147483391"],
    ),
    "yaml-aliases": (
        limits.YAML_VALUES,
        _check(lambda d: bombs.aliases(d / "a.yaml", 9)),
        ["a.yaml", "line 6: stands for 311,111 values"],
    ),
    "yaml-alias-blocks": (
        limits.YAML_VALUES,
        _check(lambda d: bombs.alias_blocks(d / "a.yaml", 9)),
        ["line 6: stands for 422,221 values"],
    ),
    "yaml-merges": (
        limits.YAML_VALUES,
        _check(lambda d: bombs.merges(d / "a.yaml", 9)),
        ["line 6: stands for 333,331 values"],
    ),
    "yaml-comment": (
        limits.YAML_BYTES,
        _check(lambda d: bombs.long_comment(d / "a.yaml", 60 * MB)),
        ["62,914,590 bytes", "at most 1,048,576"],
    ),
    "yaml-value": (limits.YAML_BYTES, _check(lambda d: bombs.long_value(d / "a.yaml", 10 * MB)), ["10,485,773 bytes"]),
    "yaml-deep": (limits.YAML_BYTES, _check(lambda d: bombs.deep_yaml(d / "a.yaml", 100_000)), ["nested without end"]),
    "line": (
        limits.DOCUMENT_BYTES,
        _prepare(lambda d: bombs.one_line(d / "l.jsonl", 300 * MB)),
        ["l.jsonl: a line of more than 67,108,864 bytes", "GPTWORKS_MAX_DOCUMENT_BYTES=268435456"],
    ),
    "gz-line": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.one_line(d / "l.jsonl.gz", 300 * MB)),
        ["l.jsonl.gz: a line of more than 67,108,864"],
    ),
    "gz-blanks": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.blanks(d / "b.txt.gz", 400 * MB)),
        ["b.txt.gz", "GPTWORKS_MAX_DOCUMENT_BYTES"],
    ),
    "gz-newlines": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.blanks(d / "b.txt.gz", 400 * MB, b"\n")),
        ["b.txt.gz", "GPTWORKS_MAX_"],
    ),
    "xz": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.blanks(d / "b.txt.xz", 400 * MB)),
        ["b.txt.xz", "bytes came out of", "GPTWORKS_MAX_EXPANSION="],
    ),
    "bz2": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.blanks(d / "b.txt.bz2", 400 * MB)),
        ["b.txt.bz2", "bytes came out of"],
    ),
    "zst": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.blanks(d / "b.txt.zst", 2000 * MB)),
        ["b.txt.zst", "bytes came out of"],
    ),
    "array": (limits.DOCUMENT_BYTES, _prepare(lambda d: bombs.one_element(d / "e.json.gz", 80 * MB)), ["e.json.gz: "]),
    "sparse-tar": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.sparse_tar(d / "s.tar", 8 * GB)),
        ["s.tar!a.txt", "bytes came out of"],
    ),
    "tar-header": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.long_tar_header(d / "h.tar.gz", 500 * MB)),
        ["a header of 524,288,000 bytes"],
    ),
    "nested": (
        limits.ARCHIVE_DEPTH,
        _prepare(lambda d: bombs.nested(d / "n.txt.gz", 2000)),
        ["n.txt.gz: the 9th archive", "GPTWORKS_MAX_ARCHIVE_DEPTH"],
    ),
    "parquet-repeated": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.repeated_parquet(d / "p.parquet", 100_000, MB)),
        ["p.parquet", "the same texts are repeated", "GPTWORKS_MAX_EXPANSION="],
    ),
    "parquet-long": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.long_parquet(d / "p.parquet", 600 * MB)),
        ["column 'text' has 629,", "packed into"],
    ),
    "pickle": (
        limits.EXPANSION,
        lambda d: ["inspect", bombs.deep_pickle(d / "a.pt", 200_000)],
        ["a.pt: its lists or dictionaries lie hundreds deep"],
    ),
    "packed-pickle": (
        limits.EXPANSION,
        lambda d: ["inspect", bombs.packed_pickle(d / "a.pt", 500 * MB)],
        ["'archive/data.pkl' is compressed"],
    ),
}
LONG = {"pickle", "packed-pickle", "parquet-long", "zst", "bz2", "line", "yaml-merges", "gz-newlines", "array"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured in /proc")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES])
def test_a_bomb_is_refused_within_its_memory(name: str, tmp_path: Path) -> None:
    limit, command, words = CASES[name]
    before = {variable: value for variable, value in os.environ.items() if variable.startswith("GPTWORKS_MAX_")}
    assert not before
    ended = bounded_child.run(*command(tmp_path))
    assert ended.code == 2, ended
    for word in words:
        assert word in ended.err
    assert ended.peak < stated(limit), f"{ended.peak / MB:.0f} MB"
    assert not list(tmp_path.glob("o*")), "nothing is left behind"
