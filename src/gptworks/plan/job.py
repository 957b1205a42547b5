"""What is to be trained, one way to lay it out, and the memory it must fit into."""

from dataclasses import dataclass
from typing import Any

from gptworks.config.contradictions import fit_layout
from gptworks.config.derive import BatchPlan, Layout, plan_batch, solve_layout
from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from gptworks.plan.memory import RankMemory, largest, memory

GIB = 2**30


@dataclass(frozen=True)
class Job:
    """What stays as it is, however the work is laid out."""

    model: ModelConfig
    seq_len: int
    precision: PrecisionConfig
    compiled: bool = False
    kernels: str = "cuda"  # whose memory and time: of cuda or of cpu

    @classmethod
    def of(cls, cfg: RunConfig, kernels: str) -> "Job":
        return cls(cfg.model, cfg.data.seq_len, cfg.precision, cfg.train.compile, kernels)


@dataclass(frozen=True)
class Choice:
    """One way to lay it out. All numbers are known."""

    parallel: ParallelConfig
    batch: BatchPlan
    recompute: str

    @classmethod
    def of(cls, cfg: RunConfig, world_size: int) -> "Choice":
        """That of the configuration, or what a run of so many processes would refuse."""
        layout = solve_layout(cfg.parallel, world_size)
        parallel = fit_layout(cfg, layout)
        return cls(parallel, plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, parallel), cfg.train.recompute)

    @property
    def layout(self) -> Layout:
        return Layout.known(self.parallel)

    def memory(self, job: Job) -> list[RankMemory]:
        """Of each pipeline rank."""
        return memory(job.model, self.parallel, self.batch, job.seq_len, **self._how(job))

    def peak(self, job: Job) -> int:
        """Of the fullest of them."""
        return largest(job.model, self.parallel, self.batch, job.seq_len, **self._how(job))

    def _how(self, job: Job) -> dict[str, Any]:
        return {"precision": job.precision, "recompute": self.recompute, "kernels": job.kernels}

    def settings(self) -> dict[str, Any]:
        """All that it decides, in the words of a configuration."""
        parallel = self.parallel
        said: dict[str, Any] = {f"parallel.{axis}": size for axis, size in vars(self.layout).items()}
        said["parallel.zero"] = parallel.zero
        if parallel.offload:
            said["parallel.offload"] = True
        if self.layout.pp > 1:
            said["parallel.schedule"] = parallel.schedule
            said["parallel.virtual_stages"] = parallel.virtual_stages
        said["batch.global_size"] = self.batch.global_size
        said["batch.micro_size"] = self.batch.micro_size
        said["batch.accumulation"] = self.batch.accumulation
        said["train.recompute"] = self.recompute
        return said

    def __str__(self) -> str:
        """Such as pp2.fsdp4.tp2, zero 1, interleaved x 2, micro-batch 4, recompute full."""
        words = [str(self.layout) if self.layout.world_size > 1 else "one device"]
        if self.parallel.zero:
            words.append(f"zero {self.parallel.zero}" + (" offloaded" if self.parallel.offload else ""))
        if self.parallel.virtual_stages > 1:
            words.append(f"{self.parallel.schedule} x {self.parallel.virtual_stages}")
        words.append(f"micro-batch {self.batch.micro_size}")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        return ", ".join(words)


@dataclass(frozen=True)
class Room:
    """Memory to fit into: of one device, or of a machine whose memory so many neighbouring ranks share."""

    capacity: float  # bytes
    shared_by: int = 1
    per_node: int = 8  # devices of a machine

    def needed(self, memories: list[RankMemory], layout: Layout) -> int:
        """Where it is most."""
        peaks = [each.peak for each in memories]
        if self.shared_by == 1:
            return max(peaks)
        of_a_stage = layout.world_size // layout.pp
        of_ranks = [peaks[rank // of_a_stage] for rank in range(layout.world_size)]
        firsts = range(0, layout.world_size, self.shared_by)
        return max(sum(of_ranks[first : first + self.shared_by]) for first in firsts)


TERMS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication")


def amount(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def breakdown(found: RankMemory) -> str:
    """One line: what a rank holds at its fullest moment, terms of nothing left out."""
    terms = [f"{name} {amount(getattr(found, name))}" for name in TERMS if getattr(found, name)]
    flight = f" ({found.in_flight} micro-batches in flight)" if found.in_flight > 1 else ""
    return f"{', '.join(terms)}{flight}; at its fullest in the {found.moment}"
