"""Facts of programs and speeds that were fitted: the numbers of kernels.toml and efficiency.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gptworks.errors import UsageError


@dataclass(frozen=True)
class Kernels:
    """Facts of a program: see kernels.toml."""

    stream: tuple[float, float]
    inner: tuple[float, float]
    scores: tuple[float, float]
    dropout: tuple[float, float]
    dropped_scores: tuple[float, float]
    kernels: tuple[float, float]
    logits: float
    parameter: float
    update: float
    fused_attention: bool
    tensor_sum: int
    gradient: int
    repeated_sums: int
    overlaps: tuple[str, ...]
    one_stream_with: tuple[str, ...]
    sums_after_pipeline: bool
    scattered_sends: bool
    written_scores: tuple[float, float] = (0.0, 0.0)  # in place of `scores` with model.attention: math


@dataclass(frozen=True)
class Efficiency:
    """What was fitted, for one device generation and one program."""

    peak: float  # share of the peak that a very large product reaches
    half: float  # size at which a cube of a product would take (1 + 3) times its share
    gap: float  # seconds between two kernels
    inside: float  # share of the speed of links within a machine
    between: float
    elementwise: float  # bytes really moved / bytes counted
    overlap: float  # share of the computing during which messages of the axes that overlap can travel


@cache
def facts(program: str) -> Kernels:
    table = _table("kernels.toml")
    if program not in table:
        raise UsageError(f"kernels {program!r} are not known. Known: {', '.join(table)}.")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table[program].items()
    }
    return Kernels(**values)


@cache
def efficiency(generation: str, program: str) -> Efficiency:
    table = _table("efficiency.toml")
    return Efficiency(
        **table["generations"][generation], **table["kernels"], **table["links"], **table["systems"][program]
    )


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
