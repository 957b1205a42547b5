"""JSON of files that others made."""

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """As `json.loads`, but what is nested too deep for Python is a ValueError like all else that is wrong.

    >>> loads("[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: lists or objects nested too deep
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects nested too deep") from None
