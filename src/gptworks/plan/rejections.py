"""Why a layout is out: a kind, a sentence, and sentences of one kind together."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gptworks.config import checks
from gptworks.config.derive import BatchPlan
from gptworks.config.schema import BatchConfig, DataConfig, ParallelConfig
from gptworks.plan.workload import Workload


class Reason(Enum):
    REFUSED = "a run would refuse it"
    BEYOND_MACHINE = "tensor parallelism would reach beyond a machine"
    BATCH = "the batch cannot be divided so"
    STATES = "weights, gradients and moments alone are too large"
    MEMORY = "it is too large"
    LARGER_BATCH = "a smaller micro-batch is too large already"
    NEEDLESS = "it fits with less recomputation"


@dataclass(frozen=True)
class Rejected:
    layout: str
    reason: Reason
    text: str
    about: tuple[str, ...] = ()  # what tells two of one reason apart, beside numbers: the rules that refuse it, a mode
    needed: int | None = None  # bytes; None: it is not for its memory

    @property
    def at_least(self) -> bool:
        """Whether activations come on top of what is needed."""
        return self.reason is Reason.STATES

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.layout, "reason": self.text, "needed": self.needed, "at_least": self.at_least}


@dataclass(frozen=True)
class Group:
    """The layouts that are out for one reason."""

    members: list[Rejected]

    @property
    def text(self) -> str:
        """What their sentences have in common; words that differ are left out."""
        words: list[str] = []
        for column in zip(*(each.text.split() for each in self.members), strict=True):
            word = column[0] if len(set(column)) == 1 else ".."
            if (word, *words[-1:]) != ("..", ".."):
                words.append(word)
        return " ".join(words)

    @property
    def is_one_sentence(self) -> bool:
        return len({each.text for each in self.members}) == 1


def grouped(rejected: list[Rejected]) -> list[Group]:
    """By reason, the most frequent first. A rule that has several sentences has them in several groups: they are of
    several lengths."""
    groups: dict[tuple[object, ...], list[Rejected]] = {}
    for each in rejected:
        groups.setdefault((each.reason, each.about, len(each.text.split())), []).append(each)
    return [Group(members) for members in sorted(groups.values(), key=len, reverse=True)]


@dataclass(frozen=True)
class Refusal:
    """What a run would say against a layout."""

    rule: str  # the name of the check
    text: str


def refusals(workload: Workload, parallel: ParallelConfig, batch: BatchPlan) -> list[Refusal]:
    model, data = workload.model, DataConfig(seq_len=workload.seq_len)
    asked = BatchConfig(global_size=batch.global_size, micro_size=batch.micro_size)
    asked_of: list[tuple[Callable[..., list[str]], tuple[Any, ...]]] = [
        (checks.matrices_divide, (model, parallel)),
        (checks.sequence_divides, (data, parallel)),
        (checks.stages_have_layers, (model, parallel)),
        (checks.batch_equation, (asked, model, data, parallel)),
        (checks.stages_are_busy, (asked, model, data, parallel)),
        (checks.pipeline_settings_have_a_pipeline, (parallel,)),
        (checks.sharding_has_shards, (parallel,)),
    ]
    return [Refusal(check.__name__, text) for check, sections in asked_of for text in check(*sections)]
