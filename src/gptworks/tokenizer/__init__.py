"""The Tokenizer that data, training and generation share."""

from gptworks.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
