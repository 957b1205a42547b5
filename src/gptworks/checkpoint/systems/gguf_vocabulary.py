"""The tokenizer inside a GGUF file: for llama.cpp a list of tokens and merges or scores, for us tokenizer.json.

llama.cpp splits text by rules of its own, known by a name (`tokenizer/splits.py`). A vocabulary that would cut text
otherwise there than here is left out, and the model then takes and gives ids.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from gptworks.checkpoint.formats import gguf_file
from gptworks.checkpoint.formats.gguf_file import Value
from gptworks.errors import CheckpointError, TokenizerError
from gptworks.tokenizer import Tokenizer, scored_pieces, splits
from gptworks.tokenizer.special_tokens import SpecialTokens

_WHOLE = "tokenizer.huggingface.json"
_CHAT = "tokenizer.chat_template"
KINDS = ("gpt2", "llama")  # of tokenizer.ggml.model
# Control characters, and bytes that UTF-8 has in no assigned character: vocabularies of today leave some of them out.
_SELDOM_IN_TEXT = {*range(0x20), 0x7F, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)} - {*b"\t\n\r"}
_NORMAL, _UNKNOWN, _CONTROL, _ADDED, _UNUSED, _BYTE = range(1, 7)


def carried_by(path: Path) -> Tokenizer:
    """The tokenizer inside a GGUF file."""
    try:
        tokenizer = from_settings(gguf_file.read(path).settings, str(path))
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None
    if tokenizer is None:
        raise TokenizerError(f"{path}: carries no tokenizer of the kinds {', '.join(KINDS)}.")
    return tokenizer


def settings_of(tokenizer: Tokenizer | None, vocab_size: int, eod_id: int | None, notes: list[str]) -> dict[str, Value]:
    """`tokenizer.*` of a model with `vocab_size` rows. `notes` gets what llama.cpp will not be able to do."""
    if tokenizer is None:
        notes.append("no tokenizer is known: llama.cpp will take and give ids only")
        return {"tokenizer.ggml.model": "none"}
    carried: dict[str, Value] = {}
    if tokenizer.library == "tokenizers":
        carried[_WHOLE] = tokenizer.backend.to_str()
    if tokenizer.special.chat_template is not None:
        carried[_CHAT] = tokenizer.special.chat_template
    if problem := _why_not(tokenizer, vocab_size):
        notes.append(f"{problem}: llama.cpp will take and give ids only")
        return {"tokenizer.ggml.model": "none", **carried}
    if tokenizer.missing_bytes:
        listed = ", ".join(f"0x{byte:02x}" for byte in tokenizer.missing_bytes)
        notes.append(f"the tokenizer has no tokens for the bytes {listed}: llama.cpp leaves them out of texts")
    tokens, types = _tokens_and_types(tokenizer, vocab_size)
    merges = tokenizer.spec["model"]["merges"]
    settings: dict[str, Value] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if scored_pieces.is_of_this_kind(tokenizer.spec):
        settings = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"} | settings
        settings["tokenizer.ggml.scores"] = scored_pieces.scores_of(merges, tokens)
        settings["tokenizer.ggml.add_space_prefix"] = scored_pieces.begins_with_blank(tokenizer.spec)
        is_gpt2 = False
    else:
        split = splits.split_of(tokenizer.spec)
        assert split is not None  # _why_not asks
        settings = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split.name} | settings
        is_gpt2 = split is splits.GPT2
        if merges:
            settings["tokenizer.ggml.merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    return settings | _first_and_last(tokenizer, eod_id, notes, is_gpt2=is_gpt2) | carried


def _tokens_and_types(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]  # llama.cpp's own converter fills up rows like this
    types = [_UNUSED] * vocab_size
    has_bytes = bool(tokenizer.spec["model"].get("byte_fallback"))
    for token, i in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        tokens[i], types[i] = token, _BYTE if has_bytes and _is_byte(token) else _NORMAL
    for i, added in tokenizer.backend.get_added_tokens_decoder().items():
        types[i] = _CONTROL if added.special else _ADDED
    unknown = tokenizer.backend.token_to_id(tokenizer.spec["model"].get("unk_token") or "")
    if unknown is not None:
        types[unknown] = _UNKNOWN
    return tokens, types


def _first_and_last(tokenizer: Tokenizer, eod_id: int | None, notes: list[str], *, is_gpt2: bool) -> dict[str, Value]:
    """BOS, EOS and whether a text begins with one. Where GPT-2's end of document is both, that is said as ever."""
    settings: dict[str, Value] = {}
    end = eod_id if eod_id is not None else tokenizer.eod_id
    bos = tokenizer.backend.token_to_id(tokenizer.special.bos_token or "")
    if end is None:
        notes.append("no end of document is known: llama.cpp will take token 11 for it")
    if bos is None:
        bos = end
    if bos is not None:
        settings["tokenizer.ggml.bos_token_id"] = bos
    if end is not None:
        settings["tokenizer.ggml.eos_token_id"] = end
    if not is_gpt2 or tokenizer.prompt_start:
        settings["tokenizer.ggml.add_bos_token"] = bool(tokenizer.prompt_start)
    for key, token in (("unknown", tokenizer.special.unk_token), ("padding", tokenizer.special.pad_token)):
        i = tokenizer.backend.token_to_id(token or "")
        if i is not None and not is_gpt2:
            settings[f"tokenizer.ggml.{key}_token_id"] = i
    return settings


