"""A configuration, so many devices of a kind, and which layout is meant: the given one, or the best of a search."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from gptworks.config import checks
from gptworks.config.derive import plan_batch, solve_layout, with_layout
from gptworks.config.load import Loaded, OriginKind, flatten
from gptworks.config.schema import AXES, RunConfig
from gptworks.errors import ConfigError
from gptworks.plan import search
from gptworks.plan.devices import Device, Link
from gptworks.plan.memory import peak_memory
from gptworks.plan.report import Report
from gptworks.plan.search import Fit, Hardware, SearchResult
from gptworks.plan.time import step_time
from gptworks.plan.workload import LayoutChoice, Workload

# Parts of a choice that a search leaves alone when they are overridden.
_FIXED = ("parallel.", "batch.micro_size", "batch.accumulation", "train.recompute")
_ALWAYS_FIXED = ("parallel.sequence", "parallel.timeout")
_WORTH_SAYING = 1.05  # times as fast


@dataclass(frozen=True)
class Request:
    loaded: Loaded
    devices: int
    hardware: Hardware
    here: tuple[Device, Link]  # of these devices

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @cached_property
    def workload(self) -> Workload:
        return Workload.from_config(self.config, "cpu" if self.here[0].generation == "cpu" else "cuda")

    @property
    def has_layout(self) -> bool:
        """Whether somebody has said a degree of it."""
        return any(f"parallel.{axis}" in self.loaded.origins for axis in AXES)

    def tokens(self, global_size: int) -> float | None:
        """That the configuration says it will be trained on."""
        train = self.config.train
        return float(train.tokens or train.steps * global_size * self.config.data.seq_len) or None

    # The layout that is given

    def configured_layout(self, source: str) -> tuple[LayoutChoice, list[str]]:
        """As a run would have it, also where the batch is left open; or what a run would refuse. And notes on it."""
        config = self.config
        layout = solve_layout(config.parallel, self.devices, partial(checks.suits, config))
        parallel = with_layout(config.parallel, layout)
        problems = checks.find({**dict(config), "parallel": parallel})
        if problems:
            raise ConfigError(source, problems)
        batch = plan_batch(config.batch, config.model, config.data.seq_len, parallel)
        choice = LayoutChoice(parallel, batch, config.train.recompute)
        return choice, self._about_batch(choice)

    def _about_batch(self, choice: LayoutChoice) -> list[str]:
        """What nobody chose, and a micro-batch that would be faster, or would fit."""
        batch, asked = choice.batch, self.config.batch
        if asked.micro_size or asked.accumulation:
            return []
        notes = [] if asked.global_size else [self._usual_batch(batch.global_size)]
        if asked.global_size and choice.layout.pp == 1:
            return notes  # one micro-batch, which has been said with the batch
        note = f"batch.micro_size is not set: {batch.micro_size} is taken, as `gptworks train` does."
        micro = search.best_micro_size(self.workload, choice, *self.here)
        accumulation = batch.micro_size * batch.accumulation // micro
        best = replace(choice, batch=replace(batch, micro_size=micro, accumulation=accumulation))
        ratio = step_time(self.workload, choice, *self.here).total / step_time(self.workload, best, *self.here).total
        if peak_memory(self.workload, choice) > self.here[0].capacity >= peak_memory(self.workload, best):
            note += f" batch.micro_size={micro} fits."
        elif ratio > _WORTH_SAYING:
            note += f" batch.micro_size={micro} is {ratio:.2f} times as fast."
        return [*notes, note]

    def _usual_batch(self, global_size: int) -> str:
        return (
            f"batch.global_size is not set: {global_size:,} samples of {self.workload.seq_len:,} tokens are taken, "
            "which suit a model of this size."
        )

    # Search

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """What was said on the command line stays."""
        values = flatten(self.config.model_dump(mode="json"))
        return {
            key: values[key]
            for key, origin in self.loaded.origins.items()
            if key.startswith(_FIXED) and (origin.kind is OriginKind.OVERRIDE or key in _ALWAYS_FIXED)
        }

    @property
    def global_size(self) -> int:
        """Samples of a step: those of the configuration, or the usual ones."""
        return self.config.batch.global_size or search.usual_batch(self.workload, self.devices)

    def search(self) -> tuple[SearchResult, list[str]]:
        """All layouts of the devices, and notes on them."""
        notes = [] if self.config.batch.global_size else [self._usual_batch(self.global_size)]
        result = search.search(self.workload, *self.here, self.devices, self.global_size, fixed=self.fixed)
        return result, notes

    def fewest_devices(self) -> int | None:
        """The smallest number of them that is enough, where these are too few."""
        batch = self.config.batch.global_size or None
        return search.fewest_devices(self.workload, self.hardware, self.devices, batch, fixed=self.fixed)

    def best_of_all(self, made: Report) -> Fit | None:
        """The fastest that fits of the same batch and devices, whatever the layout."""
        fits = search.search(self.workload, *self.here, self.devices, made.choice.batch.global_size).fits
        return fits[0] if fits else None
