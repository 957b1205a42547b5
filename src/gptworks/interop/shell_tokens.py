"""A block of shell cut into words and operators, with quotes and look-ups marked."""

import re
from dataclasses import dataclass
from typing import Literal

from gptworks.errors import UsageError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BLANKS = " \t\u00a0\u3000"  # the last two look like a blank, and come with text that is copied from a page
# user@host:~/x$ , [user@host x]# , bash-4.2$ , (venv) $ , $ , % : what terminals and documents print before a command.
# A # without a user or a shell before it begins a comment.
_PROMPT = re.compile(
    rf"[{_BLANKS}]*(?:\([\w.-]+\)[ \t]*)?"
    rf"(?:(?:\[[\w.-]+@[^\]\n]*\]|[\w.-]+@[\w.-]+[^$%#\n]*|(?:ba)?sh-[0-9.]+)[$%#]|[$%])[{_BLANKS}]+"
)
_REDIRECTION = re.compile(r"(&>>|&>|[0-9]?>>|[0-9]?>&[0-9]|[0-9]?>|<<<|<<-|<<|<)")
_OPERATORS = ("&&", "||", ";;", ";", "&", "|&", "|", "(", ")")


@dataclass(frozen=True)
class Piece:
    """A part of a word: text as it is, or something that is looked up when its turn comes."""

    kind: Literal["text", "variable", "arithmetic", "command", "result"]  # result: of a look-up, cut at blanks
    value: str
    quoted: bool = False


