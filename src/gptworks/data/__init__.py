"""Text to tokens on disk, tokens on disk to batches."""
