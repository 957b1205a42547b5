"""Exit codes: 2 without a traceback for what a user can fix, 1 with one for our own faults."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptworks.cli import main as command_line

Call = Callable[..., Any]


@pytest.fixture
def at_hand(tmp_path: Path, recipe: Path) -> dict[str, str]:
    """Things that are wrong in one way each."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "tab.yaml").write_text("model:\n\tnum_layers: 2\n")
    (tmp_path / "twice.yaml").write_text("model:\n  num_layers: 2\n  num_layers: 3\n")
    (tmp_path / "type.yaml").write_text("model:\n  num_layers: two\n")
    (tmp_path / "unknown.yaml").write_text("modle:\n  num_layers: 2\n")
    (tmp_path / "text.txt").write_text("A text that could be measured.\n")
    return {"here": str(tmp_path), "recipe": str(recipe)}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("prepare {here}/nowhere.txt --out {here}/x", "{here}/nowhere.txt: no such file"),
        ("prepare {here}/empty.txt --out {here}/x", "{here}/empty.txt: no text found"),
        ("prepare {here}/picture.png --out {here}/x", "kind of file not known"),
        ("prepare sample:latin --out {here}/x", "sample:latin: no such sample"),
        ("prepare {here}/short.txt --out {here}/x --train-tokenizer 10", "vocabulary of 10 tokens is too small"),
        ("prepare {here}/short.txt --out {here}/x --tokenizer {here}/none", "{here}/none: not a tokenizer"),
        ("prepare {here}/short.txt --out {here}/x --vocab-file v", "--vocab-file and --merge-file go together"),
        ("prepare {here}/short.txt --out {here}/x --prompt-key p", "--prompt-key and --completion-key go together"),
        ("train -c {here}/nowhere.yaml", "{here}/nowhere.yaml: 1 problem"),
        ("train -c {here}/tab.yaml", "line 2, column 1: a tab is used for indentation"),
        ("train -c {here}/twice.yaml", "line 3: key 'num_layers' again; it is already set on line 2"),
        ("train -c {here}/type.yaml", "model.num_layers: got 'two'"),
        ("train -c {here}/unknown.yaml", "modle.num_layers: unknown key; did you mean 'model.num_layers'?"),
        ("train -c {recipe} steps", "steps: an override has the form section.key=value"),
        ("train -c {recipe} -o =3", "=3: an override has the form section.key=value"),
        ("train --preset gpt5", "'gpt5' is not known. Did you mean gpt2? Presets: gpt2"),
        ("eval --model {here}/nowhere --data {here}/text.txt", "{here}/nowhere: no such folder"),
        ("eval --model {here} --data {here}/text.txt", "{here}: no checkpoint here"),
        ("generate --model {here} --prompt hello", "{here}: no checkpoint here"),
        ("generate --model {here} --prompts {here}/none", "{here}/none: cannot be read"),
        ("generate --model {here} --prompts {here}/empty.txt", "{here}/empty.txt: no prompt in it"),
        ("generate --model {here} --prompt x --temperature 0", "temperature: got 0"),
        ("plot {here}", "{here}/metrics.jsonl: no losses there yet"),
        ("config check -c {here}/tab.yaml", "a tab is used"),
        ("config diff {recipe} {here}/none.yaml", "{here}/none.yaml: 1 problem"),
    ],
)
def test_what_a_user_can_mend(command: str, said: str, at_hand: dict[str, str], call: Call) -> None:
    done = call(*command.format(**at_hand).split(), expect=2)
    assert done.err.startswith("error: ")
    assert said.format(**at_hand) in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "VERB"),
        (["generate", "--model", "x"], "--prompt"),
        (["generate", "--model", "x", "--prompt", "a", "--prompts", "b"], "not allowed with"),
        (["config"], "ACTION"),
    ],
)
def test_a_command_that_is_none(command: list[str], said: str, call: Call) -> None:
    done = call(*command, expect=2)
    if not command:
        assert done.err.startswith("usage: gptworks") and said in done.err
        return
    assert done.err.startswith(f"error: {command[0]}: ") and done.err.count("\n") == 1, "no screen of options"
    assert said in done.err and f"`gptworks {command[0]} --help`" in done.err


def test_an_evaluation_without_a_model(call: Call) -> None:
    assert call("eval", "--data", "x", expect=2).err == (
        "error: eval: no model. Needed: --model DIR, such as the folder of a run (runs/...).\n"
    )


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("fly", "unknown command fly. Commands: prepare, train, eval, "),
        ("trian", "unknown command trian; did you mean train? Commands: "),
        ("evaluate", "unknown command evaluate; did you mean eval? "),
        ("finetune", "unknown command finetune; did you mean train? "),
        ("sampel", "unknown command sampel; did you mean generate? "),
        ("presets", "unknown command presets; did you mean config presets? "),
        ("help", "unknown command help; did you mean --help? "),
    ],
)
def test_a_verb_that_is_none(verb: str, said: str, call: Call) -> None:
    assert call(verb, "--out", "x", expect=2).err.startswith(f"error: {said}")


