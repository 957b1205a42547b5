"""llama2.c: one .bin file with a Llama, and tokenizer.bin beside it. Read only: its trainer writes it from PyTorch."""

from collections.abc import Mapping
from pathlib import Path

import tokenizers

from gptworks.checkpoint.formats import llama2c_file
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import Rule, Table, conflicts_with, match, settle
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights, model_config
from gptworks.checkpoint.systems.gguf_architectures import LLAMA, reordered
from gptworks.errors import CheckpointError, TokenizerError
from gptworks.tokenizer import Tokenizer, scored_pieces
from gptworks.tokenizer.special_tokens import SpecialTokens

NAME = "llama2c"
TITLE = "llama2.c weights"
CUTS = False
SUFFIX = ".bin"
TOLERANCE = EXACT
TOKENIZER = "tokenizer.bin"

TABLE = Table(
    TITLE,
    [
        Rule("wte.weight", ("token_embedding",)),
        Rule("blocks.{i}.ln1.weight", ("rms_att.{i}",)),
        Rule("blocks.{i}.attn.qkv.weight", ("wq.{i}", "wk.{i}", "wv.{i}")),
        Rule("blocks.{i}.attn.out.weight", ("wo.{i}",)),
        Rule("blocks.{i}.ln2.weight", ("rms_ffn.{i}",)),
        Rule("blocks.{i}.mlp.gate.weight", ("w1.{i}",)),
        Rule("blocks.{i}.mlp.up.weight", ("w3.{i}",)),
        Rule("blocks.{i}.mlp.down.weight", ("w2.{i}",)),
        Rule("ln_f.weight", ("rms_final",)),
        Rule("head.weight", ("wcls",)),
    ],
    known=LLAMA.table.known,
)
_BOS = 1  # begins a text, and where the program writes it the text ends
_SPECIAL = ("<unk>", "<s>", "</s>")
_KNOWN = (*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)))


def recognise(path: Path) -> bool:
    return llama2c_file.is_llama2c(path)


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    header, tensors = llama2c_file.read(path)
    names = ("hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "max_positions")
    stored: dict[str, object] = {name: getattr(header, name) for name in names}
    # What the program has no number for is fixed in its source.
    fixed = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "layernorm_eps": 1e-5}
    model = model_config(settle({**stored, **fixed, "tied": header.shares_head}, overrides, str(path)), str(path))
    words = path.with_name(TOKENIZER)
    return Opened(
        path,
        NAME,
        model,
        match(TABLE, [_in_our_order(tensors, header.head_size)], model, where=str(path)),
        about={"version": header.version or "without a number", "tokenizer": TOKENIZER if words.is_file() else "none"},
        files=[path],
        embedded_tokenizer=(lambda: tokenizer_in(words, header.vocab_size)) if words.is_file() else None,
        eod_id=_BOS,
        bos_id=_BOS,
        conflicts=conflicts_with(stored, overrides),
    )


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    raise CheckpointError("llama2c: files of llama2.c are only read. Write --to hf, which its export.py reads.")


def _in_our_order(tensors: Mapping[str, LazyTensor], head_size: int) -> dict[str, LazyTensor]:
    """The tensors in our order of rotary pairs: llama2.c's queries and keys turn neighbours, as llama.cpp's do."""
    return {
        name: reordered(each, head_size, to_halves=True) if name.split(".")[0] in ("wq", "wk") else each
        for name, each in tensors.items()
    }


def tokenizer_in(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a llama2.c file. Its pieces have blanks for sentencepiece's U+2581. The first 259 are known by
    their ids: how special ones and bytes are spelled has changed with its versions."""
    pieces: dict[str, int] = {}
    scores: dict[str, float] = {}
    for i, (token, score) in enumerate(llama2c_file.read_tokens(path, vocab_size)):
        if i < len(_KNOWN):
            piece = _KNOWN[i]
        else:
            piece = token.replace(" ", scored_pieces.BLANK)
            scores[piece] = score
        if piece in pieces:
            raise TokenizerError(f"{path}: the tokens {pieces[piece]} and {i} are both {piece!r}. The file is damaged.")
        pieces[piece] = i
    backend = scored_pieces.tokenizer_of(
        pieces, scores, unknown=_SPECIAL[0], begins_with_blank=True, name=str(path)
    )  # fmt: skip
    backend.add_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    first = _SPECIAL[_BOS]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A", pair=f"{first} $A $B", special_tokens=[(first, _BOS)]
    )
    special = SpecialTokens(bos_token=first, unk_token=_SPECIAL[0])
    return Tokenizer(backend, name=str(path), eod_token=first, special=special)
