"""`from mindformers.trainer import Trainer`: ours takes what the document gives it."""

from gptworks.api.trainer import Trainer

__all__ = ["Trainer"]
