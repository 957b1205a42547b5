"""Does a layout compute what one process computes? The user's own model and data, both ways."""
