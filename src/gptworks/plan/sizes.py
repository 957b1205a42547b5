"""Closed forms over a model's shape: parameters, FLOPs, bytes on disk."""

from functools import lru_cache

from gptworks import optimizer_state
from gptworks.architecture import TensorSpec, around_blocks, block_tensors
from gptworks.config.schema import ModelConfig

FP32 = 4  # bytes of a number
COMPUTE_BYTES = {"fp32": FP32, "fp16": 2, "bf16": 2}  # of a number, by precision.compute


def num_parameters(model: ModelConfig) -> int:
    """A tied head counted once."""
    block = sum(spec.size for spec in block_tensors(model).values())
    around = sum(spec.size for spec in around_blocks(model, is_first=True, is_last=True).values())
    return model.num_layers * block + around


@lru_cache(maxsize=1 << 10)
def block_matrices(model: ModelConfig) -> dict[str, TensorSpec]:
    """The weights of a block that tokens are multiplied with, by name."""
    return {name: spec for name, spec in block_tensors(model).items() if spec.role.kind == "matrix"}


def columns_and_rows(model: ModelConfig) -> tuple[int, int]:
    """How many matrices of a block take the residual stream (qkv, up, the gate of a gated feed-forward layer), and how
    many give to it: tensor parallelism sums before or behind each."""
    columns = sum(spec.role.tp_dim == 0 for spec in block_matrices(model).values())
    return columns, len(block_matrices(model)) - columns


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward of one token: 6 per weight that is multiplied, and causal attention over seq_len, or over
    the window of it that a token sees."""
    block = sum(spec.size for spec in block_matrices(model).values())
    matrices = model.num_layers * block + model.vocab_size * model.hidden_size
    # QK and weights x V, 2 x 2hT, of which the mask hides half; of a window, all but the window
    seen = seq_len / 2
    if 0 < model.sliding_window < seq_len:
        window = model.sliding_window
        seen = window - window * window / (2 * seq_len)
    attention = model.num_layers * 4 * model.num_heads * model.head_size * seen
    return 6.0 * matrices + 3.0 * attention


def checkpoint_bytes(model: ModelConfig, portable: bool) -> int:
    """fp32 weights and what the optimizer keeps of each; the portable folder holds the weights once more."""
    return num_parameters(model) * (4 * (2 if portable else 1) + optimizer_state.BYTES_PER_VALUE)
