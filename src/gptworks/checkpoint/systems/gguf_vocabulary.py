"""The tokenizer inside a GGUF file: for llama.cpp a list of tokens and merges, for everybody else tokenizer.json.

llama.cpp splits text by rules of its own, known by a name. Only GPT-2's are written; a vocabulary that would cut
text otherwise there than here is left out, and the model then takes and gives ids.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from gptworks.checkpoint.formats import gguf_file
from gptworks.checkpoint.formats.gguf_file import Value
from gptworks.errors import CheckpointError, TokenizerError
from gptworks.tokenizer import Tokenizer

_WHOLE = "tokenizer.huggingface.json"
_GPT2_SPLITS = ("gpt-2", "default", "")  # files of before it was written have none
_NORMAL, _CONTROL, _ADDED, _UNUSED = 1, 3, 4, 5


def carried_by(path: Path) -> Tokenizer:
    """The tokenizer inside a GGUF file."""
    try:
        found = from_settings(gguf_file.read(path).settings, str(path))
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None
    if found is None:
        raise TokenizerError(f"{path}: carries no tokenizer of GPT-2's kind.")
    return found


def settings_of(tokenizer: Tokenizer | None, vocab_size: int, eod_id: int | None, notes: list[str]) -> dict[str, Value]:
    """`tokenizer.*` of a model with `vocab_size` rows. `notes` gets what llama.cpp will not be able to do."""
    if tokenizer is None:
        notes.append("no tokenizer is known: llama.cpp will take and give ids only")
        return {"tokenizer.ggml.model": "none"}
    carried: dict[str, Value] = {}
    if tokenizer.library == "tokenizers":
        carried[_WHOLE] = tokenizer.backend.to_str()
    if problem := _why_not(tokenizer, vocab_size):
        notes.append(f"{problem}: llama.cpp will take and give ids only")
        return {"tokenizer.ggml.model": "none", **carried}
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]  # llama.cpp's own converter fills up rows like this
    types = [_UNUSED] * vocab_size
    for token, i in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        tokens[i], types[i] = token, _NORMAL
    for i, added in tokenizer.backend.get_added_tokens_decoder().items():
        types[i] = _CONTROL if added.special else _ADDED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer.spec["model"]["merges"]]
    found: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }
    if merges:
        found["tokenizer.ggml.merges"] = merges
    end = eod_id if eod_id is not None else tokenizer.eod_id
    if end is None:
        notes.append("no end of document is known: llama.cpp will take token 11 for it")
    else:
        found |= {"tokenizer.ggml.bos_token_id": end, "tokenizer.ggml.eos_token_id": end}
    return found | carried


def from_settings(settings: Mapping[str, Any], where: str) -> Tokenizer | None:
    """tokenizer.json where that is inside; otherwise made from tokens and merges, if they are GPT-2's kind."""
    whole, eod = settings.get(_WHOLE), _eod_token(settings)
    try:
        if isinstance(whole, str):
            backend = tokenizers.Tokenizer.from_str(whole)
            backend.no_padding()
            backend.no_truncation()
        elif settings.get("tokenizer.ggml.model") == "gpt2" and settings.get("tokenizer.ggml.pre", "") in _GPT2_SPLITS:
            backend = _byte_level_bpe(settings)
        else:
            return None
        known = eod if eod in backend.get_vocab(with_added_tokens=True) else None
        return Tokenizer(backend, name=where, eod_token=known)
    except BaseException as error:  # bare Exception, or a panic of the library, which is not even that
        if isinstance(error, KeyboardInterrupt):
            raise
        raise CheckpointError(f"{where}: its tokenizer cannot be read ({error}). The file is damaged.") from None


def _byte_level_bpe(settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens, merges = settings["tokenizer.ggml.tokens"], settings.get("tokenizer.ggml.merges", [])
    types = np.asarray(settings.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))).tolist()
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _ADDED):
            backend.add_tokens([tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=True)])
    return backend


def _eod_token(settings: Mapping[str, Any]) -> str | None:
    tokens, end = settings.get("tokenizer.ggml.tokens"), settings.get("tokenizer.ggml.eos_token_id")
    if not isinstance(tokens, list) or type(end) is not int or not 0 <= end < len(tokens):
        return None
    return str(tokens[end])


def _why_not(tokenizer: Tokenizer, vocab_size: int) -> str | None:
    """Why llama.cpp could not use it as it uses GPT-2's."""
    if tokenizer.vocab_size > vocab_size:
        return f"the tokenizer has {tokenizer.vocab_size:,} tokens and the model {vocab_size:,} rows"
    if tokenizer.library != "tokenizers" or tokenizer.spec["model"]["type"] != "BPE":
        return "the tokenizer is no byte-level BPE"
    if tokenizer.missing_bytes:
        return "the tokenizer has no tokens for some bytes"
    split = tokenizer.spec["pre_tokenizer"]
    is_gpt2 = (
        isinstance(split, dict)
        and split.get("type") == "ByteLevel"
        and not split.get("add_prefix_space", True)
        and split.get("use_regex", True)
    )
    if not is_gpt2 or tokenizer.spec["normalizer"] is not None:
        return "the tokenizer splits text otherwise than GPT-2"
    return None
