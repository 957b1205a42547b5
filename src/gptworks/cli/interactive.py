"""gptworks generate --interactive: a prompt per line, commands with a slash."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from gptworks.errors import GPTWorksError
from gptworks.python_words import reworded

_HELP = """\
A line is a prompt; the model continues it. Lines that begin with / are commands:
  /show                 the settings
  /set KEY VALUE        change one, such as /set temperature 0.7 or /set stop ["\\n"];
                        those that need each other at once: /set strategy beam / num_beams 4
  /reset                the settings of the start
  /help                 this
  /quit                 leave (so does Ctrl-D; Ctrl-C ends a text that is too long)
A prompt that begins with a slash is written with two of them."""


def converse(engine: Any, settings: dict[str, Any]) -> int:
    """Until /quit or the end of the input. A mistake is told and changes nothing."""
    start, now = dict(settings), dict(settings)
    answers = 0  # since the seed was set: each draws anew, and the same session gives the same texts
    if sys.stdin.isatty():
        print("Type a prompt, or /help.")
    for line in _lines():
        command, _, rest = line.strip().partition(" ")
        try:
            if command == "/quit":
                return 0
            if not line.strip():
                continue
            if command.startswith("/") and not command.startswith("//"):
                now = _obey(command, rest.strip(), now, start)
                if command == "/reset" or (command == "/set" and "seed" in rest.split()):
                    answers = 0
            else:
                _answer(engine, line.removeprefix("/") if line.startswith("//") else line, now, answers)
                answers += 1
        except GPTWorksError as error:
            sys.stdout.flush()
            print(f"error: {reworded(str(error), without_section=True)}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print(flush=True)
    return 0


def _lines() -> Iterator[str]:
    """With history and editing in a terminal, plainly through a pipe."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with contextlib.suppress(ImportError):  # not on every system; input() uses it once it is there
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _obey(command: str, rest: str, now: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    """The settings after a command."""
    from gptworks.config.yaml_text import parse_scalar
    from gptworks.errors import UsageError
    from gptworks.generate.engine import settings_of

    if command == "/set":
        pairs = [pair.strip().partition(" ") for pair in rest.split(" / ")]
        for key, _, value in pairs:
            if not value.strip():
                raise UsageError(
                    f"/set {' '.join([key, value]).strip()}: needs a key and a value, such as /set temperature 0.7. "
                    "Several at once: /set strategy beam / num_beams 4."
                )
        changed = now | {key: parse_scalar(value.strip()) for key, _, value in pairs}
        settings = settings_of(changed)
        for key, _, _ in pairs:
            print(f"{key}: {_value_text(getattr(settings, key))}", flush=True)
        return changed
    if command == "/reset":
        now = dict(start)
    elif command == "/help":
        print(_HELP, flush=True)
        return now
    elif command != "/show":
        raise UsageError(f"{command}: no such command. Commands: /show, /set, /reset, /help, /quit.")
    for key, value in settings_of(now):
        print(f"{key}: {_value_text(value)}", flush=True)
    return now


def _value_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _answer(engine: Any, prompt: str, settings: dict[str, Any], earlier: int) -> None:
    from gptworks.cli.generate_output import show_stream, tell_fewer
    from gptworks.generate.engine import can_stream, settings_of

    cfg = settings_of(settings)
    settings = settings | {"seed": cfg.seed + earlier}
    tell_fewer(engine, [prompt], settings)
    if can_stream(cfg):
        show_stream(engine, prompt, settings)
        return
    for generation in engine.generations(prompt, **settings):
        print(prompt + generation.text, flush=True)
