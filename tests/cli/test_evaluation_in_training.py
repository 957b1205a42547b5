"""Tasks and texts at the evaluations of a run, what is best by them, and what a log line knows of time and memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gptworks
from gptworks.data.store import Store
from gptworks.train import loop

Call = Callable[..., Any]
EVALUATED = ["evaluate.every=2", "evaluate.batches=1"]


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def passages(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Path:
    """Sentences short enough for the context of 32 tokens of the recipe's model."""
    texts = [" ".join(line.split()[:8]) for line in corpus_file.read_text().splitlines() if len(line.split()) > 8][:12]
    file = tmp_path_factory.mktemp("tasks") / "lambada.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def test_tasks_are_measured_as_eval_measures_them(
    recipe, tmp_path: Path, call: Call, passages: Path, corpus_file
) -> None:
    wiki = tmp_path / "wiki.txt"
    wiki.write_text(corpus_file.read_text()[:1500])
    run = tmp_path / "run"
    tasks = ["evaluate.tasks=[lambada, wikitext]", f"evaluate.task_data=[{passages}, {wiki}]"]
    done = call("train", "-c", recipe, "--out", run, *EVALUATED, *tasks)
    found = {line["step"]: line for line in lines(run) if "held_out_loss" in line}
    assert sorted(found) == [2, 4, 6]
    assert f"lambada_accuracy {found[6]['lambada_accuracy']:.4f}" in done.out
    for step in (4, 6):
        checkpoint = run / "checkpoints" / f"step-{step:08d}"
        for task, data, names in (
            ("lambada", passages, ("accuracy", "target_perplexity", "correct", "total")),
            ("wikitext", wiki, ("loss", "perplexity", "adjusted_perplexity")),
        ):
            told = call("eval", "--model", checkpoint, "--task", task, "--data", data, "--json", "--device", "cpu").out
            row = json.loads(told)["rows"][0]
            assert {name: found[step][f"{task}_{name}"] for name in names} == pytest.approx(
                {name: row[name] for name in names}, rel=1e-6
            )
    assert not (run / ".evaluating").exists()


def test_best_by_a_number_of_a_task(recipe: Path, tmp_path: Path, call: Call, passages: Path, monkeypatch) -> None:
    """Of accuracies the highest is best, and the first of equal ones; patience counts by it, too."""
    from gptworks.train import evaluation

    accuracies = iter([0.1, 0.3, 0.3, 0.2, 0.1])
    monkeypatch.setattr(evaluation, "_measure_tasks", lambda *_: {"lambada_accuracy": next(accuracies)})
    run = tmp_path / "run"
    more = ["checkpoint.keep_best=true", "checkpoint.best_by=lambada_accuracy", "evaluate.patience=2", "train.steps=12"]
    tasks = ["evaluate.tasks=lambada", f"evaluate.task_data={passages}", "checkpoint.keep_last=1", "checkpoint.every=2"]
    done = call("train", "-c", recipe, "--out", run, *EVALUATED, *tasks, *more)
    assert (run / "best").read_text().strip() == "step-00000004"
    assert (run / "checkpoints" / "step-00000004").is_dir()
    assert "early stop after step 8: no better lambada_accuracy for 2 evaluations" in done.out


def test_texts_are_kept_and_are_those_of_the_checkpoint(recipe: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    prompts = ["train.sample_prompts=[The, 'In the morning']", "train.sample_tokens=12"]
    call("train", "-c", recipe, "--out", run, *EVALUATED, *prompts, "train.steps=4", "optim.decay_steps=6")
    call("train", "-c", recipe, "--out", run, *EVALUATED, *prompts, "optim.decay_steps=6", "--resume", "auto")
    texts = lines(run, "texts.jsonl")
    assert [(each["step"], each["prompt"]) for each in texts] == [
        (step, prompt) for step in (2, 4, 6) for prompt in ("The", "In the morning")
    ]
    told = call(
        "generate", "--model", run / "checkpoints" / "step-00000006", "--prompt", "The", "--json", "--device", "cpu",
        "--max-new-tokens", "12", "--strategy", "greedy",
    ).out  # fmt: skip
    assert json.loads(told.splitlines()[0])["text"] == texts[-2]["text"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["evaluate.tasks=nonsense", "evaluate.task_data=x"], "evaluate.tasks: no task 'nonsense'"),
        (["evaluate.tasks=heldout", "evaluate.task_data=x"], "evaluate.tasks: no task 'heldout'"),
        (["evaluate.tasks=lambada"], "evaluate.task_data: 0 files for 1 tasks"),
        (["evaluate.tasks=lambada", "evaluate.task_data=nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (
            ["checkpoint.best_by=accuracy"],
            "checkpoint.best_by: 'accuracy' is not measured. This run measures: held_out",
        ),
        (["train.sample_prompts=The", "evaluate.every=0"], "train.sample_prompts: given needs evaluations"),
    ],
)
def test_what_cannot_be_measured_is_refused(recipe, tmp_path: Path, call: Call, settings, said: str) -> None:
    done = call("train", "-c", recipe, "--out", tmp_path / "run", *EVALUATED, *settings, expect=2)
    assert said in done.err
    assert not (tmp_path / "run").exists()


