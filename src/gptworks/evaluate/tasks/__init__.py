"""Evaluation tasks: each file here is one, found by `evaluate.registry`. See CONTRIBUTING.md, "How to add"."""
