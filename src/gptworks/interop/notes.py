"""What became of each setting of a foreign command."""

from dataclasses import dataclass
from typing import Any, Literal

How = Literal["mapped", "approximated", "ignored"]


@dataclass(frozen=True)
class Note:
    theirs: str  # the key or flag, as it was written
    value: str
    how: How
    ours: str = ""  # such as optim.lr=5e-05
    why: str = ""  # always, unless something of ours was set

    def __str__(self) -> str:
        arrow = f" -> {self.ours}" if self.ours else ""
        value = f"={self.value}" if self.value else ""
        return f"{self.theirs}{value}{arrow} ({self.how}{': ' + self.why if self.why else ''})"


def setting_text(value: Any) -> str:
    """A value as it is written in our YAML and on our command line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(setting_text, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
