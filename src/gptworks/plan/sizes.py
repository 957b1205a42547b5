"""Closed forms over a model's shape: parameters, FLOPs, bytes on disk."""

from gptworks.config.schema import ModelConfig

FP32 = 4  # bytes of a number
COMPUTE_BYTES = {"fp32": FP32, "fp16": 2, "bf16": 2}  # of a number, by precision.compute


def num_parameters(model: ModelConfig) -> int:
    """A tied head counted once."""
    h, f = model.hidden_size, model.ffn_size
    per_block = (4 * h * h + 4 * h) + (2 * h * f + f + h) + 4 * h  # attention, feed-forward, two LayerNorms
    embeddings = (model.vocab_size + model.max_positions) * h
    head = 0 if model.tied else model.vocab_size * h
    return embeddings + model.num_layers * per_block + 2 * h + head


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward of one token: 6 per weight that is multiplied, and causal attention over seq_len."""
    h, f = model.hidden_size, model.ffn_size
    matrices = model.num_layers * (4 * h * h + 2 * h * f) + model.vocab_size * h
    attention = model.num_layers * 2 * h * seq_len  # QK and weights x V, half of each masked away: 2 x 2hT / 2
    return 6.0 * matrices + 3.0 * attention


def checkpoint_bytes(model: ModelConfig, portable: bool) -> int:
    """fp32 weights and two Adam moments; the portable folder holds the weights once more."""
    return num_parameters(model) * 4 * (4 if portable else 3)
