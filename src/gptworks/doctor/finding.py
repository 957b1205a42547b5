"""One line of the doctor's report."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gptworks import child_process
from gptworks.errors import GPTWorksError, first_line


@dataclass(frozen=True)
class Finding:
    what: str
    state: Literal["ok", "note", "problem"]  # a note is worth knowing and hinders nothing
    found: str
    fix: str = ""  # always, of a problem


def ok(what: str, found: str) -> list[Finding]:
    return [Finding(what, "ok", found)]


def note(what: str, found: str, fix: str = "") -> list[Finding]:
    return [Finding(what, "note", found, fix)]


def problem(what: str, found: str, fix: str) -> list[Finding]:
    return [Finding(what, "problem", found, fix)]


_SECONDS = 600.0  # of all checks together; a driver may hang
Check = Callable[[], list[Finding]]


def examine(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """All of them, in a child: what one runs into or dies of is its finding, and does not keep the others from being
    looked at."""
    named = list(checks)
    findings = []
    for (what, _), outcome in zip(named, child_process.run_each(named, _look, _SECONDS), strict=True):
        if outcome.failure:
            findings += problem(what, outcome.failure, f"Fix or reinstall what {what} names.")
        else:
            findings += [Finding(**each) for each in outcome.answers[0]]
    return findings


def _look(named: tuple[str, Check]) -> list[dict[str, str]]:
    what, check = named
    try:
        findings = check()
    except GPTWorksError as error:  # says itself what to do
        findings = problem(what, "not usable", str(error))
    except Exception as error:
        message = f"{type(error).__name__}: {first_line(error)}"
        findings = problem(what, message, f"Fix or reinstall what {what} names.")
    return [vars(each) for each in findings]
