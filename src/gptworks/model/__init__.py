"""The model and its fresh weights. Knows nothing of ranks, files or the trainer."""

from gptworks.model.gpt import GPT, IGNORED, KVCache, tie

__all__ = ["GPT", "IGNORED", "KVCache", "tie"]
