"""A block of shell, as people paste it, taken apart into commands, loops and tests. Nothing of it is run here.

What a shell can do and this reader cannot is refused by name and line before anything runs: half a block would be worse
than none.
"""

import re
from dataclasses import dataclass, field

from gptworks.errors import UsageError
from gptworks.interop.shell_tokens import NAME, Piece, Token, Word, refuse, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_UNREAD = {
    "while": "a while loop",
    "until": "an until loop",
    "case": "a case",
    "select": "a select",
    "function": "a function",
    "{": "a group { ... }",
    "coproc": "a coprocess",
    "eval": "eval",
    "trap": "a trap",
    "declare": "declare",
    "local": "local",
    "read": "read",
    "shift": "shift",
}
DECLARES = ("export", "readonly")  # what stands behind them is assigned, and not cut at blanks


@dataclass(frozen=True)
class Assignment:
    name: str
    words: tuple[Word, ...]
    is_array: bool = False
    appends: bool = False


@dataclass(frozen=True)
class Redirection:
    operator: str  # such as 2>, >>, &>
    target: Word | None  # None: of 2>&1, which names a stream


@dataclass(frozen=True)
class Simple:
    """NAME=value ... program words ... > file"""

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirections: tuple[Redirection, ...] = ()
    tee: "Simple | None" = None  # what its output is piped to
    in_background: bool = False


@dataclass(frozen=True)
class Test:
    """[ ... ] or [[ ... ]]; the words between."""

    line: int
    words: tuple[Word, ...]
    negated: bool = False
    splits: bool = True  # of [ ]: what is looked up is cut at blanks


@dataclass(frozen=True)
class Chain:
    """Commands and tests with && or || between them. `joints` has one entry less."""

    items: tuple["Simple | Test", ...]
    joints: tuple[str, ...]


@dataclass(frozen=True)
class Loop:
    line: int
    name: str
    words: tuple[Word, ...]
    body: tuple["Node", ...]


@dataclass(frozen=True)
class Branches:
    conditions: tuple[tuple[Chain, tuple["Node", ...]], ...]
    otherwise: tuple["Node", ...]


Node = Chain | Loop | Branches


def parse(text: str, name: str) -> tuple[Node, ...]:
    """`name`: what the block is called in messages, such as the script's file."""
    return _Parser(tokens(text, name), name).block()


