"""Text out of a model."""