@dataclass(frozen=True)
class Word:
    pieces: tuple[Piece, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The text of a word in which nothing is looked up or quoted."""
        if any(piece.kind != "text" or piece.quoted for piece in self.pieces):
            return None
        return "".join(piece.value for piece in self.pieces)


@dataclass
class Token:
    line: int
    operator: str = ""  # empty: a word
    word: Word | None = None
    glued: bool = False  # the next token follows without a blank
    redirection: bool = False


def tokens(text: str, name: str) -> list[Token]:
    """`name`: what the block is called in messages, such as the script's file."""
    return _Lexer(_plain(text), name).tokens()


def alternative(text: str, name: str, *, quoted: bool) -> tuple[Piece, ...]:
    """The pieces of what stands behind :- in ${NAME:-...}. `quoted`: the whole stands between double quotes."""
    return _Lexer(text, name).alternative(quoted)


def refuse(name: str, line: int, syntax: str) -> UsageError:
    return UsageError(
        f"{name}, line {line}: {syntax} is not read here, so nothing of the block was run. Run it in your shell, and "
        "give gptworks the command that it starts."
    )


def _plain(text: str) -> str:
    """Without carriage returns and prompts; blanks behind a backslash that ends a line are invisible to who pastes."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(rf"\\[{_BLANKS}]+$", r"\\", text, flags=re.MULTILINE)
    lines = text.split("\n")
    has_prompts = any(_PROMPT.match(line) for line in lines)
    for number, line in enumerate(lines):
        lines[number] = _PROMPT.sub("", line, count=1) if _PROMPT.match(line) else line
        # The prompt of a line that goes on. Without a prompt of the first kind it would be a redirection.
        if has_prompts and number and lines[number - 1].endswith("\\") and line.startswith("> "):
            lines[number] = line[2:]
    return "\n".join(lines)


class _Lexer:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.at, self.line = 0, 1

    def tokens(self) -> list[Token]:
        tokens: list[Token] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "\n":
                tokens.append(Token(self.line, "\n"))
                self._advance(1)
            elif letter in _BLANKS:
                self._advance(1)
                if tokens:
                    tokens[-1].glued = False
            elif self.text.startswith("\\\n", self.at):
                self._advance(2)
                if tokens:
                    tokens[-1].glued = False
            elif letter == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif match := self._redirection():
                tokens.append(Token(self.line, match, redirection=True))
                self._advance(len(match))
            elif operator := next((o for o in _OPERATORS if self.text.startswith(o, self.at)), ""):
                if self.text.startswith("((", self.at):
                    raise refuse(self.name, self.line, "(( ... ))")
                tokens.append(Token(self.line, operator, glued=True))
                self._advance(len(operator))
            else:
                tokens.append(Token(self.line, word=self._word(), glued=True))
        return [*tokens, Token(self.line, "\n")]

    def _redirection(self) -> str:
        """A digit counts as a stream only where a word would begin."""
        match = _REDIRECTION.match(self.text, self.at)
        if match and match[1].startswith("<<"):
            raise refuse(self.name, self.line, f"{match[1]} (text that is given to a program)")
        return match[1] if match else ""

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _word(self) -> Word:
        pieces: list[Piece] = []
        line = self.line
        while self.at < len(self.text) and self.text[self.at] not in f"{_BLANKS}\n;|<>()&":
            pieces += self._next_pieces("text")
        return Word(_joined(pieces), line)

    def alternative(self, quoted: bool) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        while self.at < len(self.text):
            if quoted and self.text[self.at] == "'":  # between double quotes it is a letter
                pieces.append(Piece("text", "'", quoted=True))
                self._advance(1)
            else:
                pieces += self._next_pieces("result")
        if quoted:
            pieces = [Piece("text" if p.kind == "result" else p.kind, p.value, quoted=True) for p in pieces]
        return _joined(pieces)

    def _next_pieces(self, plain: Literal["text", "result"]) -> list[Piece]:
        letter = self.text[self.at]
        if letter == "'":
            return [Piece("text", self._until("'", "a single quote"), quoted=True)]
        if letter == '"':
            return self._double_quoted()
        if letter in "$`":
            return [self._lookup(quoted=False)]
        escaped = self.text[self.at + 1 : self.at + 2] if letter == "\\" else ""
        self._advance(2 if letter == "\\" else 1)
        if letter != "\\":
            return [Piece(plain, letter)]
        return [] if escaped == "\n" else [Piece("text", escaped, quoted=True)]

    def _until(self, end: str, syntax: str) -> str:
        """What lies between the mark here and the next one; both are passed."""
        close = self.text.find(end, self.at + 1)
        if close < 0:
            raise UsageError(f"{self.name}, line {self.line}: {syntax} is opened and not closed. Close it.")
        inside = self.text[self.at + 1 : close]
        self._advance(close + 1 - self.at)
        return inside

    def _double_quoted(self) -> list[Piece]:
        opened = self.line
        self._advance(1)
        pieces = [Piece("text", "", quoted=True)]
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == '"':
                self._advance(1)
                return pieces
            if self.text.startswith("\\\n", self.at):
                self._advance(2)
            elif letter == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\"):
                pieces.append(Piece("text", self.text[self.at + 1], quoted=True))
                self._advance(2)
            elif letter in "$`":
                pieces.append(self._lookup(quoted=True))
            else:
                pieces.append(Piece("text", letter, quoted=True))
                self._advance(1)
        raise UsageError(f"{self.name}, line {opened}: a double quote is opened and not closed. Close it.")

    def _lookup(self, *, quoted: bool) -> Piece:
        if self.text[self.at] == "`":
            return Piece("command", self._until("`", "a backquote"), quoted)
        rest = self.text[self.at + 1 :]
        if rest.startswith("(("):
            return Piece("arithmetic", self._balanced("$((", "))"), quoted)
        if rest.startswith("("):
            return Piece("command", self._balanced("$(", ")"), quoted)
        if rest.startswith("{"):
            return Piece("variable", self._balanced("${", "}"), quoted)
        unread = {"'": "$'...'", '"': '$"..."', "[": "$[...]"}.get(rest[:1])
        if unread and not (quoted and rest[:1] != "["):
            raise refuse(self.name, self.line, unread)
        match = NAME.match(rest) or re.match(r"[0-9@*#?$!-]", rest)
        self._advance(1 + (match.end() if match else 0))
        return Piece("variable", match[0], quoted) if match else Piece("text", "$", quoted)

    def _balanced(self, opening: str, closing: str) -> str:
        start, depth = self.at + len(opening), 0
        inner = opening[-1]
        for at in range(start, len(self.text)):
            if depth == 0 and self.text.startswith(closing, at):
                inside = self.text[start:at]
                self._advance(at + len(closing) - self.at)
                return inside
            depth += (self.text[at] == inner) - (self.text[at] == closing[0])
        raise UsageError(f"{self.name}, line {self.line}: {opening} is opened and not closed. Close it.")


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbours of plain text as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.kind == piece.kind and piece.kind in ("text", "result") and last.quoted == piece.quoted:
            joined[-1] = Piece(piece.kind, last.value + piece.value, piece.quoted)
        else:
            joined.append(piece)
    return tuple(joined)