@dataclass
class _Parser:
    tokens: list[Token]
    name: str
    at: int = field(default=0)

    def block(self, *ends: str) -> tuple[Node, ...]:
        """Up to one of the words in `ends`, which is left where it is; without any, to the end."""
        nodes: list[Node] = []
        while True:
            self._skip_separators()
            if self.at >= len(self.tokens):
                if ends:
                    raise UsageError(f"{self.name}: {ends[0]} is missing at its end.")
                return tuple(nodes)
            if self._keyword() in ends:
                return tuple(nodes)
            nodes.append(self._node())

    def _node(self) -> Node:
        keyword = self._keyword()
        if keyword == "for":
            return self._loop()
        if keyword == "if":
            return self._branches()
        return self._chain()

    def _loop(self) -> Loop:
        line = self.tokens[self.at].line
        self.at += 1
        name = self._keyword() or ""
        if not NAME.fullmatch(name):
            raise refuse(self.name, line, "a for loop that does not go over words")
        self.at += 1
        if self._keyword() != "in":
            raise refuse(self.name, line, "a for loop over the words of the script")
        self.at += 1
        words = []
        while self.tokens[self.at].word is not None:
            words.append(self._take_word())
        self._skip_separators()
        self._expect("do", line)
        body = self.block("done")
        self._expect("done", line)
        self._expect_end("done")
        return Loop(line, name, tuple(words), body)

    def _branches(self) -> Branches:
        line = self.tokens[self.at].line
        conditions: list[tuple[Chain, tuple[Node, ...]]] = []
        otherwise: tuple[Node, ...] = ()
        while self._keyword() in ("if", "elif"):
            self.at += 1
            self._skip_separators()
            condition = self._chain()
            for item in condition.items:
                if isinstance(item, Simple) and item.words[:1] and item.words[0].literal not in ("true", "false", ":"):
                    raise refuse(self.name, item.line, "an if whose condition is a command")
            self._skip_separators()
            self._expect("then", line)
            conditions.append((condition, self.block("elif", "else", "fi")))
        if self._keyword() == "else":
            self.at += 1
            otherwise = self.block("fi")
        self._expect("fi", line)
        self._expect_end("fi")
        return Branches(tuple(conditions), otherwise)

    def _chain(self) -> Chain:
        items, joints = [self._item()], []
        while self.tokens[self.at].operator in ("&&", "||"):
            joints.append(self.tokens[self.at].operator)
            self.at += 1
            while self.at < len(self.tokens) and self.tokens[self.at].operator == "\n":
                self.at += 1
            items.append(self._item())
        return Chain(tuple(items), tuple(joints))

    def _item(self) -> Simple | Test:
        negated = False
        while self._keyword() == "!":
            negated = not negated
            self.at += 1
        if self._keyword() in ("[", "[[", "test"):
            return self._test(negated)
        command = self._simple()
        if negated:
            raise refuse(self.name, command.line, "a command behind !")
        return command

    def _test(self, negated: bool) -> Test:
        line, opening = self.tokens[self.at].line, self._keyword()
        close = {"[": "]", "[[": "]]"}.get(opening or "", "")
        self.at += 1
        words: list[Word] = []
        while self._keyword() != close:
            token = self.tokens[self.at]
            if not close and token.word is None:  # of `test`, which nothing closes
                return Test(line, tuple(words), negated)
            if token.operator == "\n":
                raise UsageError(
                    f"{self.name}, line {line}: {opening} is opened and not closed. Close it with {close}."
                )
            text = Word((Piece("text", token.operator),), token.line)
            words.append(token.word or text)
            self.at += 1
        self.at += 1
        return Test(line, tuple(words), negated, splits=opening == "[")

    def _simple(self) -> Simple:
        token = self.tokens[self.at]
        if token.operator == "(":
            raise refuse(self.name, token.line, "a subshell ( ... )")
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirections: list[Redirection] = []
        while True:
            token = self.tokens[self.at]
            if token.redirection:
                redirections.append(self._redirection())
            elif token.operator == "(" and len(words) == 1 and not assignments:
                raise refuse(self.name, token.line, "a function")
            elif token.word is None:
                break
            elif (not words or words[0].literal in DECLARES) and (assignment := self._assignment()):
                assignments.append(assignment)
            else:
                words.append(self._take_word())
        if redirections and not words:
            raise refuse(self.name, token.line, f"{redirections[0].operator} without a command")
        if not (assignments or words):
            before = f"before {token.operator}" if token.operator.strip() else "at the end of the line"
            raise UsageError(f"{self.name}, line {token.line}: a command is missing {before}.")
        first = words[0].literal if words else None
        if first in _UNREAD:
            raise refuse(self.name, words[0].line, _UNREAD[first])
        line = words[0].line if words else token.line
        if token.operator == "|&":
            redirections.append(Redirection("2>&1", None))
        tee = self._tee() if token.operator in ("|", "|&") else None
        in_background = self.tokens[self.at].operator == "&"
        return Simple(line, tuple(assignments), tuple(words), tuple(redirections), tee, in_background)

    def _tee(self) -> Simple:
        self.at += 1
        while self.at < len(self.tokens) - 1 and self.tokens[self.at].operator == "\n":
            self.at += 1
        line = self.tokens[self.at].line
        tee = self._simple()
        if not tee.words or tee.words[0].literal != "tee":
            raise refuse(self.name, line, "a pipe into anything but tee")
        return tee

    def _redirection(self) -> Redirection:
        token = self.tokens[self.at]
        self.at += 1
        if token.operator[-1].isdigit():  # 2>&1
            return Redirection(token.operator, None)
        if self.tokens[self.at].word is None:
            raise UsageError(f"{self.name}, line {token.line}: a file is missing behind {token.operator}.")
        return Redirection(token.operator, self._take_word())

    def _assignment(self) -> Assignment | None:
        word = self.tokens[self.at].word
        assert word is not None
        first = word.pieces[0] if word.pieces else None
        match = _ASSIGNMENT.match(first.value) if first and first.kind == "text" and not first.quoted else None
        if match is None or first is None:
            return None
        glued = self.tokens[self.at].glued
        self.at += 1
        appends = match[2] == "+="
        rest = tuple(p for p in (Piece("text", first.value[match.end() :]), *word.pieces[1:]) if p.value or p.quoted)
        if not rest and glued and self.tokens[self.at].operator == "(":
            return Assignment(match[1], self._array(), is_array=True, appends=appends)
        return Assignment(match[1], (Word(rest, word.line),), appends=appends)

    def _array(self) -> tuple[Word, ...]:
        line = self.tokens[self.at].line
        self.at += 1
        words = []
        while self.at < len(self.tokens) and self.tokens[self.at].operator != ")":
            if self.tokens[self.at].word is not None:
                words.append(self._take_word())
            elif self.tokens[self.at].operator == "\n":
                self.at += 1
            else:
                raise refuse(self.name, line, f"{self.tokens[self.at].operator} in a list")
        if self.at >= len(self.tokens):
            raise UsageError(f"{self.name}, line {line}: a list is opened with ( and not closed. Close it with ).")
        self.at += 1
        return tuple(words)

    def _take_word(self) -> Word:
        word = self.tokens[self.at].word
        assert word is not None
        self.at += 1
        return word

    def _keyword(self) -> str | None:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        return token.word.literal if token and token.word else None

    def _expect(self, keyword: str, line: int) -> None:
        if self._keyword() != keyword:
            raise UsageError(f"{self.name}, line {line}: {keyword} is missing behind what begins there.")
        self.at += 1

    def _expect_end(self, keyword: str) -> None:
        """Nothing is behind the end of a loop or an if: its output as a whole goes nowhere else."""
        token = self.tokens[self.at]
        if token.redirection or token.operator in ("|", "|&", "&"):
            raise refuse(self.name, token.line, f"{token.operator} behind {keyword}")

    def _skip_separators(self) -> None:
        while self.at < len(self.tokens) and self.tokens[self.at].operator in ("\n", ";", "&"):
            self.at += 1
