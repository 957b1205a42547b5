"""Measuring a model on data."""
