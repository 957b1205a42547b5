"""What people paste, a command or a whole block: which of its lines gptworks runs, and what the others are for here."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from gptworks.errors import UsageError
from gptworks.interop import command_line, registry, shell_block
from gptworks.interop.shell_block import Started
from gptworks.interop.translation import Command

STDIN = "-"  # in the place of a command: the block is read from there
# Scripts of MindFormers that are programs of their own: they read a rank table and start a process for each device.
_BY_NAME = {"run_distribute.sh": "RANK_TABLE_FILE", "run_standalone.sh": "DEVICE_ID"}
_PYTHON = re.compile(r"python[0-9.]*")
_TYPED = re.compile(
    r"(?:#.*\n)*(?:\$ )?python[0-9.]*[ \t]*\n(.*)", re.DOTALL
)  # an interpreter, and what is typed there
_TYPED_PROMPT = re.compile(r"^(?:>>>|\.\.\.) ?", re.MULTILINE)
# Of the systems whose commands run here.
_NOT_NEEDED = re.compile(r"paddle|oneflow|mindspore|mindformers|megatron|fleetx|requirements|^-e$|torch|deepspeed|apex")
_FIRST = "run it in your shell first"
# fmt: off
_CHANGES = (
    "mv", "cp", "ln", "rm", "unzip", "gunzip", "gzip", "zstd", "xz", "tar", "7z", "chmod", "chown", "touch", "scp",
    "rsync", "sed", "vi", "vim", "nano", "module", "huggingface-cli", "hf", "modelscope", "gsutil", "aws", "apt",
    "apt-get", "yum", "kill", "pkill",
)
_LOOKS = (
    "ls", "cat", "head", "tail", "less", "more", "grep", "wc", "tree", "du", "df", "free", "ps", "top", "htop", "date",
    "which", "whoami", "hostname", "uname", "lscpu", "nvidia-smi", "npu-smi", "rocm-smi", "nvcc", "watch", "md5sum",
    "sha256sum", "history", "pwd",
)
# fmt: on
_SHOWS = "not needed: it only shows something"
_OTHERS = {
    "docker": "not needed: gptworks runs without a container (`gptworks launch --image` runs in one)",
    "nvidia-docker": "not needed: gptworks runs without a container (`gptworks launch --image` runs in one)",
    "conda": "not needed: gptworks has the Python that it runs in",
    "source": "not needed: gptworks has the Python that it runs in",
    "ssh": "run it in your shell; start the command on each machine",
    "sleep": "not needed: each command waits for the one before it",
    "mkdir": "not needed: folders that are written to are made",
    "clear": "not needed",
    "alias": "not needed",
    "tmux": "not needed: `tmux`, then gptworks run ...",
    "screen": "not needed: `screen`, then gptworks run ...",
    "make": "not needed: nothing of the other system is compiled",
    "cmake": "not needed: nothing of the other system is compiled",
}


@dataclass(frozen=True)
class Line:
    """One program that the block starts: a command for gptworks, or an answer that says why not."""

    started: Started
    command: Command | None = None
    answer: str = ""

    @property
    def folder(self) -> Path:
        return self.started.folder


def lines(
    words: Sequence[str], environment: Mapping[str, str], folder: Path, text: str | None = None
) -> Iterator[Line]:
    """`words`: as a shell gave them; one may be a block, or a script. `text`: the block, where it came by a pipe."""
    if text is not None:
        words = [text]
    if text is None and len(words) == 1 and _script(words[0], folder):
        started = shell_block.of_words(["sh", words[0]], environment, folder, _script)
    elif len(words) == 1 and (code := _typed(words[0])):
        started = shell_block.of_words(["python", "-c", code], environment, folder, _script)
    elif len(words) == 1:
        name = "block" if text is not None or "\n" in words[0].strip() else "command"
        started = shell_block.commands(words[0], name, environment, folder, _script)
    else:
        started = shell_block.of_words(words, environment, folder, _script)
    return map(_line, started)


def make_folders(line: Line) -> None:
    """Make the folders of a mkdir: what comes after it may be run in there."""
    for word in line.started.words[1:] if line.started.words[0] == "mkdir" else []:
        if not word.startswith("-"):
            try:
                (line.folder / word).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"{line.started.where}: mkdir {word}: {error.strerror}.") from None


def _typed(text: str) -> str:
    """The Python of a block that opens an interpreter, or that was copied from one. Empty: it is none."""
    opened = _TYPED.fullmatch(text.strip())
    if opened is None and not text.lstrip().startswith(">>> "):
        return ""
    return _TYPED_PROMPT.sub("", opened[1] if opened else text.strip())


def check(lines: Sequence[Line]) -> None:
    """Before anything runs: each line is of a system that is known, or one that is answered."""
    for line in lines:
        if line.command is not None:
            try:
                registry.of_command(line.command)
            except UsageError as error:
                hint = " If it is not a command, but what one has printed, leave it out." if len(lines) > 1 else ""
                raise UsageError(f"{line.started.where}: {str(error).removeprefix('run: ')}{hint}") from None
    if not lines:
        raise UsageError("run: it starts no command. Needed: a command of a system that is known.")


def _line(started: Started) -> Line:
    here = _nearest(started.folder)
    if here != started.folder:
        away = started.folder.relative_to(here) if started.folder.is_relative_to(here) else started.folder
        remark = f"cd {away}: no such folder in {here.resolve()}, so it is run there: no clone of theirs is needed."
        started = replace(started, folder=here, remarks=[*started.remarks, remark])
    if started.words[0].startswith("-"):
        raise UsageError(
            f"{started.where}: {started.words[0]} stands at the beginning of a line. The line before it lacks its "
            "backslash, or has something behind it."
        )
    answer = _answer(started)
    if answer:
        return Line(started, answer=answer)
    return Line(started, command_line.take_apart(started.words, started.environment, started.folder))


def _nearest(folder: Path) -> Path:
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _script(name: str, folder: Path) -> Path | None:
    """The file of a script that is read line by line; None where it is not here, or is a program by its name."""
    # A document of OneFlow writes example/ for examples/.
    names = [name, re.sub(r"(^|/)examples?/", r"\1examples/", name)]
    places = [Path(os.path.normpath(folder / each)) for each in names]  # a folder that is gone into may not be there
    path = next((place for place in places if name.endswith(".sh") and place.is_file()), None)
    if path is None:  # OneFlow's scripts read a second one beside them
        return registry.shipped("pretrain.sh") if PurePosixPath(name).name == "pretrain.sh" else None
    mark = _BY_NAME.get(path.name)
    return None if mark and mark in path.read_text(encoding="utf-8", errors="replace") else path


def _answer(started: Started) -> str:
    """Empty: it is to be looked at as a command of another system."""
    name, rest = PurePosixPath(started.words[0]).name, started.words[1:]
    if _PYTHON.fullmatch(name) and rest[:2] == ["-m", "pip"]:
        name, rest = "pip", rest[2:]
    if name in ("pip", "pip3", "uv"):
        rest = [word for word in rest if word != "."]
        needless = all(
            _NOT_NEEDED.search(word)
            for word in rest
            if not word.startswith("-") and "://" not in word and word != "install"
        )
        return "not needed: gptworks is installed, and runs the commands of that system" if needless else _FIRST
    if name == "git":
        return "not needed: no clone of the other system is" if rest[:1] == ["clone"] else _FIRST
    if name in ("wget", "curl", "aria2c", "axel"):
        file = _downloaded(rest)
        is_here = bool(file) and (started.folder / file).exists()
        return f"not needed: {file} is here" if is_here else f"{_FIRST}: gptworks fetches nothing by itself"
    if name in ("echo", "printf"):
        return _FIRST if started.output else " ".join(rest) or "not needed"
    if name == "tar" and any(".json.zst.tar" in word for word in rest):
        return ""  # the slip of a document, which is known
    if _PYTHON.fullmatch(name) and rest[:1] in (["--version"], ["-V"]):
        return _SHOWS
    if _PYTHON.fullmatch(name) and [PurePosixPath(word).name for word in rest[:1]] == ["setup.py"]:
        return "not needed: gptworks is installed, and runs the commands of that system"
    if _PYTHON.fullmatch(name) and not rest:
        return "not needed: it opens an interpreter; what is typed there is Python"
    return _FIRST if name in _CHANGES else _SHOWS if name in _LOOKS else _OTHERS.get(name, "")


def _downloaded(words: Sequence[str]) -> str:
    for option in ("-O", "-o", "--output-document", "--output"):
        if option in words[:-1]:
            return words[words.index(option) + 1]
    addresses = [word for word in words if "://" in word]
    return addresses[-1].rstrip("/").rpartition("/")[2].partition("?")[0] if addresses else ""
