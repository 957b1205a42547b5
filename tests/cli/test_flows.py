"""Whole stories on a tiny model: what one command leaves behind, the next one takes up."""

import json
import math
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gptworks
from gptworks.cli.main import VERBS
from gptworks.generate.engine import generate

Call = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / f"step-{step:08d}" / "portable" / "model.safetensors")


# From text to text


def test_prepare_train_eval_generate_resume(
    corpus_file: Path, tmp_path: Path, recipe: Path, call: Call, metrics: Metrics
) -> None:
    store, run = tmp_path / "data" / "store", tmp_path / "run"
    prepared = json.loads(
        call("prepare", corpus_file, "--out", store, "--train-tokenizer", 512, "--append-eod", "--json").out
    )
    assert prepared["documents"] == 160
    assert prepared["vocab_size"] == 512
    assert prepared["tokens"] == 2 * (tmp_path / "data" / "store.bin").stat().st_size // 4

    settings = [f"data.path={store}", "evaluate.every=20", "evaluate.batches=0", "checkpoint.every=20"]
    train = ["train", "-c", recipe, "--out", run, *settings]
    done = call(*train, "train.steps=40")
    assert "step  1/40" in done.out
    assert "step 40: held-out loss" in done.out
    assert f"done: 40 steps. Everything is in {run}" in done.out
    lines = metrics(run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert lines[0]["loss"] == pytest.approx(math.log(512), abs=0.2)
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert held_out[1] < held_out[0] < lines[0]["loss"]
    assert {"step", "loss", "lr", "grad_norm", "tokens"} <= lines[0].keys()
    assert [line["tokens"] for line in lines if "tokens" in line] == [64 * step for step in range(1, 41)]

    result = json.loads(call("eval", "--model", run, "--data", store, "--baselines", "--json").out)
    ours, *baselines = result["rows"]
    assert ours["loss"] == pytest.approx(held_out[1], abs=1e-5), "held-out means the same in training and in eval"
    assert ours["perplexity"] == pytest.approx(math.exp(ours["loss"]))
    nats_per_byte = ours["loss"] * result["tokens"] / result["bytes"]
    assert ours["bits_per_byte"] == pytest.approx(nats_per_byte / math.log(2))
    assert [row["model"] for row in baselines] == ["unigram (tokens)", "bigram (tokens)", "gzip -9"]
    assert "bits per byte" in call("eval", "--model", run, "--data", store).out

    greedy = ["generate", "--model", run, "--strategy", "greedy", "--max-new-tokens", 8, "--prompt", "The river"]
    written = call(*greedy).out
    assert written.startswith("The river")
    told = json.loads(call(*greedy, "--json").out)
    assert (told["prompt"], told["text"]) == ("The river", written[len("The river") : -1])
    assert len(told["tokens"]) == len(told["logprobs"]) == 8 and told["finish"] == "length"
    model = gptworks.GPT.from_pretrained(run)
    text = generate(model, "The river", strategy="greedy", max_new_tokens=8)[0]
    assert written == f"The river{text}\n"

    done = call(*train, "train.steps=44", "--resume", "auto")
    assert "changed: train.steps: 40 -> 44" in done.out
    assert [line["step"] for line in metrics(run) if "loss" in line] == list(range(1, 45))
    assert metrics(run)[: len(lines)] == lines


def test_resuming_a_run_that_is_over_changes_nothing(recipe: Path, finished: Path, call: Call) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (finished / "checkpoints").iterdir()}
    lines = (finished / "metrics.jsonl").read_text()
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto")
    assert "nothing to do: the run has done its 6 steps (train.steps=6)." in done.out
    assert {path.name: path.stat().st_mtime_ns for path in (finished / "checkpoints").iterdir()} == before
    assert (finished / "metrics.jsonl").read_text() == lines


def test_going_on_with_the_saved_configuration(recipe: Path, tmp_path: Path, call: Call, metrics: Metrics) -> None:
    out = tmp_path / "run"
    call("train", "-c", recipe, "--out", out, "optim.decay_steps=8")
    done = call("train", "-c", out / "config.yaml", "--resume", "auto", "train.steps=8")
    assert "changed: train.steps: 6 -> 8" in done.out
    assert done.out.count("changed: ") == 1
    assert [line["step"] for line in metrics(out)] == list(range(1, 9))


