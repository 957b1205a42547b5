"""Sizes of a model and of what training it needs. Never imports torch."""
