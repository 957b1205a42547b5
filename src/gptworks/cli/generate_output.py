"""Text as it is generated, on a terminal; and what is said where there is less of it than was asked for."""

import sys
from typing import Any


def tell_fewer(engine: Any, prompts: list[str], settings: dict[str, Any]) -> None:
    """Where nobody asked for a number of new tokens, and the usual one does not fit the context."""
    for number, fewer in enumerate(engine.new_tokens_that_fit(prompts, **settings), start=1):
        if fewer is not None:
            which = f"prompt {number}: " if len(prompts) > 1 else ""
            print(f"note: {which}at most {fewer} new tokens, as many as fit the model's context", file=sys.stderr)


def show_stream(engine: Any, prompt: str, settings: dict[str, Any]) -> None:
    """The prompt, and what follows it piece by piece."""
    pieces = engine.stream(prompt, **settings)
    print(prompt + next(pieces, ""), end="", flush=True)  # after the first piece: an error comes before any text
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
