"""Weights and training state on disk."""
