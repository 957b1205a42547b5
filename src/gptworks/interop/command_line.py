"""A command as it stands in a document, taken apart. Nothing of it is run by a shell."""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gptworks.errors import UsageError
from gptworks.interop.translation import Command

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
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
LAUNCHERS = dict.fromkeys(("paddle.distributed.fleet.launch", "paddle.distributed.launch"), _PADDLE)
LAUNCHERS |= dict.fromkeys(("torch.distributed.launch", "torch.distributed.run", "torchrun"), _TORCH)


def split(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Command:
    """`words`: as the shell gave them, or one text; `environment`: where $NAME is looked up."""
    is_text = len(words) == 1
    if not is_text:  # a shell has looked up its names; only those set in front of the command are left
        environment = {}
    parts = _words(words[0]) if is_text else list(words)
    # A backslash before the end of a line is what a document breaks its commands with.
    parts = [part for part in (word.strip("\n") for word in parts) if part not in ("", "\\")]
    assigned: dict[str, str] = {}
    while parts and _ASSIGNMENT.match(parts[0]):
        name, _, value = parts.pop(0).partition("=")
        assigned[name] = _expand(value, {**environment, **assigned}, is_text)
    parts = [_expand(part, {**environment, **assigned}, is_text) for part in parts]
    if not parts:
        raise UsageError("run: no command. Needed: gptworks run -- COMMAND as it was written.")
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
        return Command(parts, assigned, name, words_left, launcher, options, folder)
    raise UsageError(f"run: {' '.join(parts)}: no program in it.")


_KEPT = "\ue000"  # stands for a $ that a shell would leave alone


def _words(text: str) -> list[str]:
    """As a shell cuts them; a $ between single quotes, or behind a backslash, is a $."""
    kept: list[str] = []
    quote, escaped = "", False
    for letter in text:
        is_plain = letter == "$" and (quote == "'" or escaped)
        if is_plain and escaped:
            kept.pop()  # the backslash
        kept.append(_KEPT if is_plain else letter)
        if escaped:
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
    try:
        return shlex.split("".join(kept))
    except ValueError as error:
        raise UsageError(f"run: {text.strip()[:60]} ...: {error}.") from None


def _launcher_options(launcher: str, words: list[str]) -> dict[str, str]:
    """Taken off the front of `words`."""
    found = {}
    while words and words[0].startswith("--"):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            found[name] = value
        elif name in LAUNCHERS[launcher]:
            if not words:
                raise UsageError(f"run: {launcher} {name}: no value.")
            found[name] = words.pop(0)
        else:
            found[name] = ""
    return found


def _expand(text: str, environment: Mapping[str, str], needed: bool) -> str:
    """`needed`: a name that is not set is a mistake, not a text."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in environment and not needed:
            return match[0]
        if name not in environment:
            raise UsageError(
                f"run: ${name} is not set. Set it (export {name}=...), or in front of the "
                f"command and all of it in single quotes: gptworks run -- '{name}=... COMMAND'."
            )
        return environment[name]

    return _VARIABLE.sub(value, text).replace(_KEPT, "$")


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
    found: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "-":
            raise UsageError(f"run: {word!r} stands where a flag was expected.")
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
        elif name in several:
            taken = []
            while left and not left[0].startswith("--"):
                taken.append(left.pop(0))
            found[name] = " ".join(taken)
        elif name in switches:
            found[name] = ""
        elif left and not _is_flag(left[0]):
            found[name] = left.pop(0)
        else:
            found[name] = ""
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("--") or bool(re.fullmatch(r"-[A-Za-z]\w*", word))
