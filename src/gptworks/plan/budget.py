"""Memory to fit into, and amounts of it in words."""

from dataclasses import dataclass

from gptworks.config.derive import Layout
from gptworks.plan.memory import TERMS, RankMemory

GIB = 2**30


@dataclass(frozen=True)
class MemoryBudget:
    """Memory to fit into: of one device, or of a machine whose memory so many neighbouring ranks share."""

    capacity: float  # bytes
    shared_by: int = 1
    per_node: int = 8  # devices of a machine

    def needed(self, memories: list[RankMemory], layout: Layout) -> int:
        """Where it is most. `memories`: one for each pipeline rank."""
        peaks = [each.peak for each in memories]
        if self.shared_by == 1:
            return max(peaks)
        of_a_stage = layout.world_size // layout.pp
        of_ranks = [peaks[rank // of_a_stage] for rank in range(layout.world_size)]
        firsts = range(0, layout.world_size, self.shared_by)
        return max(sum(of_ranks[first : first + self.shared_by]) for first in firsts)


def amount(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def breakdown(memory: RankMemory) -> str:
    """One line: what a rank holds at its fullest moment, terms of nothing left out."""
    terms = [f"{name} {amount(getattr(memory, name))}" for name in TERMS if getattr(memory, name)]
    flight = f" ({memory.in_flight} micro-batches in flight)" if memory.in_flight > 1 else ""
    return f"{', '.join(terms)}{flight}; at its fullest in the {memory.moment}"
