"""Errors in the words of who reads them: a Python program has keywords where a command line has options.

Messages name options (`--window slide`). What Python programs call is marked with `in_python_words`, which says
`window="slide"` instead, unless it is the command line that calls.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from gptworks.errors import ConfigError, GPTWorksError

_is_command_line: ContextVar[bool] = ContextVar("is_command_line", default=False)

# Options that are keywords in Python; the others belong to commands, and stay.
_KEYWORDS = (
    "append-eod|batch-size|data|device|download|format|limit|model|out|overlap|per-document|protocol|resume|row-length|"
    "seq-len|shares|split|strict|task|tokenizer|train-tokenizer|weights|window|workers"
)
_VALUES = "auto|never|cpu|cuda|mps|slide|refuse|held-out|test|train|all|fp32|bf16|int8"
_SWITCHES = {"append_eod", "download", "strict"}
_OPTION = re.compile(
    rf"(?<![\w-])--({_KEYWORDS})(?![\w-])(?:[ =]((?<=--task )\w+|(?<=--format )[\w-]*\w|{_VALUES})(?![\w-]))?"
)
_QUOTED = re.compile(r"(`[^`]*`)")  # a command that is shown stays as it is
_KEY = re.compile(r"(?<![\w`-])--key(?: ([\w.-]*\w)(?= takes)|(?=[,.]))")
# A setting of generation: what a line is about, one with its value, or by its whole name.
_SETTING = re.compile(r"(?m)(?<![\w.-])(?:(?P<begin>^\s*)?generate\.)?(?P<name>[a-z_]+)(?P<value>: (?=[\w-]))?")
# A key that is meant by an unknown keyword. Some have a keyword of the Trainer.
_OWN_KEYWORDS = {
    "data.path": "train_dataset",
    "data.held_out_path": "eval_dataset",
    "run.out": "out",
    "init.checkpoint": "model",
}
_MEANT = re.compile(r"'(\w+)\.(\w+)'(?=[^\n]*\(argument\))")
_GENERATE = re.compile(r"(?<![\w.])generate\.(?=[a-z_]+\b)")

P = ParamSpec("P")
R = TypeVar("R")


def reworded(text: str, *, without_section: bool = False) -> str:
    """`without_section`: settings of generation are keywords by themselves.

    >>> reworded("Ask for less, or let the window slide (--window slide). See `gptworks eval --split all`.")
    'Ask for less, or let the window slide (window="slide"). See `gptworks eval --split all`.'
    >>> reworded("no column 'text'. Choose one with --key, or several with commas between.")
    'no column \'text\'. Choose one with key="NAME", or several with commas between.'
    >>> reworded("generate.top_k: 70 is above the vocabulary; choose another --out.", without_section=True)
    'top_k: 70 is above the vocabulary; choose another out=.'
    """

    def keyword(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        if name in _SWITCHES:
            return f"{name}=True"
        return f'{name}="{match[2]}"' if match[2] else f"{name}="

    def meant(match: re.Match[str]) -> str:
        own = _OWN_KEYWORDS.get(f"{match[1]}.{match[2]}")
        return f"{own}=..." if own else f"{match[1]}={{'{match[2]}': ...}}"

    text = _MEANT.sub(meant, _KEY.sub(lambda match: f'key="{match[1] or "NAME"}"', text))
    pieces = _QUOTED.split(text)
    text = "".join(piece if number % 2 else _OPTION.sub(keyword, piece) for number, piece in enumerate(pieces))
    return _GENERATE.sub("", text) if without_section else text


@contextmanager
def command_line() -> Iterator[None]:
    """While the command line runs, options are called what they are."""
    token = _is_command_line.set(True)
    try:
        yield
    finally:
        _is_command_line.reset(token)


@contextmanager
def in_option_words(settings: Collection[str]) -> Iterator[None]:
    """Errors of a command that has settings of generation as options: `--top-k` where the section says `top_k`."""

    def option(match: re.Match[str]) -> str:
        name, value, begin = match["name"], match["value"] or "", match["begin"]
        if name not in settings or not (value or "generate." in match[0]):
            return match[0]
        return f"{begin or ''}--{name.replace('_', '-')}" + (value if begin is not None else value.lstrip(":"))

    try:
        yield
    except GPTWorksError as error:
        _say_otherwise(error, lambda text: _SETTING.sub(option, text))
        raise


def in_python_words(function: Callable[P, R], *, without_section: bool = False) -> Callable[P, R]:
    """A function whose errors name keywords."""

    @functools.wraps(function)
    def called(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except GPTWorksError as error:
            if not _is_command_line.get():
                _reword(error, without_section)
            raise

    return called


def generation_in_python_words(function: Callable[P, R]) -> Callable[P, R]:
    """`in_python_words` for functions that take the settings of generation as keywords."""
    return in_python_words(function, without_section=True)


def _reword(error: GPTWorksError, without_section: bool) -> None:
    _say_otherwise(error, functools.partial(reworded, without_section=without_section))


def _say_otherwise(error: GPTWorksError, reword: Callable[[str], str]) -> None:
    error.args = tuple(reword(each) if isinstance(each, str) else each for each in error.args)
    if isinstance(error, ConfigError):
        error.problems = [reword(problem) for problem in error.problems]
