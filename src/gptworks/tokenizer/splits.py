"""How the byte-level BPEs of today's models cut text before they merge bytes, under the names llama.cpp has for them.

A GGUF file carries only the name; a tokenizer.json the rules themselves.
"""

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers


@dataclass(frozen=True)
class Split:
    """`rules`: what `tokenizers` cuts by, before bytes become letters."""

    name: str  # as written into GGUF
    other_names: tuple[str, ...]  # that mean the same there
    pattern: str | None  # of a Split before the bytes; None = GPT-2's own
    digits_apart: bool = False  # each digit is a word, before GPT-2's pattern
    composed: bool = False  # text is brought into form NFC. llama.cpp leaves it as it is.
    whole_words: bool = False  # a word that is a token is not merged together
    adds_bos: bool = False  # where the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is not None:
            first: Any = pre_tokenizers.Split(tokenizers.Regex(self.pattern), behavior="isolated", invert=False)
        elif self.digits_apart:
            first = pre_tokenizers.Digits(individual_digits=True)
        else:
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        return pre_tokenizers.Sequence([first, letters])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composed else None


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = Split("gpt-2", ("default", ""), None)  # files of before it was written have none
LLAMA3 = Split(
    "llama-bpe",
    ("llama3", "llama-v3"),
    rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",
    whole_words=True,
    adds_bos=True,
)
QWEN2 = Split("qwen2", ("deepseek-r1-qwen",), rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}", composed=True)
SMOLLM = Split("smollm", (), None, digits_apart=True)
ALL = (GPT2, LLAMA3, QWEN2, SMOLLM)


def by_name(name: object) -> Split | None:
    """The split of that name, as `tokenizer.ggml.pre` gives it."""
    return next((each for each in ALL if name == each.name or name in each.other_names), None)


def known() -> str:
    return ", ".join(each.name for each in ALL)


def split_of(spec: dict[str, Any]) -> Split | None:
    """The one whose rules a tokenizer.json has, to the letter; None where it cuts text otherwise than all of them."""
    parts = _without_offsets(spec["pre_tokenizer"]), _plain_normalizer(spec["normalizer"])
    for each in ALL:
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = each.pre_tokenizer()
        rules = _without_offsets(_json(made)["pre_tokenizer"])
        is_whole = bool(spec["model"].get("ignore_merges"))
        if parts == (rules, "NFC" if each.composed else None) and is_whole == each.whole_words:
            return each
    return None


def _json(made: tokenizers.Tokenizer) -> dict[str, Any]:
    from gptworks import json_text

    return json_text.loads(made.to_str())


def _plain_normalizer(normalizer: Any) -> Any:
    return normalizer.get("type") if isinstance(normalizer, dict) and len(normalizer) == 1 else normalizer


def _without_offsets(rules: Any) -> Any:
    """Offsets do not change ids, and older files leave out use_regex, which is then on."""
    if not isinstance(rules, dict):
        return rules
    if rules.get("type") == "Sequence":
        return [_without_offsets(each) for each in rules.get("pretokenizers", [])]
    if rules.get("type") == "ByteLevel":
        return "ByteLevel", rules.get("add_prefix_space", True), rules.get("use_regex", True)
    return {key: value for key, value in rules.items() if key != "trim_offsets"}
