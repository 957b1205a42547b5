"""What an optimizer keeps of each parameter, as data. No torch: planning reads it too.

Training, checkpoints, the plan and the simulator look here. Another optimizer is another tuple, a choice in `state_of`,
and a line in `train/optim.py` that makes it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a parameter's shape, split as it is, in the type of the weights."""

    name: str  # as torch.optim calls it; in a checkpoint optim.NAME.PARAMETER
    bytes_per_value: int = 4


ADAMW = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))


def state_of(parameter: str) -> tuple[StateTensor, ...]:
    """The tensors that are kept for the parameter of this name."""
    return ADAMW


# For one value of a parameter, whichever keeps most: what is planned with where names are not known.
BYTES_PER_VALUE = sum(tensor.bytes_per_value for tensor in ADAMW)
