"""Where somebody stumbled who trained on texts of their own for the first time."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks
from gptworks.data.corpus import Skipped, read_documents
from gptworks.data.text_blocks import TextRules

Call = Callable[..., Any]
SMALL = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=1", "model.max_positions=16", "run.threads=1"]
SMALL += ["model.vocab_size=300", "run.device=cpu", "batch.global_size=4", "train.log_every=1"]
LINES = [f"On {day} morning {who} found a map." for day in ("Monday", "Friday") for who in ("Anna", "Tom", "Mei")]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def held_out_steps(run: str) -> list[int]:
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "held_out_loss" in line]


# Inputs


def test_a_pattern_of_files_without_a_blank_line(call: Call) -> None:
    """Each file is one document: a part of them is held out by position, which is said, and measured by eval too."""
    Path("texts").mkdir()
    for name in ("a", "b"):
        Path("texts", f"{name}.txt").write_text("\n".join(LINES * 8))
    done = call("train", *SMALL, "data.path=texts/*.txt", "train.steps=2", "--out", "run")
    assert "data:  texts/*.txt is text: 2 documents, " in done.out and "prepared as run/.inputs/texts\n" in done.out
    assert "data:  2 documents cannot be divided as data.split asks: the text is cut by position into 20" in done.out
    assert held_out_steps("run") == [1, 2] and "no evaluation" not in done.out
    assert "held-out text (shares 949,50,1)" in call("eval", "--model", "run").out
    # By hand the same pattern is read too.
    prepared = call("prepare", "texts/*.txt", "--tokenizer", "run", "--append-eod", "--out", "data/texts")
    assert "data/texts.bin: 2 documents, " in prepared.out
    missing = call("train", *SMALL, "data.path=texts/*.md", "train.steps=2", "--out", "none", expect=2)
    assert "texts/*.md: no file matches this pattern" in missing.err and not Path("none").exists()


def test_one_text_in_a_list_does_not_end_the_evaluation(call: Call) -> None:
    Path("one.txt").write_text("\n".join(LINES * 20))
    Path("many.txt").write_text("\n\n".join(LINES * 20))
    call("prepare", "one.txt", "many.txt", "--train-tokenizer", "300", "--append-eod", "--out", "both")
    for name in ("one", "many"):
        call("prepare", f"{name}.txt", "--tokenizer", "both.tokenizer.json", "--append-eod", "--out", name)
    done = call("train", *SMALL, "data.path=[one, many]", "train.steps=1", "--out", "run")
    assert "note:  not evaluated on: one.bin: the held_out split has 0 of 1 document and 0 tokens" in done.out
    assert held_out_steps("run") == [1]


def test_the_command_that_an_error_recommends_is_whole(call: Call) -> None:
    Path("recipes.csv").write_text("name,steps\n" + "".join(f'"dish {n}","{LINES[n % 6]}"\n' for n in range(60)))
    given = ["train", *SMALL, "train.steps=2", "--out", "run"]
    err = call(*given, "data.path=recipes.csv", expect=2).err
    assert (
        "no column 'text'. Columns: name, steps. Choose one with data.key=NAME, or several with commas between" in err
    )
    command = re.search(
        r"By hand: `(gptworks prepare recipes.csv --key NAME --train-tokenizer 300 .*?)`, then (\S+)\.\n", err
    )
    assert command, err
    call(*shlex.split(command[1].replace("NAME", "steps"))[1:])
    call(*given, command[2])
    call("train", *SMALL, "train.steps=2", "data.path=recipes.csv", "data.key=steps", "--out", "other")
    assert gptworks.load_config("other/config.yaml").model == gptworks.load_config("run/config.yaml").model
    Path("recipes.jsonl").write_text('{"steps": "cook it"}\n')
    err = call(*given[:-1], "none", "data.path=recipes.jsonl", expect=2).err
    assert "data.key=steps takes that one" in err and "prepare recipes.jsonl --key steps --train-tokenizer 300" in err
    assert "1 line skipped" in err


def test_text_is_evaluated_without_a_store(call: Call) -> None:
    Path("train.txt").write_text("\n\n".join(LINES * 10))
    call("train", *SMALL, "data.path=train.txt", "train.steps=2", "--out", "run")
    Path("other.csv").write_text("name,steps\n" + "".join(f'"dish {n}","{LINES[n % 6]}"\n' for n in range(9)))
    (row,) = json.loads(call("eval", "--model", "run", "--data", "other.csv", "--key", "steps", "--json").out)["rows"]
    options = ["--tokenizer", "run", "--key", "steps", "--append-eod", "--out", "store"]
    call("prepare", "other.csv", *options)
    (same,) = json.loads(call("eval", "--model", "run", "--data", "store", "--split", "all", "--json").out)["rows"]
    assert row == same and row["tokens"] > 0
    in_python = gptworks.evaluate("run", "other.csv", key="steps", device="cpu")
    assert in_python.tokens == row["tokens"] and in_python.loss == pytest.approx(row["loss"], rel=1e-6)
    err = call("eval", "--model", "run", "--data", "other.csv", expect=2).err
    assert "no column 'text'. Columns: name, steps. Choose one with --key, or several with commas between." in err
    Path("short.txt").write_text("Anna\n")
    err = call("eval", "--model", "run", "--data", "short.txt", expect=2).err
    assert err.startswith("error: short.txt: the train split has 1 of 1 document and ") and "one sample needs 17" in err
    err = call("eval", "--model", "run", "--data", "store", "--key", "steps", expect=2).err
    assert "--key: got 'steps', but store is not text" in err


def test_text_is_named_among_what_a_run_can_read(call: Call) -> None:
    err = call("train", *SMALL, "train.steps=1", "data.path=storys.jsonl", expect=2).err
    assert "storys.jsonl: no such dataset. Needed: a file or folder of text, or the prefix, a file" in err
    assert "Needed: a text file or a folder of text, or" in call("train", *SMALL, "train.steps=1", expect=2).err


# Before and after the steps


def test_how_long_is_asked_before_text_is_prepared(call: Call) -> None:
    Path("train.txt").write_text("\n\n".join(LINES))
    for more in ([], ["--dry-run"], ["--show-batch"], ["--nproc", "2"]):
        done = call("train", *SMALL, "data.path=train.txt", "--out", "run", *more, expect=2)
        assert "train.steps: how long to train is not said" in done.err and done.out == ""
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.steps=1"], "optim.schedule cosine comes to optim.min_lr (0) in the last step"),
        (["train.steps=1", "optim.warmup_steps=1", "optim.warmup_from=0"], "the warmup begins at 0"),
        (["train.steps=2"], ""),
        (["train.steps=1", "optim.schedule=constant"], ""),
        (["train.steps=1", "optim.min_lr=1e-5"], ""),
        (["train.steps=1", "optim.lr=0"], ""),
    ],
)
def test_a_rate_of_0_in_all_steps_is_said(settings: list[str], said: str, small_store: Path, call: Call) -> None:
    done = call("train", *SMALL, "model.vocab_size=512", f"data.path={small_store}", *settings, "--out", "run")
    note = "note:  the learning rate is 0 in the whole run (1 step), so nothing is learned: "
    assert (note + said in done.out) if said else ("learning rate is 0" not in done.out)


def test_a_run_that_is_finished_says_so(small_store: Path, call: Call) -> None:
    given = [*SMALL, "model.vocab_size=512", f"data.path={small_store}", "optim.schedule=constant"]
    first = call("train", *given, "train.steps=1", "--out", "run").out
    assert "; 1 step\n" in first and "done: 1 step. Everything" in first
    again = call("train", "-c", "run/config.yaml", "--resume", "auto").out
    assert "done:" not in again
    told = re.search(
        r"nothing to do: the run has done its 1 step \(train\.steps=1\)\. .*such as: gptworks (.*)\n", again
    )
    assert told
    assert "done: 2 steps." in call(*shlex.split(told[1])).out


def test_ctrl_c_before_the_first_step(small_store: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptworks.train import loop

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "prepare", interrupted)
    done = call("train", *SMALL, f"data.path={small_store}", "train.steps=2", "--out", "run", expect=130)
    assert done.err == "stopped by Ctrl-C before the first step; nothing was trained\n"


@pytest.mark.slow
def test_make_does_not_go_on_after_ctrl_c(recipe: Path) -> None:
    """The rest of a script would evaluate a model that is not finished."""
    command = f"{sys.executable} -m gptworks train -c {recipe} --out run train.steps=1000000 checkpoint.every=0"
    Path("Makefile").write_text(f"all:\n\techo $$$$ > pid; exec {command}\n\ttouch evaluated\n")
    with subprocess.Popen(["make"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as make:
        while not Path("run/metrics.jsonl").exists() or not Path("run/metrics.jsonl").read_text():
            assert make.poll() is None, make.communicate()
            time.sleep(0.05)
        os.kill(int(Path("pid").read_text()), signal.SIGINT)
        out, err = make.communicate()
    assert make.returncode == 2 and "Error 130" in err, err
    assert "and saved. Go on with: gptworks train -c run/config.yaml --resume auto" in out
    assert not Path("evaluated").exists()


# Recipes: a folder of tables, whose texts lie in several columns


RECIPES = [
    ['Käse stew, "Omas Art"', "200 g Käse, 2 个 豆腐", "1. Chop, then fry.\n2. Serve hot.", 86],
    ["Plain soup", "", "1. Boil 米饭.", 5],
]
JOINED = [
    'Käse stew, "Omas Art"\n200 g Käse, 2 个 豆腐\n1. Chop, then fry.\n2. Serve hot.\n86',
    "Plain soup\n1. Boil 米饭.\n5",
]
COLUMNS = ["title", "ingredients", "steps", "minutes"]


def write_recipes(kind: str) -> None:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in RECIPES]
    if kind == "csv":
        with Path("recipes.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerows([COLUMNS, *RECIPES])
    elif kind == "jsonl":
        Path("recipes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        Path("recipes.json").write_text(json.dumps(rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        columns = pyarrow.Table.from_pylist(rows)
        if kind == "parquet":
            parquet.write_table(columns, "recipes.parquet")
        else:
            with pyarrow.ipc.new_stream("recipes.arrow", columns.schema) as stream:
                stream.write_table(columns)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet", "arrow"])
def test_a_text_of_several_columns(kind: str) -> None:
    """Numbers are written out, and what is empty leaves no line."""
    write_recipes(kind)
    rules = TextRules(("title, ingredients,steps,minutes",))
    assert list(read_documents([f"recipes.{kind}"], rules, Skipped(strict=True))) == [(text,) for text in JOINED]
    pair = TextRules(("title,ingredients", "steps"))
    found = list(read_documents([f"recipes.{kind}"], pair, Skipped(strict=True)))
    assert found[1] == ("Plain soup", "1. Boil 米饭.") and found[0][1] == RECIPES[0][2]


def test_a_column_whose_own_name_has_a_comma() -> None:
    Path("a.csv").write_text('a,"a,b",b\n1,2,3\n')
    Path("a.jsonl").write_text('{"a": "1", "a,b": "2", "b": "3"}\n')
    for name in ("a.csv", "a.jsonl"):
        assert list(read_documents([name], TextRules(("a,b",)), Skipped(strict=True))) == [("2",)]


def test_recipes_are_trained_on_written_and_evaluated(call: Call) -> None:
    Path("recipes").mkdir()
    for part in range(3):
        with Path("recipes", f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *RECIPES * 10])
    given = ["train", *SMALL, "data.path=recipes", "train.steps=2", "--out", "run"]
    missing = call(*given, expect=2).err
    assert "no column 'text'. Columns: title, ingredients, steps, minutes. Choose one with data.key=NAME, or" in missing
    misspelt = call(*given, "data.key=title,stpes", expect=2).err
    assert "no column 'stpes'. " in misspelt and "Did you mean steps? " in misspelt
    assert not Path("run").exists()
    done = call(*given, "data.key=title,ingredients,steps")
    assert "data:  recipes is text: 60 documents, " in done.out
    # The folder of a run is enough, as for plot and report.
    assert "held-out text" in call("eval", "run").out
    assert call("generate", "run", "--prompt", "Käse", "--max-new-tokens", "2").out.startswith("Käse")
    assert call("generate", "--prompt", "Käse", "--max-new-tokens", "2", "run").out.startswith("Käse")


def test_a_model_that_is_not_there_or_not_named(call: Call) -> None:
    assert call("eval", "--model", "runs/nope", expect=2).err.startswith(
        "error: runs/nope: no such folder. Needed: a run"
    )
    assert (
        call("eval", expect=2).err
        == "error: eval: no model. Needed: --model DIR, such as the folder of a run (runs/...).\n"
    )
    assert "generate: no model." in call("generate", "--prompt", "a", expect=2).err
    assert "generate: unknown argument b" in call("generate", "a", "b", "--prompt", "c", expect=2).err


def test_words_in_the_wrong_place_are_given_theirs(call: Call) -> None:
    for folder in ("run", "other"):
        Path(folder).mkdir()
    Path("run/config.yaml").write_text("{}\n")
    resumed = call("train", "--resume", "run/checkpoints/step-00000002", "train.steps=3", expect=2)
    assert resumed.err == (
        "error: --resume run/checkpoints/step-00000002: no configuration. That of the run goes with it: "
        "-c run/config.yaml --resume auto.\n"
    )
    assert resumed.out == ""
    err = call("train", "-c", "run", "--resume", "auto", expect=2).err
    assert "run: 1 problem\n  is a folder; needs a YAML file. The configuration of this run is run/config.yaml." in err
    assert "is a folder; needs a YAML file.\n" in call("train", "-c", "other", expect=2).err
    assert "no value. Needed: --resume auto, or the folder" in call("train", "--resume", expect=2).err
    assert "generate: no prompt. Needed: --prompt TEXT, --prompts FILE" in call("generate", "run", "Soup", expect=2).err
    assert call("eval", "run", "soups.csv", expect=2).err == (
        "error: eval: soups.csv is not a model. What to measure on is --data soups.csv.\n"
    )
    assert call("plot", "none", expect=2).err == "error: none: no such folder. Needed: the folder of a training run.\n"


def test_a_device_that_is_not_here_is_said_before_text_is_prepared(call: Call) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    Path("train.txt").write_text("\n\n".join(LINES * 4))
    settings = [each for each in SMALL if not each.startswith("run.device")]
    for more in ([], ["--dry-run"]):
        done = call("train", *settings, "data.path=train.txt", "train.steps=2", "--device", "cuda", *more, expect=2)
        assert "run.device: cuda is not available here" in done.err and done.out == ""
    assert not Path("runs").exists()


def test_what_a_look_prepares_is_not_named_as_if_it_stayed(call: Call) -> None:
    Path("train.txt").write_text("\n\n".join(LINES * 4))
    done = call("train", *SMALL, "data.path=train.txt", "data.split=80,20", "train.steps=2", "--dry-run")
    assert "learned from the text, prepared for this look only\n" in done.out and "prepared as" not in done.out


@pytest.mark.parametrize("name", ["recipes", "none.csv", "data/none"])
def test_a_path_without_its_key(name: str, call: Call) -> None:
    Path("recipes").mkdir()
    said = call("train", "--preset", "tiny", name, "train.steps=2", expect=2).err
    assert f"A text or dataset to train on is data.path={name}." in said
    assert "data.path" not in call("train", "--preset", "tiny", "nonsense", "train.steps=2", expect=2).err


# The best so far is of the same held-out samples


def test_the_best_is_chosen_anew_on_another_number_of_samples(small_store: Path, call: Call) -> None:
    given = [*SMALL, "model.vocab_size=512", f"data.path={small_store}", "data.split=80,20", "evaluate.every=1"]
    given += ["evaluate.batches=1", "checkpoint.keep_best=true", "optim.schedule=constant"]
    call("train", *given, "train.steps=2", "--out", "run")
    alike = call("train", "-c", "run/config.yaml", "train.steps=3", "--resume", "auto").out
    assert "chosen anew" not in alike
    other = call("train", "-c", "run/config.yaml", "train.steps=4", "batch.global_size=8", "--resume", "auto").out
    assert "step 4: evaluated on 8 samples, before on 4: the best so far is chosen anew" in other
    assert re.search(r"step 4: held-out loss \S+ over 128 tokens, the best so far", other)
    manifest = json.loads(Path("run/checkpoints/step-00000004/manifest.json").read_text())
    assert manifest["best"]["step"] == 4 and manifest["held_out_samples"] == 8


def test_the_best_of_an_old_checkpoint_is_not_compared(small_store: Path, call: Call) -> None:
    """Version 1 did not write down what it was measured on."""
    given = [*SMALL, "model.vocab_size=512", f"data.path={small_store}", "data.split=80,20", "evaluate.every=1"]
    call("train", *given, "train.steps=2", "optim.schedule=constant", "--out", "run")
    file = Path("run/checkpoints/step-00000002/manifest.json")
    values = json.loads(file.read_text())
    for name in ("checksum", "held_out_samples"):
        values.pop(name)
    file.write_text(json.dumps(values | {"version": 1, "best": {"step": 2, "held_out_loss": 0.001}}))
    again = call("train", "-c", "run/config.yaml", "train.steps=3", "--resume", "auto").out
    assert "samples, before on an unknown number: the best so far is chosen anew" in again
    assert re.search(r"step 3: held-out loss .*, the best so far", again)


# Second walk


@pytest.fixture
def small_llama(tmp_path: Path) -> Path:
    """A folder as Hugging Face writes it, without a tokenizer."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 1, "vocab_size": 300}
    llama = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none"}
    gptworks.GPT(gptworks.ModelConfig(**sizes, **llama)).save_pretrained(tmp_path / "llama")
    (tmp_path / "texts.txt").write_text("\n\n".join(LINES))
    return tmp_path / "llama"


