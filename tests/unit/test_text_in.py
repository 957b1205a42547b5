"""Text from every kind of file, and how it is cut into blocks and documents."""

import bz2
import gc
import gzip
import io
import json
import lzma
import os
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptworks.data import corpus, prepare, text_blocks
from gptworks.data.corpus import Skipped, TextRules
from gptworks.data.text_blocks import Block, cut
from gptworks.data.text_files import TextStream, list_inputs
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer

TEXTS = ['First: a\tword. "quoted" \\ back', "Zweites, naïve 中文。再来\nsecond line", "[1, {2}] }, ]", "x"]
LINES = "".join(json.dumps({"id": n, "text": text, "meta": {"a": [n, [], {}]}}) + "\n" for n, text in enumerate(TEXTS))


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def tar(members: dict[str, bytes], compression: str = "") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def read(*inputs: str, strict: bool = False, **rules: object) -> tuple[list[str], Skipped]:
    skipped = Skipped(strict)
    return [text for (text,) in corpus.read_documents(list(inputs), TextRules(**rules), skipped)], skipped  # type: ignore[arg-type]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """tiny(n): blocks of n bytes, read in pieces as small as can be."""

    def set_sizes(size: int) -> None:
        set_block_size(monkeypatch, size)

    return set_sizes