def from_settings(settings: Mapping[str, Any], where: str) -> Tokenizer | None:
    """tokenizer.json where that is inside; otherwise made from tokens and merges, or from pieces and scores."""
    whole, kind = settings.get(_WHOLE), settings.get("tokenizer.ggml.model")
    if not isinstance(whole, str) and kind not in KINDS:
        return None
    try:
        if isinstance(whole, str):
            backend = tokenizers.Tokenizer.from_str(whole)
            backend.no_padding()
            backend.no_truncation()
        else:
            backend = _byte_level_bpe(settings, where) if kind == "gpt2" else _pieces(settings, where)
            _add_first_token(backend, settings)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        roles = {role: _token(settings, key) for role, key in _ROLES.items()}
        known = {role: token if token in vocabulary else None for role, token in roles.items()}
        eod, template = known.pop("eos_token"), settings.get(_CHAT)
        bos, unk, pad = (known[role] for role in ("bos_token", "unk_token", "pad_token"))
        special = SpecialTokens(bos, unk, pad, chat_template=template if isinstance(template, str) else None)
        return Tokenizer(backend, name=where, eod_token=eod, special=special)
    except BaseException as error:  # bare Exception, or a panic of the library, which is not even that
        if isinstance(error, KeyboardInterrupt | CheckpointError):
            raise
        raise CheckpointError(f"{where}: its tokenizer cannot be read ({error}). The file is damaged.") from None


_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def _byte_level_bpe(settings: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    name = settings.get("tokenizer.ggml.pre", "")
    split = splits.by_name(name)
    if split is None:
        raise CheckpointError(
            f"{where}: its tokenizer splits text by {str(name)[:60]!r} (tokenizer.ggml.pre); known: {splits.known()}. "
            "Take the folder that the file was made from: its tokenizer.json carries the rules."
        )
    tokens, types = _words(settings)
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    pairs = [tuple(merge.split(" ")) for merge in settings.get("tokenizer.ggml.merges", [])]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.whole_words))
    if split.composed:
        backend.normalizer = split.normalizer()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = tokenizers.decoders.ByteLevel()
    _add_special(backend, tokens, types, normalized=split is splits.GPT2)
    return backend


def _pieces(settings: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    tokens, types = _words(settings)
    scores = np.asarray(settings["tokenizer.ggml.scores"], dtype=np.float64).tolist()
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    scored = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == _NORMAL
    }  # fmt: skip
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    blank = bool(settings.get("tokenizer.ggml.add_space_prefix", True))
    backend = scored_pieces.tokenizer_of(vocab, scored, unknown=unknown, begins_with_blank=blank, name=where)
    _add_special(backend, tokens, types, normalized=False)
    return backend


def _words(settings: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = settings["tokenizer.ggml.tokens"]
    return tokens, np.asarray(settings.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))).tolist()


def _add_special(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], *, normalized: bool
) -> None:
    """Found in a text before it is split. `normalized`: GPT-2's own says so, and its identity is known."""
    added = [
        tokenizers.AddedToken(token, special=kind != _ADDED, normalized=normalized)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _ADDED, _UNKNOWN)
    ]
    backend.add_tokens(added)


def _add_first_token(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """As llama.cpp has it where the file does not say: before pieces with scores, and in Llama 3."""
    split = splits.by_name(settings.get("tokenizer.ggml.pre", ""))
    usual = settings.get("tokenizer.ggml.model") == "llama" or (split is not None and split.adds_bos)
    bos = _token(settings, _ROLES["bos_token"])
    if settings.get("tokenizer.ggml.add_bos_token", usual) and bos is not None:
        first = f"{bos} $A"
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=first, pair=f"{first} $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )


def _token(settings: Mapping[str, Any], key: str) -> str | None:
    tokens, i = settings.get("tokenizer.ggml.tokens"), settings.get(key)
    if not isinstance(tokens, list) or type(i) is not int or not 0 <= i < len(tokens):
        return None
    return str(tokens[i])


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _why_not(tokenizer: Tokenizer, vocab_size: int) -> str | None:
    """Why llama.cpp could not use it as it is used here."""
    if tokenizer.vocab_size > vocab_size:
        return f"the tokenizer has {tokenizer.vocab_size:,} tokens and the model {vocab_size:,} rows"
    if tokenizer.library != "tokenizers" or tokenizer.spec["model"]["type"] != "BPE":
        return "the tokenizer is not a byte-level BPE"
    if not _SELDOM_IN_TEXT.issuperset(tokenizer.missing_bytes):
        return "the tokenizer has no tokens for some bytes"
    if splits.split_of(tokenizer.spec) is None and not scored_pieces.is_of_this_kind(tokenizer.spec):
        return f"the tokenizer splits text otherwise than {splits.known()} and llama"
    return None
