"""The commands that a block of shell would start, one after the other, with names looked up and folders followed.

A small part of a shell, in Python. It starts no program: $(...) is known for pwd, dirname and basename only, and those
are worked out here.
"""

import itertools
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gptworks.errors import UsageError
from gptworks.interop import shell_syntax, shell_unread
from gptworks.interop.shell_syntax import DECLARES, Branches, Chain, Loop, Node, Simple, Test
from gptworks.interop.shell_tokens import Piece, Word, refuse
from gptworks.interop.shell_words import MOST_ROUNDS, Scope

SHELLS = {"sh", "bash", "zsh", "dash"}
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_WORDS_BEHIND = re.compile(r"\$\{?[1-9@*#]")
# Files that prepare a shell for other programs: nothing here needs them, whether they are there or not.
_SETS_UP = re.compile(
    r"(?:^|/)(?:activate|\.bashrc|\.bash_profile|\.profile|\.zshrc|conda\.sh|set_?env\.sh|setvars\.sh)$"
)
_MOST_DEPTH = 16  # of scripts that call scripts

Find = Callable[[str, Path], Path | None]


@dataclass(frozen=True)
class Started:
    """One program, as the block would start it."""

    words: list[str]
    environment: dict[str, str]  # what the block exported, and NAME=value in front
    folder: Path  # may not exist: then it is one of the other system's own
    where: str  # such as run.sh, line 3
    output: str = ""  # the file that its output goes to
    appends: bool = False
    errors_too: bool = False  # 2>&1
    errors: str = ""  # the file that its errors go to
    appends_errors: bool = False
    on_screen: bool = True  # too, beside the file
    remarks: list[str] = field(default_factory=list)


class _Exit(Exception):
    """The script ends here."""


def commands(
    text: str, name: str, environment: Mapping[str, str], folder: Path, find: Find, arguments: Sequence[str] = ()
) -> Iterator[Started]:
    """What the block starts. It is read whole before the first is given out; what is looked up, and which way a test
    goes, is decided when its turn comes. `find`: the file of a script that is to be read, None where it is not ours."""
    return _run_script(_Shell(Scope(dict(environment), folder, name, [name, *arguments]), find), text)


def of_words(words: Sequence[str], environment: Mapping[str, str], folder: Path, find: Find) -> Iterator[Started]:
    """What a command starts that a shell has cut into words already. Only names that are set in front of it, after that
    shell looked, are looked up."""
    shell = _Shell(Scope(dict(environment), folder, "command", ["command"]), find)
    # A backslash of its own is what is left of one before the end of a line.
    kept = [word.strip("\n") for word in words if word.strip("\n") not in ("", "\\")]
    in_front = dict(word.split("=", 1) for word in itertools.takewhile(_ASSIGNED.match, kept))
    for name, value in in_front.items():
        kept = [re.sub(rf"\$(?:{name}\b|\{{{name}\}})", lambda _, value=value: value, word) for word in kept]  # type: ignore
    return shell.start(Simple(1, (), tuple(Word((Piece("text", word, quoted=True),), 1) for word in kept)))


def _run_script(shell: "_Shell", text: str) -> Iterator[Started]:
    if "\0" in text:  # a shell passes over it, the system takes no name with one
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{shell.scope.name}, line {line}: a NUL byte, which no script has. Copy the script again.")
    nodes = shell_syntax.parse(text, shell.scope.name)
    shell_unread.refuse_unread(nodes, shell.scope.name)

    def until_exit() -> Iterator[Started]:
        try:
            yield from shell.run(nodes)
        except _Exit:
            return

    return until_exit()


def _in_output_of(script: Started, each: Started) -> Started:
    """A command of a script, whose output goes where that of the script does unless it says otherwise."""
    if script.output and not each.output:
        both = script.errors_too or each.errors_too
        each = replace(each, output=script.output, appends=script.appends, on_screen=script.on_screen, errors_too=both)
    if script.errors and not each.errors:
        each = replace(each, errors=script.errors, appends_errors=script.appends_errors)
    return replace(each, remarks=[*script.remarks, *each.remarks])


