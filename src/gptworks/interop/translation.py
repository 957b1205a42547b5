"""A foreign command in our words: what to run, with which settings, and what became of each of theirs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptworks.config.load import nest
from gptworks.interop.notes import Note


@dataclass(frozen=True)
class AfterTraining:
    """Checkpoints under the names the foreign system would have given them, made from ours."""

    system: str  # of checkpoint/systems
    path: str  # such as output/model_{step}, with {epoch} and {step_in_epoch} from 1; plain: one file, of the last step
    tp: int = 1
    pp: int = 1
    spread: str = ""  # such as iter_{step}: what is written goes into the folder `path`, beside what is there
    steps_per_epoch: int = 0  # 0: as many as the data has


@dataclass(frozen=True)
class Translation:
    system: str
    verb: str  # of ours
    program: str = ""  # theirs
    config: dict[str, Any] = field(default_factory=dict)  # dotted keys, for verbs that take a configuration
    arguments: list[str] = field(default_factory=list)  # the rest of our command line
    # For verbs without a configuration: what a checkpoint does not carry and lengths, by our keys. They shrink, too;
    # the parallel section, which decides how, is not given out.
    stated: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # about the whole, loud
    after: list[AfterTraining] = field(default_factory=list)
    logs: str = ""  # what they call the log of a rank, such as log/workerlog.{rank}
    environment: Mapping[str, str] = field(default_factory=dict)
    device: str = ""  # what their command asked for: gpu, xpu, npu, cpu
    inside: list[str] = field(default_factory=list)  # a command of theirs that our command runs elsewhere
    their_names: Mapping[str, str] = field(default_factory=dict)  # a key or option of ours -> what sets it there

    def sections(self) -> dict[str, Any]:
        """The configuration as our YAML nests it."""
        return nest({key: list(value) if isinstance(value, tuple) else value for key, value in self.config.items()})


@dataclass(frozen=True)
class Command:
    """A command line, taken apart: NAME=value in front, launcher and its options, the program, its arguments."""

    words: list[str]  # all of it, expanded
    environment: dict[str, str]
    program: str  # run_pretrain.py, oneflow_gpt.training, pretrain_345M.sh ...
    arguments: list[str]
    launcher: str = ""
    launcher_options: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()