def test_data_that_cannot_be_measured_are_refused_before_the_first_step(
    recipe: Path, tmp_path: Path, call: Call, passages: Path, corpus_file: Path
) -> None:
    long, broken, empty = tmp_path / "long.jsonl", tmp_path / "broken.jsonl", tmp_path / "empty.txt"
    long.write_text(passages.read_text() + json.dumps({"text": corpus_file.read_text()[:800]}) + "\n")
    broken.write_text(passages.read_text() + "{\n")
    empty.write_text("\n")
    for task, data, said in (
        ("lambada", long, "passage 13 has"),
        ("lambada", broken, "line 13: not JSON"),
        ("wikitext", empty, "empty.txt: empty"),
    ):
        given = [f"evaluate.tasks={task}", f"evaluate.task_data={data}"]
        done = call("train", "-c", recipe, "--out", tmp_path / "run", *EVALUATED, *given, expect=2)
        assert f"evaluate.task_data: the task {task} cannot be measured: {tmp_path}" in done.err and said in done.err
        assert not (tmp_path / "run").exists()
    given = ["evaluate.tasks=lambada", f"evaluate.task_data={long}", "evaluate.task_protocols=nonsense"]
    done = call("train", "-c", recipe, "--out", tmp_path / "run", *EVALUATED, *given, expect=2)
    assert "evaluate.task_protocols: lambada has none called 'nonsense'. Protocols: strict, last-token" in done.err
    given[-1] = "evaluate.task_protocols=openai"  # which lets long passages lose their beginning
    call("train", "-c", recipe, "--out", tmp_path / "run", *EVALUATED, *given)
    assert all(each["protocol"].startswith("openai: ") for each in lines(tmp_path / "run", "evaluations.jsonl"))


def test_data_that_go_while_training_cost_no_steps(recipe: Path, tmp_path: Path, call: Call, passages: Path) -> None:
    data, run = tmp_path / "passages.jsonl", tmp_path / "run"
    data.write_text(passages.read_text())
    given = ["evaluate.tasks=lambada", f"evaluate.task_data={data}", "checkpoint.every=0"]

    def remove(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            data.unlink()

    config = gptworks.load_config(recipe, overrides=[*EVALUATED, *given, f"run.out={run}"])
    with pytest.raises(gptworks.GPTWorksError, match=r"step 4: the evaluation failed, .*passages\.jsonl") as failed:
        loop.train(config, observers=[remove])
    assert "--resume auto" in str(failed.value)
    assert (run / "latest").read_text().strip() == "step-00000004"
    data.write_text(passages.read_text())
    call("train", "-c", recipe, "--out", run, *EVALUATED, *given, "--resume", "auto")
    assert [line["step"] for line in lines(run) if "loss" in line][-2:] == [5, 6]


def test_a_line_tells_time_and_memory(recipe: Path, tmp_path: Path, call: Call) -> None:
    call("train", "-c", recipe, "--out", tmp_path / "run")
    found = lines(tmp_path / "run")
    for line in found:
        assert line["memory"] > 1e6
        assert line["forward_backward_seconds"] > 0 and line["optimizer_seconds"] > 0 and line["data_seconds"] >= 0
        assert ("saving_seconds" in line) == (line["step"] in (3, 5)), "saved after the lines of steps 2 and 4"


def test_what_was_predicted_and_read_is_written_down(
    recipe: Path, tmp_path: Path, call: Call, small_store: Path, monkeypatch
) -> None:
    """The time of a step follows from how fast the device multiplies; nothing is said where nobody knows that."""
    from gptworks.train import run as runs
    from gptworks.train.speed import Peak

    predicted = []
    for flops in (1e11, 2e11, None):
        monkeypatch.setattr(runs, "find_peak", lambda *_, flops=flops: Peak(flops, "given"))
        call("train", "-c", recipe, "--out", tmp_path / f"run-{flops}")
        environment = json.loads((tmp_path / f"run-{flops}" / "environment.json").read_text())
        predicted.append(environment["plan"])
        (store,) = environment["data"]
        assert store == {"path": f"{small_store}.bin", "tokens": len(Store(small_store).tokens), "documents": 160}
    slow, fast, unknown = predicted
    assert 0 < fast["step_seconds"] < slow["step_seconds"] < 1
    assert unknown == {"tensor_bytes_of_a_rank": slow["tensor_bytes_of_a_rank"]}


def test_checkpoints_by_the_clock(recipe: Path, tmp_path: Path, call: Call, monkeypatch) -> None:
    """A clock that goes on by a minute at each look: a checkpoint after every third step or so."""
    from gptworks.train import run as runs

    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            cls.now += 60
            return cls.now

    monkeypatch.setattr(runs, "time", Clock)
    call("train", "-c", recipe, "--out", tmp_path / "run", "checkpoint.every=0", "checkpoint.every_minutes=3")
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert steps == ["step-00000003", "step-00000006"]