class _Shell:
    def __init__(self, scope: Scope, find: Find, depth: int = 0) -> None:
        self.scope, self.find, self.depth = scope, find, depth

    def run(self, nodes: Sequence[Node]) -> Iterator[Started]:
        for node in nodes:
            if isinstance(node, Loop):
                names = [each for word in node.words for each in self.scope.expand(word)]
                if len(names) > MOST_ROUNDS:
                    raise UsageError(
                        f"{self.scope.at(node.line)}: a loop of {len(names):,} rounds. At most {MOST_ROUNDS:,}."
                    )
                for value in names:
                    self.scope.values[node.name] = value
                    yield from self.run(node.body)
            elif isinstance(node, Branches):
                taken = (body for condition, body in node.conditions if self._holds(condition))
                yield from self.run(next(taken, node.otherwise))
            else:
                yield from self._chain(node)

    def _chain(self, chain: Chain) -> Iterator[Started]:
        """A command that fails ends the block, so && has nothing to decide but behind a test."""
        goes_on = True
        for joint, item in zip(("&&", *chain.joints), chain.items, strict=True):
            if joint == "||" and isinstance(item, Simple) and not isinstance(chain.items[0], Test):
                continue  # || exit, || true: others are not read
            if goes_on != (joint == "&&"):
                continue
            if isinstance(item, Test):
                goes_on = self.scope.is_true(item)
            else:
                yield from self.start(item)
                goes_on = True

    def _holds(self, condition: Chain) -> bool:
        result = True
        for joint, item in zip(("&&", *condition.joints), condition.items, strict=True):
            if result == (joint == "&&"):
                is_test = isinstance(item, Test)
                result = self.scope.is_true(item) if is_test else item.words[0].literal != "false"  # type: ignore
        return result

    # One command

    def start(self, simple: Simple) -> Iterator[Started]:
        if not simple.words:
            for assignment in simple.assignments:
                self.scope.assign(assignment)
            return
        if simple.words[0].literal in DECLARES:
            self._declare(simple)
            return
        in_front = {each.name: self.scope.value(each) for each in simple.assignments}
        self.scope.in_front = in_front
        words = [text for word in simple.words for text in self.scope.expand(word, in_command=True)]
        remarks, words = self._without_prefixes(words, in_front)
        if not words:
            return
        if self._is_builtin(words, simple.line):
            return
        if words[0] in ("source", ".") or Path(words[0]).name in SHELLS or words[0].endswith(".sh"):
            script = yield from self._script(words, in_front, simple, remarks)
            if script:
                return
        yield self._started(words, in_front, simple, remarks)

    def _started(self, words: list[str], in_front: dict[str, str], simple: Simple, remarks: list[str]) -> Started:
        if simple.in_background:
            remarks = [*remarks, "&: it is run in front here. To have it behind: gptworks run ... &"]
        started = Started(
            words, self.scope.environment() | in_front, self.scope.folder, self.scope.at(simple.line), remarks=remarks
        )
        for redirection in simple.redirections:
            if redirection.target is None:
                started = replace(started, errors_too=True)
                continue
            target = "".join(self.scope.expand(redirection.target, in_command=True))
            if redirection.operator == "<":
                continue  # of /dev/null: others are not read
            if redirection.operator.startswith("2"):
                started = replace(started, errors=target, appends_errors=">>" in redirection.operator)
            else:  # 2>&1 in front of it is about the terminal
                both, appends = redirection.operator.startswith("&"), ">>" in redirection.operator
                started = replace(started, output=target, appends=appends, errors_too=both, on_screen=False)
        if simple.tee is not None:
            options = [text for word in simple.tee.words[1:] for text in self.scope.expand(word, in_command=True)]
            files = [text for text in options if not text.startswith("-")]
            if len(files) != 1:
                raise UsageError(f"{self.scope.at(simple.line)}: tee with {len(files)} files. Needed: one.")
            started = replace(started, output=files[0], appends="-a" in options, on_screen=True)
        return started

    def _without_prefixes(self, words: list[str], in_front: dict[str, str]) -> tuple[list[str], list[str]]:
        """Words that say how a program is started, and not which."""
        remarks: list[str] = []
        while words:
            if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL):  # cut into words by a shell
                in_front[match[1]] = match[2]
            elif words[0] == "nohup":
                remarks.append("nohup: a run whose terminal is closed saves and ends. For more: nohup gptworks run ...")
            elif words[0] in ("env", "exec", "command", "time", "sudo"):
                if len(words) > 1 and words[1].startswith("-") and words[0] != "time":
                    raise UsageError(f"{self.scope.name}: {words[0]} {words[1]} is not read here. Leave it out.")
                if words[0] == "time":
                    remarks.append("time: the log says how long it took")
                if words[0] == "sudo":
                    remarks.append("sudo: it is run as you are")
            else:
                break
            words = words[1:]
        return remarks, words

    def _is_builtin(self, words: list[str], line: int) -> bool:
        """Carries out a command that changes the shell itself; False where it is another."""
        name, rest = words[0], words[1:]
        if name == "cd":
            self._change_folder(rest, line)
        elif name == "unset":
            for variable in rest:
                self.scope.unset(variable)
        elif name == "exit":
            if rest[:1] not in ([], ["0"]):
                raise UsageError(f"{self.scope.at(line)}: exit {rest[0]}: the script ends itself here, with an error.")
            raise _Exit
        elif name not in ("set", "shopt", "ulimit", "wait", "true", ":", "umask"):
            return False
        return True

    def _declare(self, simple: Simple) -> None:
        names = [text for word in simple.words[1:] for text in self.scope.expand(word)]
        if names and names[0].startswith("-"):
            raise refuse(self.scope.name, simple.line, f"{simple.words[0].literal} {names[0]}")
        for assignment in simple.assignments:
            self.scope.assign(assignment)
        if simple.words[0].literal == "export":
            for name in (*names, *(assignment.name for assignment in simple.assignments)):
                self.scope.export(name)

    def _change_folder(self, rest: list[str], line: int) -> None:
        if len(rest) > 1:
            raise UsageError(f"{self.scope.at(line)}: cd {' '.join(rest)}: one folder is needed.")
        if rest == ["-"]:
            raise refuse(self.scope.name, line, "cd -")
        self.scope.change_folder(rest[0] if rest else None)

    def _script(
        self, words: list[str], in_front: dict[str, str], simple: Simple, remarks: list[str]
    ) -> Generator[Started, None, bool]:
        """Whether it was one that can be read here; if so, all that it starts has been given out."""
        sourced = words[0] in ("source", ".")
        rest = words if words[0].endswith(".sh") else words[1:]
        while rest and rest[0] in ("-e", "-x", "-u", "-ex", "-eu", "-xe", "-eux", "-l"):
            rest = rest[1:]
        if not rest:
            return False
        file = None
        if rest[0] == "-c" and len(rest) > 1:
            text, name, arguments = rest[1], f"{self.scope.at(simple.line)}: {words[0]} -c", rest[2:]
        else:
            file = self.find(rest[0], self.scope.folder)
            if file is None:
                if sourced and not _SETS_UP.search(rest[0]):
                    raise UsageError(f"{self.scope.at(simple.line)}: {rest[0]}: no such file in {self.scope.folder}.")
                return False
            text, name, arguments = file.read_text(encoding="utf-8", errors="replace"), rest[0], rest[1:]
        if arguments and not _WORDS_BEHIND.search(text):
            raise UsageError(
                f"{self.scope.at(simple.line)}: {rest[0]}: {' '.join(arguments)} behind it: it reads no words. Leave "
                "them out, or run the command that is in it, with these words."
            )
        if self.depth >= _MOST_DEPTH:
            raise UsageError(f"{self.scope.at(simple.line)}: {rest[0]}: scripts that call scripts, {_MOST_DEPTH} deep.")
        scope = self.scope.sourced(name, arguments) if sourced else self.scope.called(in_front, name, rest)
        inner = _Shell(scope, self.find, self.depth + 1)
        if file is not None and not file.is_relative_to(self.scope.folder):
            remarks = [*remarks, f"{rest[0]} is not here: used is the one that comes with gptworks, {file}"]
        outside = self._started(words, in_front, simple, remarks)  # where the output of all of it goes
        for each in _run_script(inner, text):
            yield _in_output_of(outside, each)
            outside = replace(outside, appends=True, appends_errors=True)  # to what the first of them wrote
        if sourced:
            self.scope.folder = scope.folder
        return True
