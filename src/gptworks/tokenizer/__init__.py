"""The Tokenizer that data, training and generation share."""

from gptworks.tokenizer import kinds
from gptworks.tokenizer.tokenizer import Tokenizer, gpt2_for

__all__ = ["Tokenizer", "gpt2_for", "kinds"]
