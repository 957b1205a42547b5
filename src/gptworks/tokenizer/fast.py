"""The quick way to the same ids: gigatoken, where it is installed and agrees with Hugging Face `tokenizers`."""

import numpy as np

from gptworks.tokenizer.tokenizer import Tokenizer

# Contractions, runs of blanks, digits, letters and marks of many scripts, emoji, what is unassigned or private.
TRICKY = (
    "I'm you'LL we've 's 'S it''s  two   three\t\ttabs \n\n\n x\r\n y \u00a0\u2003z\u200b 12345 1,234.5 ٣٤ Ⅷ ½ ²³ ⅷ "
    "naïve Ñandú Straße ЖЁЩ ёлка αβγ Ά עִבְרִית العَرَبِيَّة हिन्दी தமிழ் ไทย ខ្មែរ "
    "日本語カタカナ 中文,标点。 한국어 ᏣᎳᎩ 𐍈𝔘𝕟𝕚 👩‍👩‍👧‍👦🏽🇺🇳 "
    "\u0301a\u0301 \ufeff\u2028\u2029\x85\x1c\x1f \ue000\U000e0001 "
    "_under__score ---=== !?¿؟ “q” ‘a’ don’t <|endoftext|><|endoftext|> end"
)


class FastEncoder:
    """Batches of UTF-8 texts to ids."""

    def __init__(self, spec: str) -> None:
        import gigatoken

        self.backend = gigatoken.Tokenizer.from_json(spec)

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """All ids in a row, uint32, and the number of ids of each text."""
        rows = self.backend.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(rows.offsets.data)
        return np.asarray(rows.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


def fast_encoder(tokenizer: Tokenizer) -> FastEncoder | None:
    """None: the library is missing, the tokenizer is of another kind than the proofs are about, or ids differ."""
    if not is_plain_byte_level(tokenizer):
        return None
    try:
        encoder = FastEncoder(tokenizer.backend.to_str())
        return encoder if agrees(encoder, tokenizer, TRICKY) else None
    except BaseException as error:  # a young library, whose panics are not even Exceptions: left to the reference
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return None


def agrees(encoder: FastEncoder, tokenizer: Tokenizer, text: str) -> bool:
    ids, _ = encoder.encode([text.encode()])
    return ids.tolist() == tokenizer.encode(text)


def is_plain_byte_level(tokenizer: Tokenizer) -> bool:
    """GPT-2's kind: byte-level BPE with its pattern and nothing else that decides ids."""
    if type(tokenizer) is not Tokenizer or tokenizer.missing_bytes:
        return False
    spec = tokenizer.spec
    model, cutter = spec["model"], spec["pre_tokenizer"] or {}
    return (
        model["type"] == "BPE"
        and not any(model.get(name) for name in _DECIDES_IDS)
        and spec["normalizer"] is None
        and cutter.get("type") == "ByteLevel"
        and not cutter.get("add_prefix_space", True)
        and cutter.get("use_regex", True)
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or any(map(_is_at_a_cut, token["content"]))
            for token in spec["added_tokens"]
        )
    )


def _is_at_a_cut(character: str) -> bool:
    """Long texts are encoded in pieces, cut beside these (text_blocks.SAFE_CUT); a token across a cut would be lost."""
    return character.isspace() or character == "。"


_DECIDES_IDS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)