def test_another_batch_size_goes_on_with_the_next_sample(
    recipe: Path, finished: Path, call: Call, metrics: Metrics
) -> None:
    more = ["train.steps=8", "batch.global_size=6", "--resume", "auto"]
    done = call("train", "-c", recipe, "--out", finished, *more)
    assert "changed: batch.global_size: 4 -> 6" in done.out
    assert [line["tokens"] for line in metrics(finished)] == [64, 128, 192, 256, 320, 384, 480, 576]


def test_prompts_from_a_file(finished: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "prompts.txt").write_text("Anna\n\nThe hill\n")
    options = ["--max-new-tokens", 5, "--top-k", 20, "--top-p", 0.9, "--temperature", 0.8, "--seed", 3, "--json"]
    first = call("generate", "--model", finished, "--prompts", tmp_path / "prompts.txt", *options).out
    assert [json.loads(line)["prompt"] for line in first.splitlines()] == ["Anna", "The hill"]
    again = call("generate", "--model", finished, "--prompts", tmp_path / "prompts.txt", *options).out
    assert again == first
    other = call("generate", "--model", finished, "--prompts", tmp_path / "prompts.txt", *options, "--seed", 4).out
    assert other != first


def test_a_run_may_say_how_to_generate_from_it(recipe: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "run"
    call("train", "-c", recipe, "--out", out, "generate.strategy=greedy", "generate.max_new_tokens=5")
    greedy = call("generate", "--model", out, "--prompt", "Anna", "--strategy", "greedy", "--max-new-tokens", 5).out
    assert call("generate", "--model", out, "--prompt", "Anna").out == greedy
    assert call("generate", "--model", out / "latest", "--prompt", "Anna").out == greedy
    longer = call("generate", "--model", out, "--prompt", "Anna", "--max-new-tokens", 9).out
    assert longer != greedy
    assert longer.startswith(greedy.removesuffix("\n"))


def test_a_checkpoint_without_a_portable_folder_is_evaluated_too(
    recipe: Path, small_store: Path, tmp_path: Path, call: Call
) -> None:
    settings = ["train", "-c", recipe, "train.steps=3"]
    call(*settings, "--out", tmp_path / "plain", "checkpoint.portable=false")
    call(*settings, "--out", tmp_path / "portable")
    plain, portable = (
        json.loads(call("eval", "--model", tmp_path / name, "--data", small_store, "--json").out)["rows"][0]["loss"]
        for name in ("plain", "portable")
    )
    assert plain == portable


# Fine-tuning


def test_fine_tuning_takes_the_weights_and_starts_anew(
    recipe: Path, finished: Path, tmp_path: Path, call: Call, metrics: Metrics
) -> None:
    out = tmp_path / "tuned"
    done = call("train", "-c", recipe, "--out", out, f"init.checkpoint={finished}", "train.steps=1", "optim.lr=0")
    assert f"weights from {finished}" in done.out
    before, after = weights(finished, 6), weights(out, 1)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert metrics(out)[0]["loss"] < metrics(finished)[0]["loss"] - 0.05
    assert metrics(out)[0]["tokens"] == 64


def test_fine_tuning_from_a_folder_of_transformers(recipe: Path, tmp_path: Path, call: Call, metrics: Metrics) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=32, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    )
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    tune = ["train", "-c", recipe, f"init.checkpoint={tmp_path / 'theirs'}"]
    call(*tune, "--out", tmp_path / "still", "train.steps=1", "optim.lr=0")
    theirs = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    ours = weights(tmp_path / "still", 1)
    assert ours.keys() == {name for name in theirs if name != "lm_head.weight"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    call(*tune, "--out", tmp_path / "tuned", "train.steps=20")
    losses = [line["loss"] for line in metrics(tmp_path / "tuned")]
    assert losses[-1] < losses[0] - 0.5
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "tuned" / "checkpoints/step-00000020/portable")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = gptworks.GPT.from_pretrained(tmp_path / "tuned")(tokens)
        assert torch.allclose(again.eval()(tokens).logits, expected, atol=1e-5 * max(1.0, float(expected.abs().max())))