def test_all_unknown_options_are_told_at_once(call: Call) -> None:
    done = call("train", "--presett", "tiny", "--lr", "-3", "--frobnicate", "train.steps=1", "--batch-size=4", expect=2)
    assert done.err == (
        "error: train: 4 unknown arguments\n"
        "  --presett; did you mean --preset?\n"
        "  --lr; did you mean optim.lr=VALUE?\n"
        "  --frobnicate\n"
        "  --batch-size=4; did you mean batch.global_size=4 or batch.micro_size=4?\n"
        "`gptworks train --help` lists what there is.\n"
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "--frobnicate"], "train: unknown argument --frobnicate. `gptworks train --help` lists"),
        (["plot", "here", "stray"], "plot: unknown argument stray."),
        (["prepare", "x", "--out", "y", "--append_eod"], "unknown argument --append_eod; did you mean --append-eod?"),
        (["train", "--rezume=auto"], "did you mean --resume?"),
        # What another tool has as an option of its own.
        (
            ["train", "--model", "gpt2"],
            "--model; did you mean --preset gpt2 for fresh weights, init.checkpoint=gpt2 to",
        ),
        (["train", "--bf16"], "unknown argument --bf16; did you mean precision.compute=bf16?"),
        (["train", "--fp16", "true"], "unknown argument --fp16; did you mean precision.compute=fp16?"),
        (["train", "--gpu"], "unknown argument --gpu; did you mean --device cuda?"),
        (["prepare", "x", "--out", "y", "--vocab_size", "300"], "--vocab_size; did you mean --train-tokenizer 300?"),
        (["generate", "x", "--text", "a"], "unknown argument --text; did you mean --prompt a?"),
        (["eval", "--ckpt", "x"], "unknown argument --ckpt; did you mean --model x?"),
        # An unknown option comes before a missing one, which it may stand for.
        (["prepare", "x", "--output", "y"], "prepare: unknown argument --output; did you mean --out?"),
        (["prepare", "--input", "x", "--out", "y"], "--input; did you mean x alone, without an option?"),
        # A value.
        (["train", "--device", "gpu"], "argument --device: invalid choice: 'gpu' (choose from 'auto', 'cpu', 'cuda', "),
        (["train", "--device", "gpu"], "; did you mean cuda? `gptworks train --help`"),
        (["config", "list"], "; did you mean presets? `gptworks config --help`"),
        # What other tools call it.
        (["train", "--lr", "1e-3"], "unknown argument --lr; did you mean optim.lr=1e-3?"),
        (["train", "--learning_rate=1e-3"], "unknown argument --learning_rate=1e-3; did you mean optim.lr=1e-3?"),
        (
            ["train", "--preset", "tiny", "--max-iters", "9"],
            "unknown argument --max-iters; did you mean train.steps=9?",
        ),
        (["train", "--steps", "9"], "unknown argument --steps; did you mean train.steps=9?"),
        (["train", "--n-layer"], "unknown argument --n-layer; did you mean model.num_layers=VALUE?"),
        (["plan", "--batch_size", "8"], "did you mean batch.global_size=8 or batch.micro_size=8?"),
        (["config", "show", "--block-size", "8"], "did you mean data.seq_len=8 or model.max_positions=8?"),
        (["train", "--out_dir", "x"], "unknown argument --out_dir; did you mean --out?"),
        (["train", "--resume-from-checkpoint", "x"], "did you mean --resume?"),
        (["generate", "--model", "x", "--prompt", "y", "--max_tokens", "9"], "did you mean --max-new-tokens?"),
        (["generate", "--model", "x", "--prompt", "y", "--length", "9"], "did you mean --max-new-tokens?"),
        (["generate", "--model", "x", "--prompt", "y", "--lr", "9"], "--lr. `gptworks generate --help` lists"),
    ],
)
def test_an_option_that_is_none(command: list[str], said: str, call: Call) -> None:
    done = call(*command, expect=2)
    assert done.err.startswith("error: ") and said in done.err


def test_overrides_may_stand_anywhere(recipe: Path, call: Call) -> None:
    done = call("config", "show", "train.seed=1", "-c", recipe, "optim.lr=0.5", "--json", "optim.eps=0.25")
    import json

    shown = json.loads(done.out)
    assert (shown["train"]["seed"], shown["optim"]["lr"], shown["optim"]["eps"]) == (1, 0.5, 0.25)
    assert shown["model"]["hidden_size"] == 32


