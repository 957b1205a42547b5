"""gptworks eval on WikiText, LAMBADA and held-out text: tables, JSON, files per document, and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.data.store import sha256_of

Call = Callable[..., Any]
PASSAGES = [
    "Anna took it home to Tom",
    "They found a letter by the river",
    "On Friday he read the letter",
    "The key lay by the\nriver",
    "It was a silver key",
]


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    file = tmp_path / "lambada.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return file


@pytest.fixture
def wiki(tmp_path: Path, corpus_file: Path) -> Path:
    file = tmp_path / "wiki.tokens"
    file.write_text(
        " = Title = \n" + corpus_file.read_text(encoding="utf-8")[:1500].replace(",", " ,"), encoding="utf-8"
    )
    return file


def result(done: Any) -> dict[str, Any]:
    return json.loads(done.out)


def test_a_result_names_what_it_was_measured_with(finished: Path, wiki: Path, passages: Path, call: Call) -> None:
    portable = finished / "checkpoints" / "step-00000006" / "portable"
    weights = sha256_of(portable / "model.safetensors")
    for task, data, name in (
        ("wikitext", wiki, "wikitext, sliding window, overlap 8, detokenized (Megatron)"),
        ("lambada", passages, "strict: last whitespace word"),
    ):
        got = result(call("eval", "--task", task, "--data", data, "--model", finished, "--overlap", 8, "--json"))
        assert got["task"] == task and got["protocol"].startswith(name)
        assert got["data"] == {"path": str(data), "sha256": sha256_of(data)}
        (row,) = got["rows"]
        assert row["model"] == str(finished) and row["weights_sha256"] == weights
        assert len(row["tokenizer"]["identity"]) == 64
        assert got["published"] == []
        command = ["eval", "--task", task, "--data", data, "--model", finished, "--overlap", 8]
        shown = call(*command).out
        assert all(text in shown for text in (name, sha256_of(data), weights)) and "published" not in shown
        assert "published, not reproduced here" in call(*command, "--published").out
        others = result(call(*command, "--published", "--json"))["published"]
        assert others and all(each["status"] == "published, not reproduced here" for each in others)


def test_every_kind_of_folder_gives_the_same(finished: Path, wiki: Path, call: Call) -> None:
    step = finished / "checkpoints" / "step-00000006"
    places = [finished, step, step / "portable", finished / "latest"]
    models = [part for place in places for part in ("--model", place)]
    rows = result(call("eval", "--task", "wikitext", "--data", wiki, "--overlap", 16, *models, "--json"))["rows"]
    assert [row["model"] for row in rows] == [str(place) for place in places]
    assert len({row["loss"] for row in rows}) == len({row["weights_sha256"] for row in rows}) == 1


@pytest.mark.slow
def test_a_step_without_a_portable_folder(recipe: Path, wiki: Path, tmp_path: Path, call: Call) -> None:
    rows = []
    for name, setting in (("with", "true"), ("without", "false")):
        call("train", "-c", recipe, "--out", tmp_path / name, f"checkpoint.portable={setting}")
        rows += result(call("eval", "--task", "wikitext", "--data", wiki, "--model", tmp_path / name, "--json"))["rows"]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert rows[0]["weights_sha256"] != rows[1]["weights_sha256"], "the hash is that of the files"


def test_several_models_in_one_table(finished: Path, passages: Path, small_store: Path, call: Call) -> None:
    other = finished / "checkpoints" / "step-00000004"
    both = ["--model", finished, "--model", other]
    rows = result(call("eval", "--task", "lambada", "--data", passages, *both, "--json"))["rows"]
    assert rows[0]["target_perplexity"] != rows[1]["target_perplexity"]
    assert rows[0]["weights_sha256"] != rows[1]["weights_sha256"]
    rows = result(call("eval", "--data", small_store, *both, "--baselines", "--json"))["rows"]
    alone = [result(call("eval", "--data", small_store, "--model", m, "--json"))["rows"][0] for m in (finished, other)]
    assert [row["loss"] for row in rows[:2]] == [row["loss"] for row in alone]
    assert [row["model"] for row in rows[2:]] == ["unigram (tokens)", "bigram (tokens)", "gzip -9"]


def test_per_document_and_going_on(finished: Path, passages: Path, wiki: Path, tmp_path: Path, call: Call) -> None:
    for task, data in (("lambada", passages), ("wikitext", wiki)):
        out = tmp_path / f"{task}.out"
        command = ["eval", "--task", task, "--data", data, "--model", finished, "--per-document", out, "--json"]
        command += ["--overlap", 16, "--batch-size", 2]
        whole = call(*command).out
        lines = out.read_text().splitlines()
        assert (
            len(lines) > 5
            and json.loads(lines[0])["weights_sha256"] == result(call(*command))["rows"][0]["weights_sha256"]
        )
        out.write_text("\n".join(lines[:3]) + "\n")
        assert call(*command).out == whole
        assert out.read_text().splitlines() == lines
        done = call(*command[:-2], "--batch-size", 3, "--limit", 2, expect=2)
        assert f"--per-document: {out} was written with total {len(lines) - 1}, now 2" in done.err
    other = finished / "checkpoints" / "step-00000004"
    command = [
        "eval",
        "--task",
        "wikitext",
        "--data",
        wiki,
        "--overlap",
        16,
        "--per-document",
        tmp_path / "wikitext.out",
    ]
    assert "was written with weights_sha256" in call(*command, "--model", other, expect=2).err


def test_held_out_documents(finished: Path, small_store: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "documents.jsonl"
    got = result(call("eval", "--data", small_store, "--model", finished, "--per-document", out, "--json"))
    lines = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert got["rows"][0]["documents"] == len(lines) == 16
    for line in lines:
        assert line["perplexity"] == pytest.approx(math.exp(-line["log_probability"] / line["tokens"]))
    assert 50 < lines[0]["perplexity"] < 1000
    assert len(got["data"]["sha256"]) == 64 and got["rows"][0]["samples"] > 16
    few = result(call("eval", "--data", small_store, "--model", finished, "--limit", 3, "--json"))
    assert few["rows"][0]["samples"] == 3 and few["rows"][0]["tokens"] == 3 * 16
    assert few["remarks"] == ["only the first 3 were measured"]


def test_limits_and_windows_without_overlap(finished: Path, wiki: Path, passages: Path, call: Call) -> None:
    command = ["eval", "--data", wiki, "--model", finished, "--task", "wikitext", "--json"]
    row = result(call(*command, "--overlap", "none", "--limit", 2))["rows"][0]
    assert (row["windows"], row["tokens"]) == (2, 64)
    sliding, apart = (result(call(*command, "--overlap", n))["rows"][0] for n in (8, "none"))
    assert sliding["tokens"] == apart["tokens"] == sliding["stream_tokens"] - 1
    assert sliding["windows"] > apart["windows"]
    got = result(call("eval", "--data", passages, "--model", finished, "--task", "lambada", "--limit", 2, "--json"))
    assert got["rows"][0]["total"] == 2


def test_log_lines_of_paddle(finished: Path, wiki: Path, passages: Path, call: Call) -> None:
    command = ["eval", "--model", finished, "--log-style", "fleetx", "--batch-size", 2, "--overlap", 8]
    first, *_, last = call(*command, "--task", "lambada", "--data", passages).out.splitlines()
    assert "] - step 0, batch: 0, number correct: 0.000000, speed: " in first
    assert last.endswith(
        f" validation results on {passages} | number correct: 0.0000E+00 | total examples: 5.0000E+00 | "
        "avg accuracy: 0.0000E+00"
    )
    *_, last = call(*command, "--task", "wikitext", "--data", wiki).out.splitlines()
    assert f" validation results on {wiki} | avg loss: " in last and " | token ratio: " in last and last.endswith(" |")


def test_the_data_of_standard(finished: Path, passages: Path, call: Call) -> None:
    command = ["eval", "--task", "lambada", "--data", passages, "--model", finished]
    assert (
        "note: the data has capital letters, so it is not the text of lambada_standard"
        in call(*command, "--protocol", "standard").out
    )
    passages.write_text(passages.read_text().lower())
    standard, openai = (result(call(*command, "--protocol", name, "--json")) for name in ("standard", "openai"))
    assert standard["remarks"] == [] and "no capital letters" in openai["remarks"][0]
    assert standard["rows"] == openai["rows"]


@pytest.mark.parametrize(
    ("task", "content", "options", "said"),
    [
        ("lambada", '{"text": "one two"}\n{"text": \n', [], "{data}: line 2: not JSON"),
        ("lambada", '{"txt": "one two"}\n', [], "{data}: line 1: has no 'text'; its keys: txt"),
        ("lambada", "", [], "{data}: no passage in it"),
        ("lambada", '{"text": "one"}\n', [], "{data}: passage 1 is 'one'"),
        ("lambada", json.dumps({"text": "river " * 60}), [], "passage 1 has"),
        ("lambada", '{"text": "a b"}', ["--protocol", "lenient"], "lambada has none called 'lenient'"),
        ("wikitext", "", [], "{data}: empty"),
        ("wikitext", "a b c", ["--protocol", "raw"], "wikitext has none called 'raw'. Protocols: detokenized, as-is"),
        ("wikitext", "a b c", ["--overlap", "33"], "--overlap: got 33; needs 1 to 32"),
        ("wikitext", "a b c", ["--overlap", "0"], "--overlap: got 0"),
        ("wikitext", "a b c", ["--limit", "-1"], "--limit: got -1"),
        ("wikitext", "a b c", ["--batch-size", "0"], "--batch-size: got 0"),
        ("wikitext", "a b c", ["--model", "other", "--per-document", "x"], "but 2 models were given"),
        ("wikitext", "a b c", ["--split", "all"], "--split: is for --task heldout, got --task wikitext"),
        ("lambada", '{"text": "a b"}', ["--baselines"], "--baselines: is for --task heldout"),
        ("heldout", "", ["--log-style", "fleetx"], "--log-style fleetx: is for --task lambada and wikitext"),
        ("heldout", "", ["--protocol", "strict"], "--protocol: got 'strict', but heldout has one way only"),
    ],
)
def test_what_is_refused(
    task: str, content: str, options: list[str], said: str, finished: Path, tmp_path: Path, call: Call
) -> None:
    data = tmp_path / "data.txt"
    data.write_text(content)
    done = call("eval", "--model", finished, "--task", task, "--data", data, *options, expect=2)
    assert done.err.startswith("error: ") and "Traceback" not in done.err
    assert said.format(data=data) in done.err
    assert done.out == ""


@pytest.mark.parametrize("task", ["wikitext", "lambada"])
def test_models_and_files_that_are_not_there(task: str, finished: Path, wiki: Path, tmp_path: Path, call: Call) -> None:
    command = ["eval", "--task", task]
    assert f"{tmp_path}: no checkpoint here" in call(*command, "--data", wiki, "--model", tmp_path, expect=2).err
    missing = tmp_path / "nowhere.jsonl"
    assert f"{missing}: no such file" in call(*command, "--data", missing, "--model", finished, expect=2).err
    portable = finished / "checkpoints" / "step-00000006" / "portable"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (portable / name).unlink()
    done = call(*command, "--data", wiki, "--model", portable, expect=2)
    assert f"{portable}: has no tokenizer" in done.err


def test_the_default_overlap_needs_a_context(finished: Path, wiki: Path, call: Call) -> None:
    call("eval", "--task", "wikitext", "--data", wiki, "--model", finished, "--limit", 1)
    done = call("eval", "--task", "wikitext", "--data", wiki, "--model", finished, "--overlap", "wide", expect=2)
    assert "got 'wide'; needs a number of tokens, or none" in done.err
