"""Tasks of evaluation: a file in `evaluate/tasks` is all it takes."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gptworks
from gptworks.cli.main import main
from gptworks.errors import UsageError
from gptworks.evaluate import registry, tasks
from gptworks.evaluate.task import Task

ROOT = Path(__file__).resolve().parents[2]

INVENTED = '''
"""How often a model knows the next letter of its own name: invented for a test."""

from pathlib import Path
from typing import Any

from gptworks.evaluate.rows import Row
from gptworks.evaluate.task import Metric, Option, PaddleLog, Published, Task


def _measure(measurement: Any) -> dict[str, Any]:
    import numpy as np

    head = measurement.file_head(f"{measurement.request.protocol}, times {measurement.request.settings['times']}")
    ids = measurement.tokenizer.encode(Path(measurement.request.data).read_text())
    rows = [Row(np.array(ids), 1)] * measurement.request.settings["times"]
    scores = measurement.score(head, [[row] for row in rows])
    return measurement.result(head, [{"wonder": -sum(score.log_probability for score in scores)}])


TASK = Task(
    name="marvel",
    title="marvels",
    data="a name",
    metrics={"wonder": Metric("wonder in nats", "{:.2f}")},
    counts=(),
    measure=_measure,
    protocols=("aloud", "in silence"),
    options=(Option("times", "how often it is asked", 2, int, metavar="N"),),
    published=(Published("somebody's GPT", "wonder", 12.5, "a paper", "aloud"),),
    paddle=PaddleLog("loss", lambda row: f"wonder: {row['wonder']:.4E}"),
)
'''


@pytest.fixture
def model(small_tokenizer: gptworks.Tokenizer, tmp_path: Path) -> str:
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512, "max_positions": 32}
    gptworks.GPT.from_config(shape, tokenizer=small_tokenizer).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def invented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task in a folder of its own, found as those of `evaluate/tasks` are; all who ask the registry know it."""
    folder = tmp_path / "more_tasks"
    folder.mkdir()
    (folder / "marvel.py").write_text(INVENTED)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, "gptworks.evaluate.tasks.marvel", raising=False)
    for name, task in registry._load_tasks().items():
        monkeypatch.setitem(registry.TASKS, name, task)
    return folder


def test_an_invented_task_is_measured_by_the_command_line(
    invented: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "name.txt"
    data.write_text("On Friday morning Anna found a map")
    arguments = ["eval", "--model", model, "--task", "marvel", "--data", str(data), "--device", "cpu"]
    assert main([*arguments, "--times", "3", "--published"]) == 0
    said = capsys.readouterr().out
    assert "task marvel, protocol: aloud, times 3" in said
    assert "wonder in nats" in said
    assert "somebody's GPT" in said
    assert main([*arguments, "--log-style", "fleetx"]) == 0
    assert f"validation results on {data} | wonder: " in capsys.readouterr().out
    assert main([*arguments, "--protocol", "loud"]) == 2
    assert "marvel has none called 'loud'. Protocols: aloud, in silence." in capsys.readouterr().err


def test_an_invented_task_is_in_the_help(invented: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "{heldout,lambada,wikitext,marvel}" in said
    assert "marvel: a name" in said
    assert "marvel: aloud, in silence" in said
    assert "--times N marvel: how often it is asked" in said


def test_an_invented_task_is_measured_in_python(invented: Path, model: str, tmp_path: Path) -> None:
    data = tmp_path / "name.txt"
    data.write_text("On Friday morning Anna found a map")
    once, twice = (
        gptworks.evaluate(model, data, task="marvel", times=times, device="cpu")["rows"][0]["wonder"]
        for times in (1, 2)
    )
    assert twice == pytest.approx(2 * once)
    with pytest.raises(UsageError, match=r"task marvel has no setting 'seq_len'\. Settings: protocol, times, "):
        gptworks.evaluate(model, data, task="marvel", seq_len=3)


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("wikitext", {"seq_len": 8}, "--seq-len: is for --task heldout, got --task wikitext"),
        ("lambada", {"baselines": True}, "--baselines: is for --task heldout, got --task lambada"),
    ],
)
def test_an_option_of_another_task_is_refused(task: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.settings_of(registry.TASKS[task], settings)
    others = {option.name: option.default for each in registry.TASKS.values() for option in each.options}
    assert registry.settings_of(registry.TASKS["lambada"], others | {"overlap": 8}) == {"shorten": False}, (
        "defaults say nothing"
    )


@pytest.mark.parametrize("page", ["docs/howto/evaluate.md", "docs/howto/evaluate.zh.md"])
@pytest.mark.parametrize("task", list(registry.TASKS.values()), ids=list(registry.TASKS))
def test_every_task_is_on_the_page(task: Task, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    wanted = [f"`{task.name}`", *(f"`{name}`" for name in task.protocols), *(option.flag for option in task.options)]
    assert [each for each in wanted if each not in text] == []


def test_options_have_one_task_each() -> None:
    parser = argparse.ArgumentParser()
    for task in registry.TASKS.values():
        for option in task.options:
            parser.add_argument(option.flag)  # refuses a second one


def test_tasks_are_read_without_torch_or_numpy() -> None:
    code = (
        "import sys; from gptworks.evaluate import registry; assert len(registry.TASKS) >= 3; "
        "print(*({'torch', 'numpy', 'pydantic', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
