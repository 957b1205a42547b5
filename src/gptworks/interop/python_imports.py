"""Python programs of other systems: which of their import lines to change, so that they run here."""

import re
from pathlib import Path

_MINDFORMERS = re.compile(r"^\s*from\s+mindformers\b(.*)$")
_WHOLE = re.compile(r"^\s*import\s+mindformers\s*$")
_FLEETX = re.compile(r"^\s*from\s+[\w.]+\s+import\s+.*\bGPTGenerationModule\b")
_PADDLE = re.compile(r"^\s*import\s+paddle\s*$")


def changes(text: str) -> list[str]:
    """A line for each import that has a name here: where it stands, what it is, what it becomes."""
    is_fleetx = "GPTGenerationModule" in text
    changed = []
    for number, line in enumerate(text.splitlines(), 1):
        became = ""
        if of_mindformers := _MINDFORMERS.match(line):
            became = f"from gptworks.compat.mindformers{of_mindformers[1]}"
        elif _WHOLE.match(line):
            became = "from gptworks.compat import mindformers"
        elif _FLEETX.match(line):
            became = "from gptworks.compat.fleetx import GPTGenerationModule"
        elif is_fleetx and _PADDLE.match(line):
            became = "from gptworks.compat import paddle"
        if became:
            changed.append(f"line {number}: {line.strip()}  ->  {became.strip()}")
    return changed


def advice(program: Path) -> str:
    """What to do with a Python file of another system's imports; empty where there are none, or it is not here."""
    if program.suffix != ".py" or not program.is_file():
        return ""
    changed = changes(program.read_text(encoding="utf-8", errors="replace"))
    if not changed:
        return ""
    listed = "".join(f"\n  {each}" for each in changed)
    return (
        f"a Python program of another system. It runs here with other imports: change{listed}\nthen: python {program}"
    )
