"""Rows of ids of different lengths to one rectangle and its mask, as `Tokenizer.__call__` gives them."""

from typing import Any

import numpy as np

from gptworks.errors import TokenizerError


def arrange(
    rows: list[list[int]],
    *,
    pad_id: int | None,
    padding: bool | str,
    max_length: int | None,
    truncation: bool,
    return_tensors: str | None,
) -> dict[str, Any]:
    """input_ids and attention_mask; padding is on the right and has mask 0."""
    _check(padding, max_length, truncation, return_tensors)
    if max_length is not None:
        rows = [_fitted(row, number, max_length, truncation) for number, row in enumerate(rows, 1)]
    width = None
    if padding == "max_length":
        width = max_length
    elif padding:
        width = max((len(row) for row in rows), default=0)
    masks = [[1] * len(row) for row in rows]
    if width is not None and any(len(row) < width for row in rows):
        if pad_id is None:
            raise TokenizerError(
                f"padding={padding!r}: this tokenizer has no end-of-document token to pad with. Leave padding out, and "
                "pad the rows yourself."
            )
        rows = [row + [pad_id] * (width - len(row)) for row in rows]
        masks = [mask + [0] * (width - len(mask)) for mask in masks]
    if return_tensors is None:
        return {"input_ids": rows, "attention_mask": masks}
    return {"input_ids": _tensor(rows, return_tensors), "attention_mask": _tensor(masks, return_tensors)}


def _check(padding: bool | str, max_length: int | None, truncation: bool, return_tensors: str | None) -> None:
    if padding not in (False, True, "longest", "max_length"):
        raise TokenizerError(f"padding: got {padding!r}; needs False, True (to the longest row) or 'max_length'.")
    if return_tensors not in (None, "np", "pt"):
        raise TokenizerError(f"return_tensors: got {return_tensors!r}; needs None (lists), 'np' or 'pt'.")
    if not isinstance(truncation, bool):
        raise TokenizerError(f"truncation: got {truncation!r}; needs True (cut at max_length) or False.")
    if max_length is None:
        for name, value in (("padding", padding == "max_length"), ("truncation", truncation)):
            if value:
                raise TokenizerError(f"{name}: needs max_length, the number of tokens of a row, which is not given.")
    elif isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise TokenizerError(f"max_length: got {max_length!r}; needs a whole number of 1 or more.")


def _fitted(row: list[int], number: int, max_length: int, truncation: bool) -> list[int]:
    if len(row) > max_length and not truncation:
        raise TokenizerError(
            f"text {number} has {len(row)} tokens, more than max_length={max_length}. Shorten it, raise max_length, or "
            "ask for truncation=True."
        )
    return row[:max_length]


def _tensor(rows: list[list[int]], kind: str) -> Any:
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        got = f"rows of {lengths[0]} to {lengths[-1]} tokens" if rows else "no text"
        raise TokenizerError(f"return_tensors={kind!r}: got {got}; needs rows of one length. Ask for padding=True.")
    array = np.array(rows, dtype=np.int64)
    if kind == "np":
        return array
    import torch

    return torch.from_numpy(array)
