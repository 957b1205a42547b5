"""MindFormers' names for GPT-2: change `from mindformers` to `from gptworks.compat.mindformers`, and nothing else."""

from gptworks.compat.mindformers.gpt2 import GPT2LMHeadModel, GPT2Tokenizer
from gptworks.compat.mindformers.pipeline import pipeline
from gptworks.compat.mindformers.trainer import Trainer

__all__ = ["GPT2LMHeadModel", "GPT2Tokenizer", "Trainer", "pipeline"]
