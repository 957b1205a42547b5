"""BPE as sentencepiece has it: pieces with scores, of which the best neighbours are joined first.

GGUF (`tokenizer.ggml.model` = llama) and llama2.c carry it so. For `tokenizers` the scores become an order of merges;
blanks are U+2581, a character that is no piece is spelled in bytes, `<0x0A>`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers

from gptworks.errors import TokenizerError

BLANK = "\u2581"
_LONGEST = 512  # characters of a piece: each of its cuts is looked at


def tokenizer_of(
    pieces: Mapping[str, int], scores: Mapping[str, float], *, unknown: str | None, begins_with_blank: bool, name: str
) -> tokenizers.Tokenizer:
    """`scores`: of the pieces that text may become; others (special ones, bytes) are in `pieces` alone."""
    model = tokenizers.models.BPE(
        vocab=dict(pieces),
        merges=_merges(pieces, scores, name),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend(BLANK)] if begins_with_blank else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
    parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if begins_with_blank else [])])
    return backend


def _merges(pieces: Mapping[str, int], scores: Mapping[str, float], name: str) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, best pieces first."""
    merges = []
    for piece, score in scores.items():
        if len(piece) > _LONGEST:
            raise TokenizerError(
                f"{name}: a piece of {len(piece):,} characters, {piece[:20]!r}...; at most {_LONGEST}."
            )
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((-score, pieces[piece], pieces[left], pieces[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def is_of_this_kind(spec: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json is such a BPE and nothing else decides its ids."""
    return _begin(spec) is not None


def begins_with_blank(spec: Mapping[str, Any]) -> bool:
    return bool(_begin(spec))


def _begin(spec: Mapping[str, Any]) -> bool | None:
    model, cutter = spec["model"], spec["pre_tokenizer"]
    if model["type"] != "BPE" or not model.get("byte_fallback") or model.get("ignore_merges"):
        return None
    if cutter is None:
        return _blanks_of(spec["normalizer"])
    is_plain = spec["normalizer"] is None and isinstance(cutter, dict) and cutter.get("type") == "Metaspace"
    if not is_plain or cutter.get("replacement") != BLANK or cutter.get("split", True):
        return None
    # "first" has a blank only where a text begins; after a special token llama.cpp has one too.
    return {"always": True, "never": False}.get(str(cutter.get("prepend_scheme")))


def _blanks_of(normalizer: Any) -> bool | None:
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    if steps == [replace]:
        return False
    return True if steps == [{"type": "Prepend", "prepend": BLANK}, replace] else None


def scores_of(merges: Sequence[Any], tokens: Sequence[str]) -> list[float]:
    """Scores that give the order of the merges back: of each piece the place of the first merge that makes it."""
    places: dict[str, int] = {}
    for place, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        places.setdefault(left + right, place)
    last = len(places)
    ranks = {piece: rank for rank, piece in enumerate(places)}
    return [-float(ranks.get(token, last)) for token in tokens]