def test_prompts_and_completions(
    recipe: Path, finished: Path, small_store: Path, tmp_path: Path, call: Call, metrics: Metrics
) -> None:
    examples = [{"question": f"Is {n} even?", "answer": " yes" if n % 2 == 0 else " no"} for n in range(40)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    store = tmp_path / "qa"
    keys = ["--prompt-key", "question", "--completion-key", "answer", "--append-eod"]
    call("prepare", tmp_path / "qa.jsonl", "--out", store, "--tokenizer", f"{small_store}.tokenizer.json", *keys)
    tune = ["train", "-c", recipe, f"init.checkpoint={finished}", f"data.path={store}", "data.split='1'"]
    shown = call(*tune, "--show-batch").out
    scored = [shown.splitlines()[i + 1] for i, line in enumerate(shown.splitlines()) if line == "--- scored:"]
    assert len(scored) == 2
    assert set(scored) <= {" yes<|endoftext|>", " no<|endoftext|>"}, "the prompt is not scored"

    call(*tune, "--out", tmp_path / "tuned", "train.steps=40", "optim.lr=1e-2", "checkpoint.every=0")
    losses = [line["loss"] for line in metrics(tmp_path / "tuned")]
    assert losses[-1] < losses[0] / 3
    answer = call(
        "generate",
        "--model",
        tmp_path / "tuned",
        "--strategy",
        "greedy",
        "--max-new-tokens",
        4,
        "--prompt",
        "Is 7 even?",
    ).out
    assert answer.strip() in {"Is 7 even? yes", "Is 7 even? no"}, "it answers, and ends where an answer ends"


# Looking without doing


def test_dry_run_writes_nothing(recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("train", "-c", recipe, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert "parameters       42,880" in done.out
    assert "batch            4 = 2 micro-batch x 2 accumulation x 1 data-parallel" in done.out
    assert "steps            6 (384 tokens)" in done.out
    assert "run folder       runs/tiny" in done.out
    call("train", "-c", recipe, "--dry-run", "data.path=nowhere", expect=2)


def test_show_batch(recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["data.mask_eod=true", "data.reset_positions=true", "data.reset_attention=true", "data.seq_len=32"]
    done = call("train", "-c", recipe, "--show-batch", *settings, "batch.global_size=64", "batch.micro_size=64")
    assert "--- sample 0: 32 tokens, " in done.out
    assert "--- sample 63: 32 tokens, " in done.out
    assert "<|endoftext|>" in done.out
    assert "--- scored:" in done.out
    assert "--- positions start again 1 times" in done.out
    assert "--- 2 documents; attention stays within each" in done.out
    assert list(tmp_path.iterdir()) == []


def test_show_batch_of_a_layout(recipe: Path, call: Call) -> None:
    settings = ["parallel.dp=2", "batch.global_size=8", "batch.micro_size=4"]
    assert "--- sample 3: 16 tokens, " in call("train", "-c", recipe, "--show-batch", *settings).out


# The run folder


def test_what_a_run_leaves_behind(recipe: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    command = ["train", "-c", recipe, "--out", "here", "train.steps=3", "train.profile=[2, 3]", "train.log_every=3"]
    done = run_cli(*command, cwd=tmp_path)
    run = tmp_path / "here"
    assert "\x1b" not in done.stdout, "plain lines where there is no terminal"
    names = {path.name for path in run.iterdir()}
    expected = {"config.yaml", "metrics.jsonl", "checkpoints", "latest", "environment.json", "loss.svg", "profile"}
    assert expected <= names

    environment = json.loads((run / "environment.json").read_text())
    assert environment["command"] == ["gptworks", *map(str, command)]
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert environment["packages"]["gptworks"] == gptworks.__version__
    assert environment["python"] == sys.version.split()[0]

    config = gptworks.load_config(run / "config.yaml")
    assert config == gptworks.load_config(
        recipe, overrides=["run.out=here", "train.steps=3", "train.profile=[2, 3]", "train.log_every=3"]
    )
    trace = json.loads((run / "profile" / "steps-2-3.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any("_BlockFunction" in name or "scaled_dot_product" in name for name in names)
    assert sum(name.startswith("ProfilerStep") for name in names) == 2

    root = ElementTree.fromstring((run / "loss.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_s2_12_tensorboard_has_loss_rate_and_throughput(finished: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    assert {"loss", "lr", "grad_norm", "tokens_per_sec"} <= set(events.Tags()["scalars"])
    logged = [json.loads(line)["loss"] for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(logged)


def test_plot(finished: Path, tmp_path: Path, call: Call) -> None:
    (finished / "loss.svg").unlink()
    done = call("plot", finished)
    assert done.out.startswith("loss 6.")
    assert (finished / "loss.svg").is_file()
    done = call("plot", tmp_path / "nowhere", expect=2)
    assert f"{tmp_path / 'nowhere'}" in done.err and "no such" in done.err.lower()


def test_early_stop(recipe: Path, tmp_path: Path, call: Call, checked: Callable[[Path], int]) -> None:
    """With a rate of zero nothing gets better: the first evaluation stays the best."""
    out = tmp_path / "run"
    settings = ["optim.lr=0", "evaluate.every=2", "evaluate.batches=1", "evaluate.patience=2", "train.steps=50"]
    done = call("train", "-c", recipe, "--out", out, *settings, "checkpoint.every=0")
    assert "early stop after step 6: no better held-out loss for 2 evaluations" in done.out
    assert "step 2: held-out loss" in done.out
    assert checked(out) == 6


def test_keep_best(recipe: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "run"
    settings = ["checkpoint.keep_best=true", "checkpoint.keep_last=1", "evaluate.every=1", "checkpoint.every=1"]
    train = ["train", "-c", recipe, "--out", out, *settings]
    call(*train, "optim.lr=1e-3", "optim.schedule=constant", "train.steps=3")
    assert (out / "best").read_text() == "step-00000003\n"
    done = call(*train, "optim.lr=10", "optim.schedule=constant", "train.steps=6", "--resume", "auto")
    assert "the best so far" not in done.out, "a rate of 10 makes it worse"
    assert (out / "best").read_text() == "step-00000003\n"
    assert (out / "latest").read_text() == "step-00000006\n"
    # The one with the lowest training loss stays too, while newer ones are much worse.
    left = {path.name for path in (out / "checkpoints").iterdir()}
    assert left == {"step-00000003", "step-00000004", "step-00000006"}


def test_keep_every(recipe: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "run"
    call("train", "-c", recipe, "--out", out, "checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_every=4")
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-00000004", "step-00000006"}


@pytest.mark.parametrize(
    ("end", "steps"),
    [("train.steps=5", 5), ("train.tokens=300", 5), ("train.epochs=0.01", None)],
)
def test_the_end_of_training(end: str, steps: int | None, recipe: Path, tmp_path: Path, call: Call) -> None:
    lines = recipe.read_text().replace("  steps: 6\n", "")
    (tmp_path / "open.yaml").write_text(lines)
    done = call("train", "-c", tmp_path / "open.yaml", "--out", tmp_path / "run", end)
    samples = int(done.out.split("data:")[1].split()[0].replace(",", ""))
    expected = steps or int(0.01 * samples / 4)
    assert f"done: {expected} steps" in done.out


# Configurations


def test_config_show(recipe: Path, call: Call) -> None:
    shown = json.loads(call("config", "show", "-c", recipe, "--json", "optim.lr=1e-4").out)
    assert shown["optim"]["lr"] == 1e-4
    assert shown["model"]["ffn_size"] == 128
    import yaml

    assert yaml.safe_load(call("config", "show", "-c", recipe, "optim.lr=0.125").out)["optim"]["lr"] == 0.125


def test_config_origin(recipe: Path, call: Call) -> None:
    shown = call("config", "show", "-c", recipe, "--origin", "-o", "optim.lr=1e-4", "train.seed=7").out
    origin = {line.partition(":")[0]: line.partition("  # ")[2] for line in shown.splitlines()}
    number = recipe.read_text().splitlines().index("  hidden_size: 32") + 1
    assert origin["model.hidden_size"] == f"{recipe}:{number}"
    assert origin["optim.lr"] == "override optim.lr=1e-4"
    assert origin["train.seed"] == "override train.seed=7"
    assert origin["optim.beta1"] == "default"
    shown = call("config", "show", "--preset", "gpt2", "--origin").out
    assert "model.num_layers: 12" in shown
    assert "# preset gpt2" in shown


def test_config_check(recipe: Path, call: Call) -> None:
    assert call("config", "check", "-c", recipe).out == f"{recipe}: no problems\n"
    done = call("config", "check", "-c", recipe, "model.num_layer=3", "optim.min_lr=1", expect=2)
    assert "2 problems" in done.err
    assert "model.num_layer: unknown key; did you mean 'num_layers'?" in done.err
    assert "optim.min_lr: 1 is above optim.lr (0.003)" in done.err


def test_config_diff(recipe: Path, tmp_path: Path, call: Call) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("lr: 3e-3", "lr: 1e-3").replace("steps: 6", "steps: 9"))
    assert call("config", "diff", recipe, other).out == "optim.lr: 0.003 -> 0.001\ntrain.steps: 6 -> 9\n"
    assert call("config", "diff", recipe, recipe).out == ""


def test_config_schema(call: Call) -> None:
    schema = json.loads(call("config", "schema").out)
    model = schema["$defs"]["ModelConfig"]
    empty = {"type": "null"}  # means the default
    assert model["properties"]["num_layers"]["anyOf"][0]["type"] == "integer"
    assert model["properties"]["gelu"]["anyOf"][0]["enum"] == ["tanh", "erf", "sigmoid"]
    assert all(key["anyOf"][-1] == empty for key in model["properties"].values())
    assert model["additionalProperties"] is False
    assert {"base", "preset"} <= schema["properties"].keys()
    path = schema["$defs"]["DataConfig"]["properties"]["path"]["anyOf"][0]["anyOf"]
    assert [kind["type"] for kind in path] == ["array", "string"]
    text = json.dumps(schema)
    for section in schema["$defs"].values():
        for name, key in section["properties"].items():
            assert "$ref" in json.dumps(key) or '"description"' in json.dumps(key), f"an editor shows it for {name}"
    assert "Transformer blocks." in text


def test_config_presets(call: Call) -> None:
    lines = {line.split()[0]: line for line in call("config", "presets").out.splitlines()}
    assert "124,439,808 parameters" in lines["gpt2"]
    assert "1,557,611,200 parameters" in lines["gpt2-xl"]
    assert "also 124M" in lines["gpt2"]


# Shells


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["gptworks", "tr"], {"train", "translate"}),
        (["gptworks", "train"], {"train"}),
        (["gptworks", ""], set(VERBS)),
        (["gptworks", "train", "--dry"], {"--dry-run"}),
        (["gptworks", "train", "--wor"], {"--world"}),
        (["gptworks", "verify", "--la"], {"--layout"}),
        (["gptworks", "config", "sch"], {"schema"}),
        (["gptworks", "eval", "--base"], {"--baselines"}),
        (["gptworks", "config", "show", "--or"], {"--origin"}),
    ],
)
def test_completion_in_a_real_bash(typed: list[str], offered: set[str], tmp_path: Path, call: Call) -> None:
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    (tmp_path / "completion.bash").write_text(call("completion", "bash").out)
    script = """
    source "$1"; shift
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
    complete -p gptworks | grep -q -- "-F _gptworks" || exit 3
    _gptworks
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    command = ["bash", "--norc", "-c", script, "bash", str(tmp_path / "completion.bash"), *typed]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - {"-h", "--help", "--version"} == offered
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_for_other_shells(shell: str, tmp_path: Path, call: Call) -> None:
    script = call("completion", shell).out
    for word in ("train", "generate", "baselines", "dry-run"):
        assert word in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        check = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
        assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("command", [["config", "schema"], ["config", "presets"]], ids=["long", "short"])
def test_a_reader_that_goes_away_is_no_fault(command: list[str]) -> None:
    """gptworks config schema | head -0: the pipe is closed before the first word is written."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gptworks", *command],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 0
