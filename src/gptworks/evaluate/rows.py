"""What a model is asked and what it answers: rows of tokens, and how likely it finds them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Row:
    """Tokens of which those from `first` on are scored, each given all before it."""

    tokens: "np.ndarray"
    first: int

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Score:
    log_probability: float  # natural logarithm, summed over the scored tokens
    greedy: bool  # every scored token is the likeliest one at its place
    tokens: int
