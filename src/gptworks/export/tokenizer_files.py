"""The tokenizer in an exported folder, under all the names that other systems look for."""

import json
from collections.abc import Mapping
from pathlib import Path

from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.sentencepiece import SAVED_NAME, SentencePieceTokenizer


def write(folder: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json (or sentencepiece.model), tokenizer_config.json, special_tokens_map.json, vocab.json, merges.txt.

    vocab.json holds the added tokens too, so that it tells the ids by itself. Only BPE has merges.
    """
    tokenizer.save(folder)
    config = tokenizer.special.as_config(tokenizer.eod_token)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    roles = {name: config[name] for name in names if name in config}
    _write_json(folder / "special_tokens_map.json", roles, indent=2)
    words = {token: i for i, token in enumerate(tokens_in_order(tokenizer))}
    _write_json(folder / "vocab.json", words)
    if isinstance(tokenizer, SentencePieceTokenizer) or tokenizer.spec["model"]["type"] != "BPE":
        return
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer.spec["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


def tokens_in_order(tokenizer: Tokenizer) -> list[str]:
    """By id; an id that no token has gets a name of its own."""
    names = [f"<|unused_{i}|>" for i in range(tokenizer.vocab_size)]
    for token, i in tokenizer._vocabulary().items():
        names[i] = token
    return names


def script(tokenizer: Tokenizer) -> tuple[list[str], list[str], str]:
    """Parts of run.py: its imports, the lines that make `ids` of `text`, the expression that makes a text of `new`."""
    start = f"{tokenizer.prompt_start} + " if tokenizer.prompt_start else ""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return (
            ["from tokenizers import Tokenizer"],
            [
                'tokenizer = Tokenizer.from_file("tokenizer.json")',
                f"ids = {start}tokenizer.encode(text, add_special_tokens=False).ids",
            ],
            "tokenizer.decode(ids + new)",
        )
    imports = ["from sentencepiece import SentencePieceProcessor"]
    load = f'tokenizer = SentencePieceProcessor(model_file="{SAVED_NAME}")'
    if tokenizer.rules == "plain":
        return imports, [load, "ids = tokenizer.encode(text)"], "tokenizer.decode(ids + new)"
    return (
        ["import jieba", *imports],
        [
            load,
            r'words = [word.translate({32: "\u2582", 10: "\u2583"}) for word in jieba.cut(text)]',
            'ids = tokenizer.encode(" ".join(words))',
        ],
        r'tokenizer.decode(ids + new).translate({32: "", 0x2582: " ", 0x2583: "\n"})',
    )


def packages(tokenizer: Tokenizer) -> list[str]:
    """What run.py needs for it."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return ["tokenizers"]
    return ["sentencepiece"] if tokenizer.rules == "plain" else ["sentencepiece", "jieba==0.42.1"]


def _write_json(path: Path, values: Mapping[str, object], indent: int | None = None) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
