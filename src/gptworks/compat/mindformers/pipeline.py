"""`from mindformers.pipeline import pipeline`: ours takes what the document gives it."""

from gptworks.api.pipeline import pipeline

__all__ = ["pipeline"]