def test_a_configuration_may_be_named_without_its_option(recipe: Path, tmp_path: Path, call: Call) -> None:
    assert call("config", "check", recipe).out == f"{recipe}: no problems\n"
    assert "seed: 7" in call("config", "show", "train.seed=7", recipe).out
    bad = tmp_path / "bad.yaml"
    bad.write_text("modle:\n  num_layers: 2\n")
    assert f"{bad}: 1 problem" in call("config", "check", bad, expect=2).err
    assert "an override has the form" in call("config", "check", "-c", recipe, bad, expect=2).err
    assert "an override has the form" in call("config", "check", recipe, bad, expect=2).err


def test_prompts_that_cannot_be_continued(finished: Path, call: Call) -> None:
    done = call("generate", "--model", finished, "--prompt", "", expect=2)
    assert "prompt 1 is empty" in done.err
    done = call("generate", "--model", finished, "--prompt", "a", "--max-new-tokens", 40, expect=2)
    assert "40 more were asked for" in done.err
    assert "the model's context is 32" in done.err


def test_what_nobody_asked_for_is_cut_to_what_fits(finished: Path, call: Call) -> None:
    """The usual 64 new tokens are more than a context of 32 has room for."""
    command = [
        "generate",
        "--model",
        finished,
        "--ignore-eod",
        "--json",
        "--prompt",
        "Anna",
        "--prompt",
        "Tom and Anna",
    ]
    done = call(*command)
    texts = [json.loads(line) for line in done.out.splitlines()]
    prompts = [32 - len(text["tokens"]) for text in texts]
    assert 0 < prompts[0] < prompts[1] and {text["finish"] for text in texts} == {"length"}
    for number, text in enumerate(texts, 1):
        assert f"note: prompt {number}: at most {len(text['tokens'])} new tokens, as many as fit" in done.err
    asked = call(*command, "--max-new-tokens", "64", expect=2)
    assert f"prompt 1 has {prompts[0]} tokens and 64 more were asked for" in asked.err
    least = call(*command, "--min-new-tokens", "28", expect=2)
    assert f"prompt 2 has {prompts[1]} tokens and 28 more were asked for" in least.err
    slid = call(*command, "--window", "slide")
    assert [len(json.loads(line)["tokens"]) for line in slid.out.splitlines()] == [64, 64] and not slid.err


def test_a_prompt_that_fills_the_context(finished: Path, call: Call) -> None:
    done = call("generate", "--model", finished, "--prompt", "the river " * 40, expect=2)
    assert "asked for" not in done.err and "Shorten it to 31 or fewer" in done.err


def test_a_folder_without_a_tokenizer(finished: Path, small_store: Path, call: Call) -> None:
    portable = finished / "checkpoints" / "step-00000006" / "portable"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (portable / name).unlink()
    done = call("generate", "--model", portable, "--prompt", "a", expect=2)
    assert f"{portable}: has no tokenizer" in done.err
    call("eval", "--model", portable, "--data", small_store)


def test_data_of_another_tokenizer_in_eval(finished: Path, corpus_file: Path, tmp_path: Path, call: Call) -> None:
    call("prepare", corpus_file, "--out", tmp_path / "other", "--train-tokenizer", 400)
    done = call("eval", "--model", finished, "--data", tmp_path / "other", expect=2)
    assert "was made with another tokenizer" in done.err


# A verb of ours that breaks: what main() makes of it


def verb(error: BaseException) -> Any:
    def run(_: object) -> int:
        raise error

    return SimpleNamespace(HELP="", add_arguments=lambda parser: None, run=run)


def test_our_own_faults_show_where_they_are(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command_line.VERBS, "plot", verb(ZeroDivisionError("division by zero")))
    done = call("plot", expect=1)
    assert "Traceback (most recent call last)" in done.err
    assert "ZeroDivisionError: division by zero" in done.err
    assert "This is a fault of gptworks" in done.err


def test_errors_of_the_operating_system(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/somewhere/metrics.jsonl")
    monkeypatch.setitem(command_line.VERBS, "plot", verb(full))
    done = call("plot", expect=2)
    assert done.err == "error: /somewhere/metrics.jsonl: No space left on device. Free some space.\n"
    monkeypatch.setitem(command_line.VERBS, "plot", verb(OSError(errno.ENOSPC, "No space left on device")))
    assert call("plot", expect=2).err == "error: disk: No space left on device. Free some space.\n"
    monkeypatch.setitem(command_line.VERBS, "plot", verb(OSError(errno.EIO, "Input/output error")))
    assert "Traceback" in call("plot", expect=1).err


def test_ctrl_c_before_training_starts(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command_line.VERBS, "plot", verb(KeyboardInterrupt()))
    assert call("plot", expect=130).err == ""


def test_the_exit_code_reaches_the_shell(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gptworks", "config", "check", "model.num_layer=3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean 'num_layers'" in done.stderr
    assert "Traceback" not in done.stderr
