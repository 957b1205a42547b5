"""Text to a store: what is read, what is written, what is skipped and what is refused."""

import hashlib
import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gptworks.data import corpus, prepare, text_blocks
from gptworks.data.store import Store
from gptworks.errors import DataError, TokenizerError
from gptworks.tokenizer import Tokenizer


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def write_jsonl(path: Path, *records: object) -> str:
    return write(path, "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def documents_of(prefix: Path, tokenizer: Tokenizer) -> list[str]:
    store = Store(prefix)
    starts = store.document_starts
    return [tokenizer.decode(store.tokens[a:b]) for a, b in pairwise(starts)]


@pytest.fixture
def prepared(small_tokenizer: Tokenizer, tmp_path: Path):
    """prepared(inputs, **rules) -> (summary, documents as text)."""

    def run(*inputs: str, append_eod: bool = False, strict: bool = False, **rules: object):
        given = corpus.TextRules(**rules)
        summary = prepare.prepare(
            prepare.PrepareJob(
                list(inputs), tmp_path / "out", small_tokenizer, rules=given, append_eod=append_eod, strict=strict
            )
        )
        return summary, documents_of(tmp_path / "out", small_tokenizer)

    return run


# Byte equality with the real thing


def test_store_equals_megatrons_byte_for_byte(shared_data: Path, tmp_path: Path, run_cli) -> None:
    vocab = shared_data / "vocab" / "gpt2-tiny-megatron"
    corpus_file = shared_data / "corpora" / "openwebtext-1000" / "openwebtext-1000.jsonl"
    run_cli(
        "prepare", corpus_file, "--out", tmp_path / "ours", "--append-eod",
        "--vocab-file", vocab / "gpt2-tiny-vocab.json", "--merge-file", vocab / "gpt2-tiny-merges.txt",
    )  # fmt: skip
    theirs = shared_data / "fixtures" / "megatron-mmididx" / "meg-gpt2-openwebtext_text_document"
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == theirs.with_suffix(suffix).read_bytes()


# Plain text


def test_blank_lines_stay_in_the_text_or_give_way_to_the_end_of_document(prepared, tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "one\ntwo\n\nthree\n\n\n\nfour\n")
    _, kept = prepared(text)
    assert kept == ["one\ntwo\n\n", "three\n\n", "four\n"]
    _, replaced = prepared(text, keep_separator=False, append_eod=True)
    assert replaced == ["one\ntwo<|endoftext|>", "three<|endoftext|>", "four\n<|endoftext|>"]


def test_other_separators(prepared, tmp_path: Path) -> None:
    text = write(tmp_path / "a.md", "one\n\nstill one\n%%\ntwo")
    assert prepared(text, separator="%%\n", keep_separator=False)[1] == ["one\n\nstill one\n", "two"]
    assert prepared(text, separator="")[1] == ["one\n\nstill one\n%%\ntwo"]


def test_without_eod_nothing_of_the_text_is_lost(prepared, corpus_file: Path) -> None:
    summary, documents = prepared(str(corpus_file))
    text = corpus_file.read_text(encoding="utf-8")
    assert "".join(documents) == text
    assert (summary.documents, summary.characters, summary.text_bytes) == (160, len(text), len(text.encode()))
    assert summary.text_bytes > summary.characters  # the accents


def test_windows_line_ends(prepared, tmp_path: Path) -> None:
    assert prepared(write(tmp_path / "a.txt", b"one\r\n\r\ntwo\r\n"))[1] == ["one\n\n", "two\n"]


def test_inputs_are_read_in_the_order_given(prepared, tmp_path: Path) -> None:
    one = write(tmp_path / "1.txt", "from one")
    two = write_jsonl(tmp_path / "2.jsonl", {"text": "from two"}, {"text": "again two"})
    assert prepared(two, one, two)[1] == ["from two", "again two", "from one", "from two", "again two"]


def test_text_that_is_not_utf8(prepared, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    bad, good = write(tmp_path / "bad.txt", b"caf\xe9"), write(tmp_path / "good.txt", "café")
    summary, documents = prepared(bad, good)
    assert documents == ["café"]
    assert summary.skipped.first == [f"{bad}:1: not UTF-8 text (byte 3 of its document)"]
    with pytest.raises(
        DataError, match=r"bad\.txt:1: not UTF-8 text \(byte 3 of its document\)\. Fix the line, or leave out --strict"
    ):
        prepared(bad, good, strict=True)


def test_blanks_around_documents_can_be_taken_off(prepared, tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", {"text": " \n one two \t"}, {"text": "  "}, {"text": "three"})
    summary, documents = prepared(lines, strip=True)
    assert (documents, summary.empty) == (["one two", "three"], 1)
    plain = write(tmp_path / "a.txt", " one\n\n\n two \n\nthree\n")
    assert prepared(plain, strip=True)[1] == ["one", "two", "three"]


# JSON lines


def test_key_of_the_text(prepared, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"body": "b1", "text": "t1"}, {"text": "t2", "body": "b2"})
    assert prepared(source)[1] == ["t1", "t2"]
    assert prepared(source, keys=("body",))[1] == ["b1", "b2"]


def test_byte_order_mark_blank_lines_escapes_and_a_missing_last_newline(prepared, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "caf\\u00e9 \\ud83d\\ude0a"}\n\n  \n{"text": "\\n\\t"}')
    summary, documents = prepared(source)
    assert documents == ["café 😊", "\n\t"]
    assert summary.skipped.count == 0


BAD_LINES = {
    "{": "not JSON (Expecting property name",
    '{"text": "a"} trailing': "not JSON (Extra data",
    "[1, 2]": "needs an object with key 'text', got list",
    '"words"': "needs an object with key 'text', got str",
    '{"title": "t", "body": "longer"}': "key 'text' is missing; keys here: title, body; --key body takes that one",
    '{"text": 5}': "key 'text' is not a string; got int",
    '{"text": null}': "key 'text' is not a string; got NoneType",
    '{"text": "half \\ud83d pair"}': "key 'text' is not valid Unicode: half of a surrogate pair",
    '{"x": ' + "9" * 5000 + "}": "not JSON (",
    '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}": "not JSON (",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_is_skipped_and_named_or_stops_everything(line: str, prepared, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"text": "good"}, line, {"text": "also good"})
    summary, documents = prepared(source)
    assert documents == ["good", "also good"]
    assert summary.skipped.count == 1
    (message,) = summary.skipped.first
    assert message.startswith(f"{source}:2: {BAD_LINES[line]}")
    with pytest.raises(DataError) as caught:
        prepared(source, strict=True)
    assert str(caught.value) == f"{message}. Fix the line, or leave out --strict to skip such lines."


def test_line_that_is_not_utf8(prepared, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", b'{"text": "good"}\n{"text": "\xff"}\n')
    summary, documents = prepared(source)
    assert (documents, summary.skipped.first) == (["good"], [f"{source}:2: not UTF-8 (byte 10)"])


def test_only_the_first_problems_are_kept_but_all_are_counted(prepared, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", *["{"] * 20, {"text": "good"})
    summary, _ = prepared(source)
    assert (summary.skipped.count, len(summary.skipped.first)) == (20, 5)


def test_empty_documents_are_left_out_and_counted(prepared, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": "a"}, {"text": ""})
    summary, documents = prepared(source, append_eod=True)
    assert (documents, summary.empty, summary.skipped.count) == (["a<|endoftext|>"], 2, 0)


# Prompt and completion


def test_prompt_and_completion_are_two_sequences_of_one_document(prepared, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"q": "2+2=", "a": "4"}, {"q": "", "a": "just this"}, {"q": "no answer"})
    summary, documents = prepared(source, keys=("q", "a"), append_eod=True)
    assert documents == ["2+2=4<|endoftext|>", "just this<|endoftext|>"]
    store = Store(tmp_path / "out")
    assert store.contents.documents.tolist() == [0, 2, 4]
    assert store.sidecar.kind == "examples"
    assert summary.skipped.first == [f"{source}:3: key 'a' is missing; keys here: q"]


@pytest.mark.parametrize("completion", ["", " \n"])
def test_an_empty_completion_is_reported(completion: str, prepared, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"q": "2+2=", "a": completion}, {"q": "1+1=", "a": "2"})
    summary, documents = prepared(source, keys=("q", "a"), append_eod=True)
    assert documents == ["1+1=2<|endoftext|>"]
    assert summary.skipped.first == [f"{source}:1: key 'a' is empty: there is nothing to learn"]


def test_prompt_and_completion_need_the_end_of_document(prepared, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"q": "2+2=", "a": "4"})
    with pytest.raises(DataError, match="prompt and completion: add --append-eod"):
        prepared(source, keys=("q", "a"))


# What is written


def test_sidecar_describes_the_store(small_store: Path, small_tokenizer: Tokenizer) -> None:
    sidecar = json.loads(small_store.with_suffix(".json").read_text())
    tokens = np.fromfile(small_store.with_suffix(".bin"), np.uint16)
    assert sidecar == {
        "kind": "text",
        "tokenizer": "small.tokenizer.json",
        "tokenizer_identity": small_tokenizer.identity,
        "vocab_size": 512,
        "eod_id": 511,
        "eod_appended": True,
        "documents": 160,
        "tokens": len(tokens),
        "dtype": "uint16",
        "sha256": {
            suffix: hashlib.sha256(small_store.with_suffix(suffix).read_bytes()).hexdigest()
            for suffix in (".bin", ".idx")
        },
        "data_format": "megatron",
        "format": "gptworks-store",
        "version": 1,
    }
    assert (tokens == 511).sum() == 160
    assert sorted(path.name for path in small_store.parent.iterdir()) == [
        "small.bin", "small.idx", "small.json", "small.tokenizer.json",
    ]  # fmt: skip


def test_the_bundled_tokenizer_is_named_not_copied(corpus_file: Path, tmp_path: Path) -> None:
    prepare.prepare(prepare.PrepareJob([str(corpus_file)], tmp_path / "x", Tokenizer.from_pretrained("gpt2")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.json"]
    assert Store(tmp_path / "x").load_tokenizer().name == "gpt2"


def test_bytes_do_not_depend_on_how_many_texts_are_encoded_at_a_time(
    small_store: Path, corpus_file: Path, small_tokenizer: Tokenizer, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(text_blocks, "_READ_BYTES", 5000)
    calls: list[tuple[int, int]] = []
    rules = corpus.TextRules(keep_separator=False)
    prepare.prepare(
        prepare.PrepareJob(
            [str(corpus_file)],
            tmp_path / "small",
            small_tokenizer,
            rules=rules,
            append_eod=True,
            progress=lambda state, total: calls.append((state.sequences, state.tokens)),
        )
    )
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"small{suffix}").read_bytes() == small_store.with_suffix(suffix).read_bytes()
    assert len(calls) > 10 and calls == sorted(calls)
    assert calls[-1] == (160, len(Store(small_store).tokens))


def test_a_failure_leaves_the_old_store_and_no_leftovers(prepared, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", {"text": "the old store"})
    prepared(good)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    assert set(before) == {"out.bin", "out.idx", "out.json", "out.tokenizer.json"}
    bad = write_jsonl(tmp_path / "bad.jsonl", *[{"text": "x" * 100}] * 10, "{")
    with pytest.raises(DataError):
        prepared(bad, strict=True)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == before
    assert documents_of(tmp_path / "out", small_tokenizer) == ["the old store"]


def test_folders_for_the_store_are_made(corpus_file: Path, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare.prepare(prepare.PrepareJob([str(corpus_file)], tmp_path / "a" / "b" / "v1.5", small_tokenizer))
    assert Store(tmp_path / "a" / "b" / "v1.5").num_documents == 160


def test_large_vocabularies_get_wider_tokens(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "ab": 70_000}
    (tmp_path / "v.json").write_text(json.dumps(vocab))
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\n")
    wide = Tokenizer.from_files(tmp_path / "v.json", tmp_path / "m.txt")
    prepare.prepare(prepare.PrepareJob([write(tmp_path / "a.txt", "abba")], tmp_path / "x", wide))
    store = Store(tmp_path / "x")
    assert store.tokens.dtype == np.int32 and store.tokens.tolist() == [70_000, 1, 0]


# What is refused


def test_all_unusable_inputs_are_named_at_once(prepared, tmp_path: Path) -> None:
    picture = write(tmp_path / "a.png", "x")
    folder = tmp_path / "folder.txt"
    folder.mkdir()
    with pytest.raises(DataError) as caught:
        prepared(str(tmp_path / "gone.txt"), picture, str(folder), str(tmp_path / "gone.jsonl"))
    known = (
        ".txt, .text, .md, .jsonl, .ndjson, .json, .tokens, .raw, .csv, .tsv, .parquet, .arrow, any of them with .gz, "
        ".zst, .xz, .bz2, or .tar, .tgz, .txz"
    )
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'gone.txt'}: no such file. Check the path.",
        f"{picture}: kind of file not known from its name. Needed: {known}, or sample:NAME; or say what it is with "
        "--input-format.",
        f"{folder}: no text in this folder. Needed: files ending in {known}.",
        f"{tmp_path / 'gone.jsonl'}: no such file. Check the path.",
    ]
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("content", ["", "\n\n \n\n"])
def test_empty_corpus(content: str, prepared, tmp_path: Path) -> None:
    source = write(tmp_path / "empty.txt", content)
    with pytest.raises(DataError, match=r"empty\.txt: no text found; 0 lines skipped\."):
        prepared(source)
    assert not list(tmp_path.glob("out*"))


def test_corpus_of_bad_lines_only_shows_the_first(prepared, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"body": "x"}, {"body": "y"})
    with pytest.raises(DataError) as caught:
        prepared(source)
    assert str(caught.value) == (
        f"{source}: no text found; 2 lines skipped. "
        f"First problem: {source}:1: key 'text' is missing; keys here: body; --key body takes that one."
    )


def test_no_text_is_said_before_anything_about_a_vocabulary(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"number": 1}, {"body": "y"})
    with pytest.raises(DataError) as caught:
        prepare.train_tokenizer([str(source)], 512, corpus.TextRules())
    assert str(caught.value) == (
        f"{source}: no text found; 2 lines skipped. First problem: {source}:1: key 'text' is missing; keys here: "
        "number."
    )


def test_no_end_of_document_token(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text('{"a": 0}')
    (tmp_path / "m.txt").write_text("")
    tokenizer = Tokenizer.from_files(tmp_path / "v.json", tmp_path / "m.txt")
    source = write(tmp_path / "a.txt", "a")
    with pytest.raises(DataError, match=r"--append-eod: .*v\.json has no end-of-document token"):
        prepare.prepare(prepare.PrepareJob([source], tmp_path / "x", tokenizer, append_eod=True))


def test_places_that_cannot_be_written(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "a")
    with pytest.raises(DataError, match=r"a\.txt is not a folder"):
        prepare.prepare(prepare.PrepareJob([source], tmp_path / "a.txt" / "x", small_tokenizer))
    with pytest.raises(DataError, match="--out: '/' has no name"):
        prepare.prepare(prepare.PrepareJob([source], "/", small_tokenizer))
    (tmp_path / "x.part").write_text("a file where a folder is needed")
    with pytest.raises(DataError, match=r"x\.part is not a folder\. Needed: a folder"):
        prepare.prepare(prepare.PrepareJob([source], tmp_path / "x", small_tokenizer))


def test_tokenizer_for_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such file"):
        prepare.train_tokenizer([str(tmp_path / "gone.txt")], 300, corpus.TextRules())
    bad = write_jsonl(tmp_path / "bad.jsonl", "{")
    with pytest.raises(DataError, match=r"bad\.jsonl:1: not JSON"):
        prepare.train_tokenizer([bad], 300, corpus.TextRules(), strict=True)
    with pytest.raises(TokenizerError, match="vocabulary of 100 tokens is too small"):
        prepare.train_tokenizer([write(tmp_path / "a.txt", "a")], 100, corpus.TextRules())


# The command line


def test_prepare_from_the_command_line(small_store: Path, corpus_file: Path, tmp_path: Path, run_cli) -> None:
    done = run_cli(
        "prepare", corpus_file, "--out", tmp_path / "small", "--train-tokenizer", "512", "--append-eod", "--json"
    )
    summary = json.loads(done.stdout)
    assert done.stderr == ""
    assert {key: summary[key] for key in ("documents", "vocab_size", "skipped", "eod_appended")} == {
        "documents": 160, "vocab_size": 512, "skipped": 0, "eod_appended": True,
    }  # fmt: skip
    assert Store(tmp_path / "small").sidecar.tokens == summary["tokens"]
    again = run_cli(
        "prepare", corpus_file, "--out", tmp_path / "again", "--tokenizer", tmp_path / "small.tokenizer.json"
    )
    assert again.stdout.startswith(f"{tmp_path / 'again'}.bin: 160 documents, ")
    assert "end of document: not marked (--append-eod marks it)" in again.stdout
    one, two = Store(tmp_path / "small").sidecar, Store(tmp_path / "again").sidecar
    assert one.tokenizer_identity == two.tokenizer_identity


@pytest.mark.slow
def test_skipped_lines_are_reported(tmp_path: Path, run_cli) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"text": "good"}, "{")
    done = run_cli("prepare", source, "--out", tmp_path / "x")
    assert done.stderr.splitlines()[0].startswith(f"skipped {source}:2: not JSON (")
    assert done.stderr.splitlines()[1] == "1 line skipped; --strict stops at the first one instead"
    failed = run_cli("prepare", source, "--out", tmp_path / "x", "--strict", expect=2)
    assert failed.stderr.startswith(f"error: {source}:2: not JSON (") and "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--prompt-key", "q"], "error: --prompt-key and --completion-key go together: give both."),
        (["--vocab-file", "v.json"], "error: --vocab-file and --merge-file go together: give both."),
        (["--tokenizer", "gpt-9"], "error: gpt-9: not a tokenizer."),
        (["--train-tokenizer", "9"], "error: vocabulary of 9 tokens is too small"),
    ],
)
def test_options_that_do_not_fit_exit_2(
    options: list[str], expected: str, corpus_file: Path, tmp_path: Path, run_cli
) -> None:
    done = run_cli("prepare", corpus_file, "--out", tmp_path / "x", *options, expect=2)
    assert done.stderr.startswith(expected) and "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_its_own_files_in_the_folder_it_reads_are_not_text(
    corpus_file: Path, small_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(corpus_file.read_text())
    for format_ in ("megatron", "paddle", "nanogpt"):
        for _ in range(2):
            summary = prepare.prepare(
                prepare.PrepareJob([str(tmp_path)], tmp_path / "c", small_tokenizer, format=format_, strict=True)
            )
            assert summary.documents == 160


def test_examples_are_not_cut_into_rows(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"q": "one", "a": "two"})
    rules = text_blocks.TextRules(keys=("q", "a"))
    with pytest.raises(DataError, match="--row-length: prompts and completions are kept in a megatron store only"):
        prepare.prepare(
            prepare.PrepareJob([source], tmp_path / "x", small_tokenizer, rules=rules, append_eod=True, row_length=5)
        )


def test_another_end_of_document_starts_anew(small_tokenizer: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    """The identity of a tokenizer does not tell it; half of a store with one and half with another would be wrong."""
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 200)
    source = write_jsonl(tmp_path / "a.jsonl", *({"text": f"document {i}"} for i in range(100)))

    def stop(state: object, total: int) -> None:
        if state.blocks == 5:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(prepare.PrepareJob([source], tmp_path / "x", small_tokenizer, append_eod=True, progress=stop))
    other = small_tokenizer.with_eod(300)
    summary = prepare.prepare(prepare.PrepareJob([source], tmp_path / "x", other, append_eod=True))
    store = Store(tmp_path / "x")
    assert summary.blocks_kept == 0
    assert [int(store.tokens[end - 1]) for end in store.document_starts[1:]] == [300] * 100
