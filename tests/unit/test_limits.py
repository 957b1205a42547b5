"""Files that ask for more than any real one: each is refused by name, within the memory that limits.py states."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import bombs
import bounded_child
import pytest
from bombs import MB
from test_hostile_weights import weights

from gptworks import limits
from gptworks.checkpoint.formats import safetensors_file
from gptworks.checkpoint.systems import huggingface
from gptworks.config import yaml_text
from gptworks.data import encode, prepare
from gptworks.data.store import Sidecar, Store
from gptworks.data.text_blocks import TextRules
from gptworks.errors import ConfigError, DataError, GPTWorksError, TokenizerError, UsageError
from gptworks.tokenizer import Tokenizer

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
        ["62,914,586 bytes", "at most 1,048,576"],
    ),
    "yaml-value": (limits.YAML_BYTES, _check(lambda d: bombs.long_value(d / "a.yaml", 10 * MB)), ["10,485,773 bytes"]),
    "yaml-deep": (limits.YAML_BYTES, _check(lambda d: bombs.deep_yaml(d / "a.yaml", 100_000)), ["nested without end"]),
    "line": (
        limits.DOCUMENT_BYTES,
        _prepare(lambda d: bombs.one_line(d / "l.jsonl", 300 * MB)),
        ["l.jsonl: a line of more than 67,108,864 bytes", "GPTWORKS_MAX_DOCUMENT_BYTES=268435456"],
    ),
    "csv-line": (
        limits.DOCUMENT_BYTES,
        _prepare(lambda d: bombs.csv_line(d / "l.csv", 300 * MB)),
        ["l.csv: line 2 has more than 67,108,864 bytes", "GPTWORKS_MAX_DOCUMENT_BYTES=268435456"],
    ),
    "gz-line": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.one_line(d / "l.jsonl.gz", 300 * MB)),
        ["l.jsonl.gz: ", "GPTWORKS_MAX_EXPANSION="],
    ),
    "gz-blanks": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.blanks(d / "b.txt.gz", 400 * MB)),
        ["b.txt.gz", "GPTWORKS_MAX_EXPANSION="],
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
    "run": (
        limits.RUN_BYTES,
        _prepare(lambda d: bombs.one_line(d / "r.jsonl", 60 * MB, b" "), "--encoder", "tokenizers"),
        ["r.jsonl: 62,914,560 bytes of blanks in a row", "GPTWORKS_MAX_RUN_BYTES=62914560"],
    ),
    "sparse-tar": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.sparse_tar(d / "s.tar", GB)),
        ["s.tar!a.txt", "bytes came out of"],
    ),
    "tar-header": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.long_tar_header(d / "h.tar.gz", 500 * MB)),
        ["a header of 524,288,000 bytes"],
    ),
    "nested": (
        limits.ARCHIVE_DEPTH,
        _prepare(lambda d: bombs.nested(d / "n.txt.gz", 100)),
        ["n.txt.gz: the 9th archive", "GPTWORKS_MAX_ARCHIVE_DEPTH"],
    ),
    "parquet-repeated": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.repeated_parquet(d / "p.parquet", 20_000, MB)),
        ["p.parquet", "the same texts are repeated", "GPTWORKS_MAX_EXPANSION="],
    ),
    "parquet-empty": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.empty_parquet(d / "p.parquet", 70_000_000)),
        ["p.parquet: 70,000,000 rows and bytes of text came out of", "or rows are empty"],
    ),
    "arrow-empty": (
        limits.EXPANSION,
        _prepare(lambda d: bombs.empty_arrow(d / "a.arrow", 2**40)),
        ["a.arrow: 1,099,511,627,776 rows and bytes of text came out of"],
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
LONG = {
    "pickle",
    "xz",
    "run",
    "packed-pickle",
    "parquet-long",
    "zst",
    "bz2",
    "line",
    "csv-line",
    "yaml-merges",
    "gz-newlines",
    "array",
}


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


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors", "x.json"])
def test_json_that_is_nested_too_deep_is_refused_by_name(name: str, tmp_path: Path, small_tokenizer: Tokenizer) -> None:
    huggingface.write(tmp_path, weights())
    deep = b"[" * 100_000
    (tmp_path / name).write_bytes(len(deep).to_bytes(8, "little") + deep if name.endswith("safetensors") else deep)
    with pytest.raises(GPTWorksError, match=rf"{name}: "):
        if name == "tokenizer_config.json":
            small_tokenizer.save_file(tmp_path / "tokenizer.json")
            Tokenizer.from_pretrained(tmp_path)
        elif name == "x.json":
            Sidecar.read(tmp_path / name)
        elif name == "config.json":
            huggingface.open(tmp_path, {})
        else:
            safetensors_file.read(tmp_path / name)


# Raised, it is read; the number in the message is enough


def test_a_raised_limit_lets_the_file_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bombs.long_comment(tmp_path / "a.yaml", 2 * MB)
    with pytest.raises(ConfigError) as caught:
        yaml_text.read(config)
    setting = str(caught.value).partition("variable ")[2].strip().rstrip(".")
    assert setting == "GPTWORKS_MAX_YAML_BYTES=2097178"
    monkeypatch.setenv(*setting.split("="))
    assert set(yaml_text.read(config)) == {"model"}


def test_a_document_at_the_limit_and_one_beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTWORKS_MAX_DOCUMENT_BYTES", "6M")
    tokenizer = Tokenizer.from_pretrained("gpt2")
    long = bombs.one_line(tmp_path / "long.jsonl.gz", 9 * MB)
    assert (
        prepare.prepare(prepare.PrepareJob([str(long)], tmp_path / "a", tokenizer, workers=1)).documents == 1
    )  # 4 MB of it are a block
    longer = bombs.one_line(tmp_path / "longer.jsonl.gz", 11 * MB)
    with pytest.raises(DataError, match=r"longer.jsonl.gz: a line of more than 6,291,456 bytes"):
        prepare.prepare(prepare.PrepareJob([str(longer)], tmp_path / "b", tokenizer, workers=1))


@pytest.mark.slow
@pytest.mark.parametrize(("filling", "what"), [(b" ", "blanks"), (b"7", "digits"), (b"a", "letters"), (b"=", "marks")])
def test_a_long_run_of_one_kind(filling: bytes, what: str, tmp_path: Path) -> None:
    file = bombs.one_line(tmp_path / "run.jsonl", 5 * MB, filling)
    with pytest.raises(
        DataError, match=rf"run.jsonl: 5,242,\d\d\d bytes of {what} in a row.*GPTWORKS_MAX_RUN_BYTES=5242"
    ):
        prepare.prepare(prepare.PrepareJob([str(file)], tmp_path / "a", Tokenizer.from_pretrained("gpt2"), workers=1))


def test_chinese_without_blanks_is_no_run(tmp_path: Path) -> None:
    text = "他们在河边找到了一张地图，然后带回家去。" * 100_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.from_pretrained("gpt2")
    assert prepare.prepare(
        prepare.PrepareJob([str(tmp_path / "a.txt")], tmp_path / "a", tokenizer, workers=1)
    ).text_bytes == len(text.encode())


def test_long_texts_are_encoded_alike_in_pieces(
    tmp_path: Path, small_tokenizer: Tokenizer, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pieces at a time give the ids that the whole text gives."""
    monkeypatch.setattr(encode, "_PIECE_BYTES", 5000)
    text = corpus_file.read_text(encoding="utf-8").replace("\n", " ")  # 14 pieces, of which 4 go at once
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    made = prepare.prepare(
        prepare.PrepareJob(
            [str(tmp_path / "a.txt")],
            tmp_path / "a",
            small_tokenizer,
            rules=TextRules(separator=""),
            encoder="tokenizers",
        )
    )
    assert made.documents == 1
    assert Store(tmp_path / "a").tokens[0 : made.tokens].tolist() == small_tokenizer.encode(text)


