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


def loads_record(text: str | bytes) -> Any:
    """What we wrote ourselves and a disk may have damaged: numbers have 64 bits, and texts can be written again.

    >>> loads_record('{"step": 1' + "0" * 400 + "}")
    Traceback (most recent call last):
    ...
    ValueError: a whole number of more than 64 bits
    """
    try:
        value = json.loads(text, parse_int=_of_64_bits)
        json.dumps(value, ensure_ascii=False).encode()  # half of a pair of surrogates has no bytes
    except RecursionError:
        raise ValueError("lists or objects nested too deep") from None
    return value


def _of_64_bits(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError("a whole number of more than 64 bits")
    return number
