"""The text of single tokens, which may be a part of a character."""

from collections.abc import Iterable
from functools import cached_property

from gptworks.tokenizer import Tokenizer


class TokenTexts:
    """Texts of tokens as the API shows them: bytes that are no character are spelled `bytes:\\xe6\\xb2`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = self._look_up(token)
        return self._bytes[token]

    def text_of(self, token: int) -> str:
        content = self.bytes_of(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def offsets(self, tokens: Iterable[int], begin: int = 0) -> list[int]:
        """At which character each token begins."""
        offsets = []
        for token in tokens:
            offsets.append(begin)
            begin += sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token))  # the first byte of a character
        return offsets

    def _look_up(self, token: int) -> bytes:
        if self._letters is not None:
            text = self.tokenizer.backend.id_to_token(token)
            if text is not None and token not in self._added and all(letter in self._letters for letter in text):
                return bytes(self._letters[letter] for letter in text)
        return self.tokenizer.decode([token]).encode(errors="replace")

    @cached_property
    def _letters(self) -> dict[str, int] | None:
        """Letter -> byte, of a byte-level vocabulary: GPT-2 spells bytes that cannot be printed by other letters."""
        if type(self.tokenizer) is not Tokenizer or self.tokenizer.byte_lengths is None:
            return None
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}

    @cached_property
    def _added(self) -> set[int]:
        return set(self.tokenizer.backend.get_added_tokens_decoder())