def test_a_vocabulary_with_a_few_gaps_is_read(tmp_path: Path) -> None:
    assert Tokenizer.from_pretrained(bombs.high_id(tmp_path / "t.json", 70_000)).vocab_size == 70_001


@pytest.mark.parametrize("name", ["tokenizer.json", "x.model"])
def test_a_tokenizer_of_too_many_bytes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(b" " * 1200)
    monkeypatch.setenv("GPTWORKS_MAX_TOKENIZER_BYTES", "1000")
    with pytest.raises(TokenizerError, match=rf"{name}: 1,200 bytes, and a tokenizer has at most 1,000"):
        Tokenizer.from_pretrained(tmp_path / name)


def test_a_gzip_that_holds_little_text_many_times_is_refused_by_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are short, so that only the ratio tells."""
    line = b'{"text": "the same short line again and again and again"}\n'
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        for _ in range(70):
            file.write(line * (MB // len(line)))
    documents = prepare.corpus.read_documents(
        [str(tmp_path / "a.jsonl.gz")], TextRules(), prepare.corpus.Skipped(strict=True)
    )
    monkeypatch.setenv("GPTWORKS_MAX_EXPANSION", "200")
    with pytest.raises(DataError, match=r"a.jsonl.gz: [\d,]+ bytes came out of [\d,]+, more than 200 for each"):
        for _ in documents:
            pass


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5M", "8MB"])
def test_a_limit_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTWORKS_MAX_YAML_BYTES", value)
    with pytest.raises(UsageError, match=rf"GPTWORKS_MAX_YAML_BYTES: got '{value}'; needs a whole number above 0"):
        _ = limits.YAML_BYTES.value


@pytest.mark.parametrize("page", ["trust.md", "trust.zh.md"])
def test_the_page_on_trust_lists_every_limit(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "explain" / page).read_text(encoding="utf-8")
    for limit in limits.LIMITS:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{limit.variable}` |"))
        assert f"| {limit.default:,} |" in row and row.endswith(f"| {limit.memory} |")
    assert text.count("| `GPTWORKS_MAX_") == len(limits.LIMITS)