def set_block_size(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", size)
    monkeypatch.setattr(text_blocks, "_READ_BYTES", max(1, size // 3))
    monkeypatch.setattr(text_blocks, "_EDGE", 8)


# The same documents from every wrapping


def zst(data: bytes, frame_bytes: int = 20) -> bytes:
    """A skippable frame, then one frame after another."""
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.compress(data[at : at + frame_bytes]) for at in range(0, len(data), frame_bytes)]
    return b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc" + b"".join(frames)


def parquet(texts: list[object], rows_per_group: int = 2) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    data = io.BytesIO()
    parquet.write_table(
        pyarrow.table({"id": list(range(len(texts))), "text": texts}), data, row_group_size=rows_per_group
    )
    return data.getvalue()


def several(compress: Callable[[bytes], bytes], data: bytes) -> bytes:
    return compress(data[:50]) + compress(data[50:])


ARRAY = json.loads("[" + ",".join(LINES.splitlines()) + "]")
PLAIN = "%%".join(TEXTS).encode()
AS_JSON = LINES.encode()
WRAPPED: dict[str, Callable[[], bytes]] = {
    "a.txt": lambda: PLAIN,
    "bom.txt": lambda: b"\xef\xbb\xbf" + PLAIN,
    "a.jsonl": lambda: AS_JSON,
    "windows.jsonl": lambda: b"\xef\xbb\xbf" + AS_JSON.replace(b"\n", b"\r\n"),
    "a.ndjson": lambda: AS_JSON,
    "pretty.json": lambda: json.dumps(ARRAY, indent=4).encode(),
    "compact.json": lambda: json.dumps(ARRAY, separators=(",", ":"), ensure_ascii=False).encode(),
    "bom.json": lambda: b"\xef\xbb\xbf \n" + json.dumps(ARRAY).encode() + b"\n \n",
    "lines.json": lambda: AS_JSON,
    "a.jsonl.gz": lambda: gzip.compress(AS_JSON),
    "A.JSONL.GZ": lambda: several(gzip.compress, AS_JSON),
    "a.jsonl.xz": lambda: several(lzma.compress, AS_JSON),
    "padded.jsonl.xz": lambda: lzma.compress(AS_JSON[:50]) + bytes(8) + lzma.compress(AS_JSON[50:]),
    "a.jsonl.bz2": lambda: several(bz2.compress, AS_JSON),
    "a.jsonl.zst": lambda: zst(AS_JSON),
    "a.jsonl.gz.zst": lambda: zst(gzip.compress(AS_JSON)),
    "a.txt.xz": lambda: lzma.compress(PLAIN),
    "a.tar": lambda: tar({f"{n}.txt": text.encode() for n, text in enumerate(TEXTS)}),
    "a.tar.gz": lambda: tar({f"in/{n}.txt": text.encode() for n, text in enumerate(TEXTS)}, "gz"),
    "a.tgz": lambda: tar({f"./{n}.txt": text.encode() for n, text in enumerate(TEXTS)}, "gz"),
    "a.tar.xz": lambda: tar({f"{n}.txt": text.encode() for n, text in enumerate(TEXTS)}, "xz"),
    # OpenWebText2: a tar of .jsonl.zst.
    "owt2.jsonl.zst.tar": lambda: tar({"1.jsonl.zst": zst(AS_JSON[:80] + b"\n" * 0 + AS_JSON[80:])}),
    # OpenWebText: a tar of .xz, each of which is a tar of text files.
    "openwebtext.tar.xz": lambda: tar(
        {f"subset-{n}_data.xz": tar({f"{n}-of.txt": text.encode()}, "xz") for n, text in enumerate(TEXTS)}, "xz"
    ),
    "a.parquet": lambda: parquet(list(TEXTS)),
}


@pytest.mark.parametrize("block", [7, 64, 4 << 20])
@pytest.mark.parametrize("name", WRAPPED)
def test_the_same_documents_from_every_wrapping(name: str, block: int, tmp_path: Path, tiny) -> None:
    source = write(tmp_path / name, WRAPPED[name]())
    tiny(block)
    documents, skipped = read(source, separator="%%", keep_separator=False)
    assert (documents, skipped.count, skipped.passed_over) == (TEXTS, 0, [])


def test_names_in_capitals_and_no_names(tmp_path: Path) -> None:
    assert read(write(tmp_path / "corpus.gz", gzip.compress(b"plain text inside")))[0] == ["plain text inside"]
    source = write(tmp_path / "dump", gzip.compress(AS_JSON))
    assert read(source, kind="jsonl")[0] == TEXTS
    with pytest.raises(DataError, match="dump: kind of file not known from its name"):
        read(source)


def test_text_that_begins_as_a_compressed_file_does(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "BZh is short for Bozhou"))[0] == ["BZh is short for Bozhou"]


@pytest.mark.slow
def test_members_of_a_tar_are_not_kept_when_they_have_been_read(tmp_path: Path) -> None:
    """There can be millions of them."""
    path = write(tmp_path / "a.tar", tar({f"{number}.txt": b"text" for number in range(300)}))
    alive = []
    for number, _ in enumerate(corpus.read_documents([path], TextRules(), Skipped(strict=True)), 1):
        if number % 60 == 0:  # to look at every object of the process takes its time
            alive.append(sum(issubclass(type(each), tarfile.TarInfo) for each in gc.get_objects()))
    assert len(alive) == 5
    assert max(alive) < 20


def test_old_tars_without_a_magic(tmp_path: Path) -> None:
    header = bytearray(tar({"a.txt": b"old"}))
    header[257:265] = bytes(8)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    assert read(write(tmp_path / "a.tar", bytes(header)))[0] == ["old"]


def test_elements_of_an_array_that_are_no_objects(tmp_path: Path) -> None:
    source = write(tmp_path / "a.json", '[1, "two", {"text": "three"}, null, [{"text": "four"}], {"text": 5}]')
    documents, skipped = read(source)
    assert documents == ["three"]
    assert skipped.first == [
        f"{source}[0]: needs an object with key 'text', got int",
        f"{source}[1]: needs an object with key 'text', got str",
        f"{source}[3]: needs an object with key 'text', got NoneType",
        f"{source}[4]: needs an object with key 'text', got list",
        f"{source}[5]: key 'text' is not a string; got int",
    ]


def test_a_raw_line_break_in_a_string_of_an_array_is_a_bad_element(tmp_path: Path) -> None:
    source = write(tmp_path / "a.json", '[{"text": "two\nlines"}, {"text":\r\n"one"}]')
    documents, skipped = read(source)
    assert documents == ["one"]
    assert skipped.first[0].startswith(f"{source}[0]: not JSON (Invalid control character")


def test_folders_are_walked_in_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.jsonl.gz", "a/z.md", "c.txt"):
        data = name.encode() if "json" not in name else gzip.compress(json.dumps({"text": name}).encode())
        write(tmp_path / "in" / name, data)
    for name in (".hidden.txt", ".git/x.txt", "b/.cache/y.txt"):
        write(tmp_path / "in" / name, "hidden")
    picture = write(tmp_path / "in" / "b" / "picture.png", b"\x89PNG")
    documents, skipped = read(str(tmp_path / "in"))
    assert documents == ["a/z.md", "b/1.jsonl.gz", "b/2.txt", "c.txt"]
    assert skipped.passed_over == [picture]


def test_members_of_archives_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    source = write(tmp_path / "a.tar", tar({"x.png": b"\x89PNG", "a.txt": b"a", ".git/b.txt": b"b", "./._c.txt": b"c"}))
    documents, skipped = read(source)
    assert (documents, skipped.passed_over) == (["a"], [f"{source}!x.png"])


def test_our_own_files_in_the_folder_that_is_read_are_no_text(
    tmp_path: Path, small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.txt", "some text")
    for _ in range(2):
        summary = prepare.prepare(prepare.PrepareJob([str(tmp_path)], tmp_path / "out", small_tokenizer))
        assert (summary.documents, summary.skipped.count) == (1, 0)
    stopped = tmp_path / "other.part"
    for name in ("plan.json", "lock", "journal"):
        write(stopped / name, "{}")
    assert [file.name for file in list_inputs([str(tmp_path)])[0]] == [str(tmp_path / "a.txt")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "lines", "array", "gz"])
def test_standard_input(name: str, tmp_path: Path) -> None:
    data = {"plain": PLAIN, "lines": AS_JSON, "array": json.dumps(ARRAY).encode(), "gz": gzip.compress(AS_JSON)}[name]
    command = [sys.executable, "-m", "gptworks", "prepare", "-", "--out", str(tmp_path / "out"), "--workers", "1"]
    done = subprocess.run(
        [*command, "--doc-separator", "%%", "--append-eod", "--json"], input=data, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    from gptworks.data.store import Store

    store = Store(tmp_path / "out")
    tokenizer = Tokenizer.from_pretrained("gpt2")
    starts = store.document_starts
    assert [tokenizer.decode(store.tokens[a : b - 1]) for a, b in pairwise(starts)] == TEXTS
    assert json.loads(done.stdout)["documents"] == len(TEXTS)


def test_standard_input_is_read_once() -> None:
    with pytest.raises(DataError, match=r"- \(standard input\): given twice"):
        list_inputs(["-", "-"])


def test_a_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}, 'wb').write({AS_JSON!r})"]):
        assert read(str(pipe))[0] == TEXTS


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_missing_packages_are_named(name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / name, WRAPPED[name]())
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=re.escape(f"{source}: reading .")) as caught:
        read(source)
    assert 'pip install "gptworks[interop]"' in str(caught.value)


