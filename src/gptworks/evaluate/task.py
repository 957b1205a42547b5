"""What a task of evaluation is: everything that the command line, Python, reports and documents need to know of one.

The command line reads all tasks to write its help, so files of tasks import torch and numpy inside functions only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.errors import DataError, UsageError

if TYPE_CHECKING:
    from gptworks.evaluate.measurement import Measurement
    from gptworks.evaluate.request import Request
    from gptworks.tokenizer import Tokenizer


@dataclass(frozen=True)
class Option:
    """A setting of one task: `--seq-len N` on the command line, `seq_len=N` in Python. A default of False is a flag."""

    name: str
    help: str
    default: Any = None
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    is_refused_elsewhere: bool = True  # False: other tasks accept it, and it has no effect there

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Metric:
    heading: str
    form: str = "{:.4f}"
    higher_is_better: bool = False


@dataclass(frozen=True)
class Published:
    """A figure that others published, to be read beside a result. None of them was reproduced here."""

    model: str
    metric: str
    value: float
    source: str
    rule: str  # how it was measured, as far as that is known


PUBLISHED_STATUS = "published, not reproduced here"
# Sources of more than one task.
FLEETX_README = "FleetX/PaddleFleetX, README of the 345M model"
FLEETX_LOG = "FleetX/PaddleFleetX, single-card document, log"


def of_gpt2_paper(metric: str, values: Sequence[float], rule: str) -> list[Published]:
    """The figures of its four models."""
    source, sizes = "Radford et al. 2019 (GPT-2), table 3", ("117M", "345M", "762M", "1542M")
    return [Published(f"GPT-2 {size}", metric, value, source, rule) for size, value in zip(sizes, values, strict=True)]


@dataclass(frozen=True)
class PaddleLog:
    """How PaddleNLP and FleetX log a task: the metric of their progress lines, and the end of their last line."""

    metric: str
    summary: Callable[[Mapping[str, Any]], str]


def _require_file(task: "Task", data: str) -> None:
    if not Path(data).is_file():
        problem = "a folder" if Path(data).is_dir() else "no such file"
        raise DataError(f"{data}: {problem}. The task {task.name} reads one file of text.")


@dataclass(frozen=True)
class Task:
    name: str
    title: str  # in the help of `gptworks eval`
    data: str  # what --data names
    metrics: Mapping[str, Metric]  # columns of the table, in their order
    counts: tuple[str, ...]  # numbers of a row that its headline has
    measure: "Callable[[Measurement], dict[str, Any]]"
    protocols: tuple[str, ...] = ()  # the first is the default; none: there is one way only
    options: tuple[Option, ...] = ()
    published: tuple[Published, ...] = ()
    paddle: PaddleLog | None = None
    check_data: Callable[["Task", str], None] = _require_file
    # What `measure` asks of a context of so many tokens. Training calls it before the first step, so that data which do
    # not fit are known then. None: not measured during training.
    read: "Callable[[Request, Tokenizer, int], object] | None" = None
    # Without --data: what the model was trained on, as (data, settings) from (path of the model, settings).
    own_data: Callable[[str, Mapping[str, Any]], tuple[str, Mapping[str, Any]]] | None = field(default=None)

    def protocol(self, name: str) -> str:
        """The protocol that is asked for, or the first."""
        if not self.protocols:
            if name:
                raise UsageError(f"--protocol: got '{name}', but {self.name} has one way only. Leave it out.")
            return ""
        if name and name not in self.protocols:
            listed = ", ".join(self.protocols)
            raise UsageError(f"--protocol: {self.name} has none called '{name}'. Protocols: {listed}.")
        return name or self.protocols[0]
