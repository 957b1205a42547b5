"""Tokens to text as they appear: never half a character, never what belongs to a stop string."""

from collections.abc import Sequence

from gptworks.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet
_TAIL = 8  # tokens before a new one that are decoded with it


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], generated: Sequence[int]) -> str:
    """The text of the generated tokens. Some decoders write a first token differently, hence the prompt."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *generated])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(generated)


class TextOut:
    """The text of one generation.

    >>> out = TextOut(tokenizer, prompt, stop=["\\n\\n"])   # doctest: +SKIP
    >>> for token in tokens: print(out.add(token), end="")   # doctest: +SKIP
    >>> print(out.close())   # doctest: +SKIP
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.prompt, self.stop = tokenizer, prompt, stop
        self.tokens: list[int] = []
        self.is_stopped = False
        self._text = ""  # all of it, as far as it is certain
        self._given = 0  # characters of it that were given out
        # Whole characters up to here: their text, the last of their tokens, and the tokens after them.
        self._settled, self._tail, self._new = "", list(prompt[-_TAIL:]), list[int]()

    def add(self, token: int) -> str:
        """What can be shown now that this token is known."""
        return self.extend([token])

    def extend(self, tokens: Sequence[int]) -> str:
        if self.is_stopped:
            return ""
        self.tokens += tokens
        self._new += tokens
        self._text = self._grown()
        return self._take(self._certain())

    def _grown(self) -> str:
        """The text of all tokens without half a character at its end. Only the last tokens are decoded anew."""
        before, whole = self.tokenizer.decode(self._tail), self.tokenizer.decode([*self._tail, *self._new])
        if not whole.startswith(before):
            return continuation(self.tokenizer, self.prompt, self.tokens).rstrip(_BROKEN)
        text = self._settled + whole[len(before) :]
        if not text.endswith(_BROKEN):
            self._settled, self._tail, self._new = text, [*self._tail, *self._new][-_TAIL:], []
        return text.rstrip(_BROKEN)

    def close(self) -> str:
        """What was held back, when no token follows."""
        if not self.is_stopped:
            self._text = continuation(self.tokenizer, self.prompt, self.tokens)
            end = _first(self._text, self.stop)
            self._text = self._text if end < 0 else self._text[:end]
        return self._take(len(self._text))

    @property
    def text(self) -> str:
        """What was given out."""
        return self._text[: self._given]

    def _certain(self) -> int:
        """How much of the text cannot turn out to be the beginning of a stop string."""
        end = _first(self._text, self.stop)
        if end >= 0:
            self.is_stopped = True
            self._text = self._text[:end]
            return end
        longest = max(map(len, self.stop), default=1)
        for start in range(max(0, len(self._text) - longest + 1), len(self._text)):
            if any(stop.startswith(self._text[start:]) for stop in self.stop):
                return start
        return len(self._text)

    def _take(self, end: int) -> str:
        taken = self._text[self._given : end]
        self._given = max(self._given, end)
        return taken


def _first(text: str, stops: Sequence[str]) -> int:
    """Where the first of them begins; -1 if none is there."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