def test_parquet_columns_and_places(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", parquet(["one", None, "three"]))
    documents, skipped = read(source)
    assert documents == ["one", "three"]
    assert skipped.first == [f"{source} row 2: key 'text' is not a string; got NoneType"]
    with pytest.raises(
        DataError, match=r"no column 'body'\. Columns: id, text\. Choose one with --key, or several with commas"
    ):
        read(source, keys=("body",))
    with pytest.raises(DataError, match="read from its end, so not from an archive"):
        read(write(tmp_path / "b.parquet.gz", gzip.compress(parquet(["one"]))))


def test_parquet_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    broken = pyarrow.array([b"good", b"caf\xe9", None]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    documents, skipped = read(str(tmp_path / "a.parquet"))
    assert documents == ["good"]
    assert [message.split(": ", 1)[1] for message in skipped.first] == [
        "key 'text' is not a string; got bytes",
        "key 'text' is not a string; got NoneType",
    ]


def test_plain_text_has_no_prompts(tmp_path: Path, small_tokenizer: Tokenizer) -> None:
    source = write(tmp_path / "a.txt", "one\n\ntwo")
    with pytest.raises(DataError, match=r"a\.txt: plain text has no keys, so no prompts and completions"):
        prepare.prepare(
            prepare.PrepareJob(
                [source], tmp_path / "out", small_tokenizer, rules=TextRules(("prompt", "completion")), append_eod=True
            )
        )


# Damage

NOISE = bytes((n * 7919 + n // 3) % 251 for n in range(5000))
MANY = "".join(json.dumps({"text": f"{n} {NOISE[n : n + 60].hex()}"}) + "\n" for n in range(300)).encode()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def damaged() -> Iterator[tuple[str, Callable[[], bytes]]]:
    whole: dict[str, Callable[[], bytes]] = {
        "a.jsonl.gz": lambda: gzip.compress(MANY),
        "a.jsonl.xz": lambda: lzma.compress(MANY),
        "a.jsonl.bz2": lambda: bz2.compress(MANY),
        "a.jsonl.zst": lambda: pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(MANY),
        "a.tar": lambda: tar({"1.jsonl": MANY, "2.jsonl": MANY, "3.jsonl": MANY}),
        "a.tar.gz": lambda: tar({"1.jsonl": MANY, "2.jsonl": MANY}, "gz"),
        "a.tar.xz": lambda: tar({"1.jsonl": MANY, "2.jsonl": MANY}, "xz"),
        "a.parquet": lambda: parquet([f"{n} {NOISE.hex()}" for n in range(50)]),
    }
    for name, make in whole.items():
        yield f"{name}, cut off", lambda make=make: make()[: len(make()) * 2 // 3]
        yield f"{name}, cut off early", lambda make=make: make()[:300]
        yield f"{name}, without a beginning", lambda make=make: make()[7:]
        if name not in ("a.tar", "a.parquet"):  # these have no checksum of what is in them
            yield f"{name}, one byte wrong", lambda make=make: flipped(make(), len(make()) // 2)
            yield f"{name}, last byte missing", lambda make=make: make()[:-1]
    for name in ("a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst"):
        yield f"{name}, rubbish between frames", lambda name=name: whole[name]() + b"rubbish" + whole[name]()
    padded = lambda: gzip.compress(tar({"1.jsonl": MANY}) + bytes(3_000_000))  # noqa: E731
    yield "a.tar.gz, padded, last byte missing", lambda: padded()[:-1]
    yield "a.tar, header wrong", lambda: flipped(whole["a.tar"](), 512 * (1 + -(-len(MANY) // 512)) + 3)
    yield "a.tar, cut between members", lambda: whole["a.tar"]()[: 512 * (1 + -(-len(MANY) // 512))]
    yield "a.tar, cut in a header", lambda: whole["a.tar"]()[: 512 * (1 + -(-len(MANY) // 512)) + 100]


DAMAGED = dict(damaged())


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_found_and_leaves_nothing_behind(case: str, tmp_path: Path, small_tokenizer: Tokenizer) -> None:
    source = write(tmp_path / "in" / case.split(",")[0], DAMAGED[case]())
    with pytest.raises(DataError) as caught:
        prepare.prepare(prepare.PrepareJob([source], tmp_path / "out", small_tokenizer))
    assert str(caught.value).startswith(source) and "no text found" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))


# JSON arrays

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[],:é中 \n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"]', max_size=3), inner, max_size=3),
    max_leaves=8,
)


def elements(text: bytes, read_bytes: int) -> list[bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "_READ_BYTES", read_bytes)
        return list(text_blocks._split_array(io.BytesIO(text), "a.json"))


@given(
    st.lists(JSON, max_size=5),
    st.sampled_from([None, 0, 1, 3, "\t"]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\r\n")]),
    st.booleans(),
    st.integers(1, 20),
)
def test_arrays_are_split_as_the_standard_library_reads_them(
    values: list[object], indent: int | None, separators: tuple[str, str], is_ascii: bool, read_bytes: int
) -> None:
    text = json.dumps(values, indent=indent, separators=separators, ensure_ascii=is_ascii)
    assert [json.loads(each) for each in elements(text.encode(), read_bytes)] == values


@pytest.mark.parametrize("read_bytes", [1, 4, 1 << 20])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"text": "a"}', "the file ends after 0 elements"),
        ('[{"text": "a"}, {"te', "the file ends after 1 elements"),
        ('[{"text": "a"}, "b', "the file ends after 1 elements"),
        ('[{"text": "a"}}', "a } that closes nothing after 0 elements"),
        ("[1,]", "a comma at the end after 1 elements"),
        ("[,1]", "a comma with nothing before it after 0 elements"),
        ("[1,,2]", "a comma with nothing before it after 1 elements"),
        ("[1] [2]", "more text behind its end, b'[2]', after 1 elements"),
        ("[1]" + " " * 50 + "x", "more text behind its end, b'x', after 1 elements"),
        (r"[1, \2]", "a backslash outside a string"),
        ("[", "the file ends after 0 elements"),
    ],
)
def test_broken_arrays_are_refused(text: str, problem: str, read_bytes: int) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    with pytest.raises(DataError) as caught:
        elements(text.encode(), read_bytes)
    if read_bytes > 4 or "behind" not in problem:
        assert str(caught.value).startswith(f"a.json: not a JSON array: {problem.split(', b')[0]}")


# Plain text


def by_the_whole_file_rule(text: str, separator: str, keep: bool) -> list[str]:
    """What the documents are, without blocks: the definition."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    pieces = text.split(separator) if separator else [text]
    kept = separator if keep else ""
    documents = [piece + kept for piece in pieces[:-1]] + pieces[-1:]
    return [each for each in documents if each and not each.isspace()]


def blocks_of(text: bytes, rules: TextRules, size: int, *, may_cut: bool, kind: str = "text") -> list[Block]:
    stream = TextStream("a.txt", kind, io.BytesIO(text), lambda: 0)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        set_block_size(patch, size)
        return list(text_blocks._plain_text(stream, rules, may_cut))


def joined(blocks: list[Block], rules: TextRules) -> list[str]:
    """The documents of blocks, parts put together."""
    documents: list[str] = []
    unfinished = False
    for block in blocks:
        assert block.continues == unfinished
        texts = [text for (text,) in corpus.parse(block, rules).documents]
        if unfinished:
            documents[-1] += texts.pop(0)
        documents += texts
        unfinished = block.unfinished
    assert not unfinished
    return documents


# Pieces rather than letters: long enough for many blocks, with separators whole, doubled, and cut by a block's end.
PIECES = ["a", "b", " ", "a b", "ab ab", "\n", "\n\n", "\r", "\r\n", "--", "-", "\n--", "b\n-", "。中", "é", "中中中中"]
ANY_TEXT = st.lists(st.sampled_from(PIECES), min_size=10, max_size=60).map("".join)


@settings(max_examples=10 * settings().max_examples)
@given(ANY_TEXT, st.sampled_from(["\n\n", "\n", "--", "", "a b", "\n--", "b\n-"]), st.booleans(), st.integers(1, 25))
def test_documents_of_plain_text_do_not_depend_on_blocks(text: str, separator: str, keep: bool, size: int) -> None:
    rules = TextRules(separator=separator, keep_separator=keep)
    expected = by_the_whole_file_rule(text, separator, keep)
    for may_cut in (False, True):
        blocks = blocks_of(text.encode(), rules, size, may_cut=may_cut)
        assert joined(blocks, rules) == expected
        assert b"".join(b.data for b in blocks) == text.replace("\r\n", "\n").replace("\r", "\n").encode()
        assert may_cut or not any(block.unfinished for block in blocks)


def test_long_documents_are_cut_into_blocks_only_where_that_is_allowed(corpus_file: Path) -> None:
    text, rules = corpus_file.read_bytes(), TextRules(separator="")
    assert len(blocks_of(text, rules, 1000, may_cut=False)) == 1
    cut_up = blocks_of(text, rules, 1000, may_cut=True)
    assert len(cut_up) > 50 and max(len(b.data) for b in cut_up) < 3000
    assert joined(cut_up, rules) == [text.decode()]


# Safe cuts


def pieces_at_safe_cuts(text: bytes) -> list[str]:
    ends = [0, *(found.end() for found in text_blocks.SAFE_CUT.finditer(text)), len(text)]
    return [text[a:b].decode() for a, b in pairwise(ends)]


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """What the merges are looked for in."""
    return [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]


def ids_in_pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    return [i for ids in tokenizer.encode_batch(pieces_at_safe_cuts(text.encode())) for i in ids]


@pytest.fixture(scope="session")
def gpt2() -> Tokenizer:
    return Tokenizer.from_pretrained("gpt2")


@settings(max_examples=6 * settings().max_examples)
@given(st.text("abS '’1-.\n\t\u3000。、中文䷀一鿿é\u0301<|endoftext|>", max_size=40))
@example("a\n\nb")
@example("a \nb")
@example("。䷀")
@example("для всех людей и ёлка в 1 Ѿ Ѡ")
@example("καλά νέα Ά έ ο πάντα")
@example("مع السلامة في َ البيت ء ئ")
@example("한국어 문장 가 뀀 쿿 힣 나")
@example("そうです。これは。それ")
def test_a_text_in_pieces_has_the_same_ids(small_tokenizer: Tokenizer, gpt2: Tokenizer, text: str) -> None:
    for tokenizer in (small_tokenizer, gpt2):
        assert ids_in_pieces(tokenizer, text) == tokenizer.encode(text)
    in_pieces = [word for piece in pieces_at_safe_cuts(text.encode()) for word in words(gpt2, piece)]
    assert in_pieces == words(gpt2, text)


def test_real_texts_in_pieces_have_the_same_ids(corpus_file: Path, small_tokenizer: Tokenizer, gpt2: Tokenizer) -> None:
    text = corpus_file.read_text(encoding="utf-8")
    assert len(pieces_at_safe_cuts(text.encode())) > 1000
    for tokenizer in (small_tokenizer, gpt2):
        assert ids_in_pieces(tokenizer, text) == tokenizer.encode(text)


@pytest.mark.parametrize("words_of", ["мир труд", "καλο νεο", "مع كل", "문장 나라", "そう。これ"])
def test_long_documents_in_other_scripts_are_cut_too(words_of: str) -> None:
    text = (words_of + " ") * 1000
    cut_up = blocks_of(text.encode(), TextRules(separator=""), 1000, may_cut=True)
    assert len(cut_up) > 5 and joined(cut_up, TextRules(separator="")) == [text]


@pytest.mark.slow
def test_chinese_in_pieces_has_the_same_ids(shared_data: Path, gpt2: Tokenizer) -> None:
    text = (shared_data / "corpora" / "zh" / "debian-reference.zh-cn.txt").read_text(encoding="utf-8")
    assert "。" in text and len(pieces_at_safe_cuts(text.encode())) > 1000
    assert ids_in_pieces(gpt2, text) == gpt2.encode(text)


# WikiText

WIKI = (
    " \n = First = \n \n Some text , a = b . \n \n = = Section = = \n \n More = text = . \n = Not a title = \n"
    " = = = Deep = = = \n \n Last . \n \n = Second ( = ) thing = \n \n \n = Third = \n \n End . \n"
)


def test_articles_begin_at_titles(tmp_path: Path) -> None:
    documents, _ = read(write(tmp_path / "wiki.test.tokens", WIKI))
    assert [text.split("=")[1].strip() for text in documents] == ["First", "Second (", "Third"]
    assert "".join(documents) == WIKI


LONG_TITLES = "".join(f" = Of {n} and many words in a title = \n \n 1 , 2 ; 3 . {'4 ' * n}\n \n" for n in range(20))


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from([WIKI, LONG_TITLES]), st.integers(1, 90), st.booleans())
def test_blocks_do_not_change_articles(text: str, size: int, may_cut: bool) -> None:
    rules = TextRules()
    whole = text_blocks.split_articles(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "BLOCK_BYTES", size)
        patch.setattr(text_blocks, "_READ_BYTES", max(1, size // 3))
        patch.setattr(text_blocks, "_EDGE", 40)  # longer than a title
        stream = TextStream("a", "wikitext", io.BytesIO(text.encode()), lambda: 0)
        blocks = list(text_blocks._plain_text(stream, rules, may_cut))
    assert [text.encode() for text in joined(blocks, rules)] == whole


@pytest.mark.parametrize(
    ("file", "expected"),
    [("wiki.test.tokens", 60), ("wiki.test.raw", 60), ("wiki.valid.tokens", 60), ("wiki.train.tokens", 600)],
)
def test_articles_of_wikitext_2(file: str, expected: int, shared_data: Path, tiny) -> None:
    path = shared_data / "corpora" / "wikitext-2" / file
    lines = path.read_text(encoding="utf-8").split("\n")
    titles = [
        line.strip()
        for before, line, after in zip(lines, lines[1:], lines[2:], strict=False)
        if re.fullmatch(r" = [^=].*[^=] = ", line) and not before.strip() and not after.strip()
    ]
    documents, _ = read(str(path))
    assert [text.strip().split("\n")[0].strip() for text in documents] == titles
    assert len(titles) == expected
    assert "".join(documents) == path.read_text(encoding="utf-8")
    if "train" not in file:
        tiny(5000)
        assert read(str(path))[0] == documents


# Bad lines

BAD = [b'{"text": "good"}', b"{", b'{"text": 5}', b'{"text": "\xff"}', b"", b'{"text": "fine"}', b'{"t": 1}', b"[]"]
BAD_NUMBERS = [2, 3, 4, 7, 8]


@pytest.mark.parametrize("block", [1, 10, 40, 4 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.tar"])
def test_places_of_bad_lines_do_not_depend_on_blocks(
    name: str, block: int, tmp_path: Path, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_SHOWN", 100)
    lines = b"\n".join(BAD)
    data = {"a.jsonl": lines, "a.jsonl.gz": gzip.compress(lines), "a.tar": tar({"b.jsonl": lines})}[name]
    one, two = write(tmp_path / name, data), write(tmp_path / "second" / name, data)
    tiny(block)
    documents, skipped = read(one, two)
    assert documents == ["good", "fine"] * 2
    inside = "!b.jsonl" if name == "a.tar" else ""
    places = [re.match(r"(.*?:\d+): ", message)[1] for message in skipped.first]  # type: ignore[index]
    assert places == [f"{source}{inside}:{number}" for source in (one, two) for number in BAD_NUMBERS]
    assert skipped.count == len(places)


@pytest.mark.parametrize("block", [1, 30, 4 << 20])
def test_places_in_arrays_text_and_rows(block: int, tmp_path: Path, tiny) -> None:
    array = write(tmp_path / "a.json", '[{"text": "a"}, 1, {"text": "b"}, {"text": 2}]')
    text = write(tmp_path / "a.txt", b"one\n\ntwo\nt\xe9o\n\nthree\n\nfo\xffr")
    rows = write(tmp_path / "a.parquet", parquet(["a", "b", None, "c"]))
    tiny(block)
    documents, skipped = read(array, text, rows, keep_separator=False)
    assert documents == ["a", "b", "one", "three", "a", "b", "c"]
    places = [re.match(r"(.*?): (?:key|needs|not)", message)[1] for message in skipped.first]  # type: ignore[index]
    assert places == [f"{array}[1]", f"{array}[3]", f"{text}:4", f"{text}:8", f"{rows} row 3"]


@pytest.mark.slow
def test_strict_stops_and_leaves_nothing_behind(tmp_path: Path, run_cli) -> None:
    source = write(tmp_path / "a.tar", tar({"b.jsonl": b"\n".join(BAD)}))
    failed = run_cli("prepare", source, "--out", tmp_path / "out", "--strict", expect=2)
    assert failed.stderr.startswith(f"error: {source}!b.jsonl:2: not JSON (")
    assert not list(tmp_path.glob("out*"))


# orjson and the standard library

VALUES = [
    "NaN",
    "Infinity",
    "9" * 30,
    "9" * 400,
    "9" * 5000,
    "1e999",
    "1.5",
    "null",
    '"x"',
    '"\\ud800"',
    '"\\ud83d\\ude0a"',
]
ANY_LINE = (
    st.builds(lambda a, b: f'{{"x": {a}, "text": {b}}}'.encode(), st.sampled_from(VALUES), st.sampled_from(VALUES))
    | st.builds(lambda a, b: f'{{"text": {a}, "text": {b}}}'.encode(), st.sampled_from(VALUES), st.sampled_from(VALUES))
    | st.builds(lambda a: json.dumps({"text": a}).encode(), st.text(max_size=10))
    | st.builds(lambda a: b'{"text": "' + a + b'"}', st.binary(max_size=6).filter(lambda a: b"\n" not in a))
    | st.builds(lambda n: b'{"x": ' + b"[" * n + b"]" * n + b', "text": "deep"}', st.sampled_from([1, 200, 100_000]))
    | st.sampled_from([b"", b" ", b"{}", b"[]", b'"text"', b"\xef\xbb\xbf{}", b'{"text": "a"} ', b'{"text": "a"},'])
)


@settings(max_examples=3 * settings().max_examples)
@given(st.lists(ANY_LINE, max_size=8), st.sampled_from([("text",), ("x", "text")]))
def test_orjson_and_the_standard_library_give_the_same(lines: list[bytes], keys: tuple[str, ...]) -> None:
    orjson = pytest.importorskip("orjson")
    found = []
    for loads in (orjson.loads, corpus._standard_loads):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus, "_quick_loads", loads)
            found.append(corpus._parse_lines(b"\n".join(lines), keys))
    assert found[0] == found[1]


# What changes while it is read


def test_a_file_that_becomes_shorter_is_told(tmp_path: Path, tiny) -> None:
    source = write(tmp_path / "a.jsonl", AS_JSON * 2000)  # more than a buffered reader holds
    tiny(50_000)
    blocks = cut(list_inputs([source])[0], TextRules(), [])
    first = next(blocks)
    Path(source).write_bytes(AS_JSON[:20])
    rest = list(blocks)
    with pytest.raises(DataError, match="became shorter while it was read"):
        for block in [first, *rest]:
            corpus.parse(block, TextRules())


def test_a_border_in_a_run_of_separators_is_found_as_by_looking_everywhere() -> None:
    """Runs of line breaks are passed over as a whole: one place after another takes minutes for megabytes."""

    def everywhere(separator: bytes, data: bytearray, start: int) -> int:
        for at in range(start, len(data)):
            nearby = range(max(0, at - len(separator) + 1), at)
            if data.startswith(separator, at) and not any(data.startswith(separator, other) for other in nearby):
                return at + len(separator)
        return -1

    chance = random.Random(1)
    for _ in range(3000):
        separator = bytes(chance.choices(b"ab", k=chance.randint(1, 5)))
        data = bytearray(chance.choices(b"aab", k=chance.randint(0, 40)))
        start = chance.randint(0, 40)
        assert text_blocks._separator_finder(separator)(data, start) == everywhere(separator, data, start)