@pytest.mark.slow
def test_a_dry_run_refuses_the_weights_of_another_model(small_llama: Path, call: Call) -> None:
    tune = ["train", f"init.checkpoint={small_llama}", "data.path=texts.txt", "data.tokenizer=gpt2", "train.steps=1"]
    for dry in ([], ["--dry-run"]):
        done = call(*tune, "--preset", "tiny", "data.seq_len=4", *dry, expect=2)
        assert "holds another model:" in done.err and "model.num_layers: 1 there, 4 here" in done.err
        assert "Leave out --preset and these keys" in done.err


def test_text_for_weights_without_a_tokenizer(small_llama: Path, call: Call) -> None:
    done = call("train", f"init.checkpoint={small_llama}", "data.path=texts.txt", "train.steps=1", expect=2)
    assert "has no tokenizer, and texts.txt is text. Name one with data.tokenizer=gpt2" in done.err


def test_a_tokenizer_that_is_too_large_for_the_weights(small_llama: Path, call: Call) -> None:
    tune = ["train", f"init.checkpoint={small_llama}", "data.path=texts.txt", "data.tokenizer=gpt2", "train.steps=1"]
    done = call(*tune, "data.seq_len=4", expect=2)
    assert "has 50257 tokens, but model.vocab_size is 300. Prepare it with the tokenizer of the model" in done.err


def test_a_model_that_nobody_chose_is_named(tmp_path: Path, call: Call) -> None:
    (tmp_path / "texts.txt").write_text("\n\n".join(LINES * 200))
    words = ["train", "data.path=texts.txt", "data.seq_len=16", "train.steps=1", "--dry-run"]
    note = "no model is chosen, so it is GPT-2 with 12 layers of 768"
    assert note in call(*words).out
    assert note not in call(*words, *SMALL).out


def test_no_command_shows_all_of_them(call: Call) -> None:
    told = call(expect=2).err
    assert all(f"\n    {verb} " in told for verb in ("prepare", "train", "serve"))


def test_a_short_run_is_planned_in_minutes(call: Call) -> None:
    told = call("plan", "--preset", "tiny", "--device", "a100-80g", "--tokens", "1e7").out
    took = re.search(r"take ([\d.]+) minutes, ([\d.]+) device-hours", told)
    assert took and float(took[1]) > 0 and float(took[2]) > 0


def test_serve_takes_a_folder_as_the_others_do(call: Call) -> None:
    assert call("serve", expect=2).err.startswith("error: serve: no model. Needed: --model DIR")
    assert "runs/nowhere" in call("serve", "runs/nowhere", expect=2).err
