"""One line of the doctor's report."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

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


Check = Callable[[], list[Finding]]


def examine(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """All of them: what one runs into is its finding, and does not keep the others from being looked at."""
    findings = []
    for what, check in checks:
        try:
            findings += check()
        except GPTWorksError as error:  # says itself what to do
            findings += problem(what, "not usable", str(error))
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            findings += problem(what, said, f"Mend or install anew what {what} stands for.")
    return findings
