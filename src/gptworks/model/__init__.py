"""The model and its fresh weights. Knows nothing of ranks, files or the trainer."""

from gptworks.model.cache import KVCache
from gptworks.model.gpt import GPT, tie
from gptworks.model.loss import IGNORED, NOT_SCORED

__all__ = ["GPT", "IGNORED", "NOT_SCORED", "KVCache", "tie"]
