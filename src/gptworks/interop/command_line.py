"""A command as it stands in a document, taken apart. Nothing of it is run by a shell."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gptworks.errors import UsageError
from gptworks.interop import shell_block
from gptworks.interop.translation import Command

_PYTHONS = re.compile(r"(?:.*/)?python[0-9.]*")
_SHELLS = {"sh", "bash", "source", "."}
# Launchers of other systems -> their options that take a value. What follows the options is the program.
_PADDLE = {
    "--gpus", "--devices", "--log_dir", "--ips", "--nnodes", "--nproc_per_node", "--master", "--rank", "--xpus",
    "--npus", "--run_mode", "--job_id", "--log_level", "--selected_gpus", "--selected_devices", "--max_restart",
    "--elastic_level", "--elastic_timeout", "--auto_tuner_json",
}  # fmt: skip
_TORCH = {
    f"--{name}"
    for spelled in (
        "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint",
        "rdzv_id", "rdzv_conf", "max_restarts", "monitor_interval", "start_method", "role", "log_dir", "redirects",
        "tee", "local_addr",
    )
    for name in (spelled, spelled.replace("_", "-"))
}  # fmt: skip
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212\uff0d"  # that editors and pages put in the place of -
LAUNCHERS = dict.fromkeys(("paddle.distributed.fleet.launch", "paddle.distributed.launch"), _PADDLE)
LAUNCHERS |= dict.fromkeys(("torch.distributed.launch", "torch.distributed.run", "torchrun"), _TORCH)


def split(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Command:
    """One command, as words from a shell or as one text. `environment`: where $NAME is looked up. No script is read."""
    if len(words) == 1:
        started = list(shell_block.commands(words[0], "command", environment, folder, lambda name, where: None))
    else:
        started = list(shell_block.of_words(words, environment, folder, lambda name, where: None))
    if len(started) != 1:
        raise UsageError(f"run: {len(started)} commands in {' '.join(words)[:60]!r}. Needed: one.")
    return take_apart(started[0].words, started[0].environment, started[0].folder)


def take_apart(parts: Sequence[str], environment: Mapping[str, str], folder: Path) -> Command:
    """Into launcher, program and arguments. `environment`: what was set for it."""
    words_left = list(parts)
    launcher, options = "", {}
    while words_left:
        word = words_left.pop(0)
        name = word
        if _PYTHONS.fullmatch(word):
            while words_left and words_left[0] in ("-u", "-B", "-O"):
                words_left.pop(0)
            if words_left and words_left[0] == "-m":
                words_left.pop(0)
            if not words_left:
                raise UsageError(f"run: {' '.join(parts)}: python without a program.")
            name = words_left.pop(0)
        elif Path(word).name in _SHELLS and words_left:
            name = words_left.pop(0)
        if name in LAUNCHERS or Path(name).name in LAUNCHERS:
            launcher = name if name in LAUNCHERS else Path(name).name
            options = _launcher_options(launcher, words_left)
            if words_left and words_left[0] == "-m":
                words_left.pop(0)
            if not words_left:
                raise UsageError(f"run: {launcher}: no program after its options.")
            if _PYTHONS.fullmatch(words_left[0]):
                continue
            name = words_left.pop(0)
        return Command(list(parts), dict(environment), name, words_left, launcher, options, folder)
    raise UsageError(f"run: {' '.join(parts)}: no program in it.")


def _launcher_options(launcher: str, words: list[str]) -> dict[str, str]:
    """Taken off the front of `words`."""
    flags = {}
    while words and words[0].startswith("--"):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            flags[name] = value
        elif name in LAUNCHERS[launcher]:
            if not words:
                raise UsageError(f"run: {launcher} {name}: no value.")
            flags[name] = words.pop(0)
        else:
            flags[name] = ""
    return flags


def emptied(words: Sequence[str], command: Command) -> list[str]:
    """`NAME=x program --out y/$NAME` typed into a shell: it has looked up $NAME before NAME was set."""
    if len(words) == 1 or not command.environment:
        return []
    name = next(iter(command.environment))
    options = [*command.launcher_options.values(), *command.arguments]
    return [
        f"{word} looks as if your shell had put nothing in the place of ${name}, which it looks up before {name}= "
        "counts. Put the whole command in single quotes, or export it first."
        for word in options
        if (word.endswith("/") or "//" in word) and "://" not in word
    ][:1]


def flags(words: Sequence[str], switches: Collection[str], *, several: Collection[str] = ()) -> dict[str, str]:
    """--name value pairs in text; of a switch the value is empty. `several`: flags that take words up to the next."""
    flags: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "-":
            hint = (
                f" It begins with U+{ord(word[0]):04X}, which is not the - of a flag."
                if word and word[0] in _DASHES
                else ""
            )
            raise UsageError(f"run: {word!r} stands where a flag was expected.{hint}")
        name, equals, value = word.partition("=")
        if equals:
            flags[name] = value
        elif name in several:
            taken = []
            while left and not left[0].startswith("--"):
                taken.append(left.pop(0))
            flags[name] = " ".join(taken)
        elif name in switches:
            flags[name] = ""
        elif left and not _is_flag(left[0]):
            flags[name] = left.pop(0)
        else:
            flags[name] = ""
    return flags


def _is_flag(word: str) -> bool:
    return word.startswith("--") or bool(re.fullmatch(r"-[A-Za-z]\w*", word))
