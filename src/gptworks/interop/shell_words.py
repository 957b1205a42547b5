"""What stands in the words of a shell block, worked out: names, sums, file names, tests. No program is started."""

import ast
import glob
import itertools
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from gptworks.errors import UsageError
from gptworks.interop import shell_syntax
from gptworks.interop.shell_syntax import Assignment, Chain, Simple, Test
from gptworks.interop.shell_tokens import Piece, Word, alternative, refuse

PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([@*0-9]+)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_RANGE = re.compile(r"(.*?)\{(-?\d+)\.\.(-?\d+)\}(.*)")
_CHOICE = re.compile(r"(.*?)\{([^{},]*(?:,[^{},]*)+)\}(.*)")
_SUMS = "only whole numbers, names and + - * / % ** are known"
PATHS = ("pwd", "dirname", "basename", "cd")  # the programs of $(...) whose answers are worked out here
MOST_ROUNDS = 10_000  # of loops that would make commands without end


def would_start(name: str, line: int, text: str) -> UsageError:
    return refuse(name, line, f"$({text.strip()}), which would start a program,")


class Scope:
    """The names that are set, the words behind the script, and the folder it is in."""

    def __init__(self, inherited: dict[str, str], folder: Path, name: str, arguments: Sequence[str]) -> None:
        self.inherited = inherited
        self.values: dict[str, str | list[str]] = dict(inherited)
        self.exported: dict[str, None] = {}
        self.folder, self.name = folder, name
        self.arguments = list(arguments)  # from $0 on
        # Set in front of the command at hand. A shell does not look there, but who writes $NAME behind it means it.
        self.in_front: dict[str, str] = {}

    def sourced(self, name: str, arguments: Sequence[str]) -> "Scope":
        """The scope of a file that is read in the middle: the same names, and the words behind it if there are any."""
        scope = Scope(self.inherited, self.folder, name, [self.arguments[0], *(arguments or self.arguments[1:])])
        scope.values, scope.exported = self.values, self.exported
        return scope

    def called(self, in_front: dict[str, str], name: str, arguments: Sequence[str]) -> "Scope":
        """What a script of its own sees: all that is exported."""
        seen = {each: self._text(each) for each in (*self.inherited, *self.exported) if each in self.values}
        scope = Scope(seen | in_front, self.folder, name, arguments)
        scope.exported = dict.fromkeys([*self.exported, *in_front])
        return scope

    def at(self, line: int) -> str:
        return "run" if self.name == "command" else f"{self.name}, line {line}"

    def environment(self) -> dict[str, str]:
        """What was exported here."""
        return {name: self._text(name) for name in self.exported if name in self.values}

    def export(self, name: str) -> None:
        self.exported[name] = None

    def unset(self, name: str) -> None:
        self.values.pop(name, None)
        self.exported.pop(name, None)

    def change_folder(self, target: str | None) -> None:
        self.folder = Path(os.path.normpath(self.folder / (target or self._home())))

    def _text(self, name: str) -> str:
        value = self.values[name]
        return value if isinstance(value, str) else " ".join(value[:1])

    def value(self, assignment: Assignment) -> str:
        return "".join("".join(self._pieces_as_text(word)) for word in assignment.words)

    def assign(self, assignment: Assignment) -> None:
        old = self.values.get(assignment.name, "")
        if assignment.is_array:
            words = [text for word in assignment.words for text in self.expand(word)]
            before = [old] if isinstance(old, str) and old else list(old)
            self.values[assignment.name] = before + words if assignment.appends else words
        else:
            text = self.value(assignment)
            self.values[assignment.name] = (
                (self._text(assignment.name) if old else "") + text if assignment.appends else text
            )

    def _pieces_as_text(self, word: Word) -> Iterator[str]:
        """The pieces of a value that is assigned, as text: not cut at blanks."""
        for number, piece in enumerate(self._resolved(word.pieces, word.line)):
            if piece.kind == "text":
                yield self._at_home(piece) if number == 0 else piece.value
            elif piece.kind == "result":
                yield piece.value
            else:
                yield " ".join(self._looked_up(piece, word.line, may_be_unset=True))

    def expand(self, word: Word, *, in_command: bool = False, splits: bool = True) -> list[str]:
        """The words that a word becomes. In a command a name that is not set is a mistake, and not nothing."""
        if (literal := word.literal) is not None and "{" in literal:
            return [text for each in _braces(literal) for text in self._files(each, [(each, False)])]
        fields: list[list[tuple[str, bool]]] = []  # each a list of (text, whether it was quoted)
        joins = False
        for number, piece in enumerate(self._resolved(word.pieces, word.line)):
            if piece.kind == "text":
                text = self._at_home(piece) if number == 0 else piece.value
                fields, joins = _joined_to(fields, [text], joins, piece.quoted), True
                continue
            is_result = piece.kind == "result"
            values = [piece.value] if is_result else self._looked_up(piece, word.line, may_be_unset=not in_command)
            if piece.quoted or not splits:
                one_for_each = piece.kind == "variable" and piece.value.endswith(("@]", "@"))
                texts = values if one_for_each else [" ".join(values)]
                if texts:
                    fields, joins = _joined_to(fields, texts, joins, True), True
                continue
            for place, value in enumerate(values):
                pieces = value.split()
                joins = joins and not value[:1].isspace() and place == 0
                if pieces:
                    fields = _joined_to(fields, pieces, joins, False)
                    joins = not value[-1].isspace()
        return [text for each in fields for text in self._files("".join(t for t, _ in each), each)]

    def _resolved(self, pieces: Sequence[Piece], line: int) -> Iterator[Piece]:
        """With what stands behind :- in the place of a name that is not set."""
        for piece in pieces:
            name, index, how, otherwise = self._parameter(piece, line) if piece.kind == "variable" else ("", "", "", "")
            if not how:
                yield piece
                continue
            values = self._known(name, index, line)
            is_unset = values is None or (how.startswith(":") and "".join(values) == "")
            inside = alternative(otherwise or "", self.at(line), quoted=piece.quoted)
            if how[-1] == "?" and is_unset:
                why = "".join(self._pieces_as_text(Word(inside, line))) or "is not set"
                raise UsageError(f"{self.at(line)}: {name}: {why}.")
            if how[-1] == "=" and is_unset:
                self.values[name] = "".join(self._pieces_as_text(Word(inside, line)))
            if is_unset == (how[-1] != "+"):
                yield from self._resolved(inside, line)
            elif not is_unset:
                yield Piece("variable", f"{name}[{index}]" if index else name, piece.quoted)

    def _at_home(self, piece: Piece) -> str:
        is_home = not piece.quoted and re.match(r"~(/|$)", piece.value)
        return self._home() + piece.value[1:] if is_home else piece.value

    def _home(self) -> str:
        return self._text("HOME") if "HOME" in self.values else str(Path.home())

    def _parameter(self, piece: Piece, line: int) -> tuple[str, str | None, str | None, str | None]:
        match = PARAMETER.fullmatch(piece.value)
        assert match is not None, "others are not read"
        return match[1], match[2], match[3], match[4]

    def _files(self, text: str, pieces: list[tuple[str, bool]]) -> list[str]:
        """The files that * and ? stand for; the word itself where there are none. ([0,8] is a range of devices.)"""
        if not any(not quoted and re.search(r"[*?]", part) for part, quoted in pieces):
            return [text]
        pattern = "".join(glob.escape(part) if quoted else part.replace("[", "[[]") for part, quoted in pieces)
        return sorted(glob.glob(pattern, root_dir=self.folder)) or [text]  # noqa: PTH207

    def _looked_up(self, piece: Piece, line: int, *, may_be_unset: bool) -> list[str]:
        if piece.kind == "arithmetic":
            return [str(self._arithmetic(piece.value, line))]
        if piece.kind == "command":
            return [self._substituted(piece.value, line)]
        name, index, _, _ = self._parameter(piece, line)
        values = self._known(name, index, line)
        if values is not None:
            return values
        if may_be_unset:
            return []
        if name in self.in_front:
            return [self.in_front[name]]
        raise UsageError(
            f"{self.at(line)}: ${name} is not set. Set it (export {name}=...), or in front of the command and all "
            f"of it in single quotes: gptworks run -- '{name}=... COMMAND'."
        )

    def _known(self, name: str, index: str | None, line: int) -> list[str] | None:
        if name in ("@", "*"):
            return self.arguments[1:]
        if name == "#":
            return [str(len(self.arguments) - 1)]
        if name.isdecimal():
            return [self.arguments[int(name)]] if int(name) < len(self.arguments) else None
        if name == "PWD":
            return [str(self.folder.absolute())]
        if name == "BASH_SOURCE":
            return [self.arguments[0]]
        if name not in self.values:
            return None
        value = self.values[name]
        if isinstance(value, str):
            return [value]
        if index in ("@", "*"):
            return value
        at = int(index or 0)
        return [value[at]] if at < len(value) else None

    def _substituted(self, text: str, line: int) -> str:
        """pwd, dirname X, basename X [SUFFIX], and cd X && pwd."""
        nodes = shell_syntax.parse(text, self.at(line))
        items = [item for node in nodes if isinstance(node, Chain) for item in node.items]
        folder, answer = self.folder, None
        for item in items:
            words = [each for word in item.words for each in self.expand(word)] if isinstance(item, Simple) else []
            name, rest = (words[0], [w for w in words[1:] if w != "--"]) if words else ("", [])
            if name == "cd" and len(rest) == 1:
                folder = Path(os.path.normpath(folder / rest[0]))
            elif name == "pwd":
                answer = str(folder.absolute())
            elif name == "dirname" and len(rest) == 1:
                answer = str(PurePosixPath(rest[0]).parent)
            elif name == "basename" and rest:
                answer = PurePosixPath(rest[0]).name.removesuffix(rest[1] if len(rest) > 1 else "")
            else:
                answer = None
                break
        if answer is None:
            raise would_start(self.name, line, text)
        return answer

    def _arithmetic(self, text: str, line: int) -> int:
        def number(match: re.Match[str]) -> str:
            known = self.values.get(match[1], "0")
            value = known if isinstance(known, str) else "0"
            if not re.fullmatch(r"\s*-?\d*\s*", value):
                raise UsageError(f"{self.at(line)}: $(({text})): {match[1]} is {value!r}. Needed: a whole number.")
            return f"({int(value or 0)})"

        numbers = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", number, text)
        try:
            return _calculated(ast.parse(re.sub(r"\b0+(?=\d)", "", numbers.strip()), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError) as error:
            why = _SUMS if isinstance(error, SyntaxError) else error
            raise UsageError(f"{self.at(line)}: $(({text})) cannot be worked out ({why}).") from None

    def is_true(self, test: Test) -> bool:
        words = [text for word in test.words for text in self._test_word(word, splits=test.splits)]
        return self._any_of(words, test.line) != test.negated

    def _test_word(self, word: Word, *, splits: bool) -> list[str]:
        texts = self.expand(word, splits=splits)
        return texts if splits or texts else [""]

    def _any_of(self, words: list[str], line: int) -> bool:
        groups = [list(group) for is_or, group in itertools.groupby(words, lambda w: w in ("||", "-o")) if not is_or]
        return any(self._all_of(group, line) for group in groups)

    def _all_of(self, words: list[str], line: int) -> bool:
        groups = [list(group) for is_and, group in itertools.groupby(words, lambda w: w in ("&&", "-a")) if not is_and]
        return all(self._one(group, line) for group in groups)

    def _one(self, words: list[str], line: int) -> bool:
        if words[:1] == ["!"] and len(words) > 1:
            return not self._one(words[1:], line)
        if len(words) <= 1:
            return words != ["-n"] and bool(words and words[0])
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        if len(words) == 2 and words[0] in _FILE_TESTS:
            return _FILE_TESTS[words[0]](self.folder / words[1]) if words[1] else False
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return (words[0] == words[2]) != (words[1] == "!=")
        if len(words) == 3 and words[1] in _COMPARISONS:
            for text in (words[0], words[2]):
                if not re.fullmatch(r"-?\d+", text):
                    raise UsageError(f"{self.at(line)}: [ {' '.join(words)} ]: {text!r} is not a whole number.")
            return bool(_COMPARISONS[words[1]](int(words[0]), int(words[2])))
        raise refuse(self.name, line, f"[ {' '.join(words)} ]")


_FILE_TESTS: dict[str, Callable[[Path], bool]] = {
    "-f": Path.is_file,
    "-d": Path.is_dir,
    "-e": Path.exists,
    "-s": lambda path: path.is_file() and path.stat().st_size > 0,
}
_COMPARISONS = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def _calculated(node: ast.expr) -> int:
    """Whole numbers, cut towards zero as C does."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inside = _calculated(node.operand)
        return -inside if isinstance(node.op, ast.USub) else inside
    if not isinstance(node, ast.BinOp):
        raise ValueError(_SUMS)  # noqa: TRY004 (of the user's, not of a caller)
    left, right = _calculated(node.left), _calculated(node.right)
    if isinstance(node.op, ast.Div):
        return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    if isinstance(node.op, ast.Mod):
        return left - right * (abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1))
    if isinstance(node.op, ast.Pow):
        if not 0 <= right <= 64:
            raise ValueError(f"a power of {right}")
        return int(left**right)
    if type(node.op) not in _OPERATIONS:
        raise ValueError(_SUMS)
    return int(_OPERATIONS[type(node.op)](left, right))


def _joined_to(
    fields: list[list[tuple[str, bool]]], texts: list[str], joins: bool, quoted: bool
) -> list[list[tuple[str, bool]]]:
    """`joins`: the first of them goes on with the last word."""
    first = [[*fields[-1], (texts[0], quoted)]] if joins and fields else [[(texts[0], quoted)]]
    return (fields[:-1] if joins and fields else fields) + first + [[(text, quoted)] for text in texts[1:]]


def _braces(text: str) -> list[str]:
    """a{1..3}, a{x,y}"""
    if match := _RANGE.fullmatch(text):
        before, low, high, behind = match[1], int(match[2]), int(match[3]), match[4]
        step = 1 if low <= high else -1
        if abs(high - low) > MOST_ROUNDS:
            raise UsageError(f"{text}: more than {MOST_ROUNDS:,} words.")
        return [each for n in range(low, high + step, step) for each in _braces(f"{before}{n}{behind}")]
    if match := _CHOICE.fullmatch(text):
        return [each for choice in match[2].split(",") for each in _braces(f"{match[1]}{choice}{match[3]}")]
    return [text]
