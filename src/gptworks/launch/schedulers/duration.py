"""A time limit as people write it, in seconds."""

import re

from gptworks.errors import UsageError

DAY, HOUR, MINUTE = 86400, 3600, 60
_NEEDED = "such as 90m, 12h, 1d12h, 12:00:00 or 1-12:00:00 (days-hours:minutes:seconds)"


def parse_duration(text: str, option: str) -> int:
    """90m, 12h, 1d12h, 45s; HH:MM:SS; D-HH, D-HH:MM and D-HH:MM:SS as Slurm writes them.

    A bare number and A:B are refused: Slurm reads minutes and minutes:seconds, most people something else.
    """
    if re.fullmatch(r"\d+", text):
        raise UsageError(f"{option}: {text!r} has no unit. Needed: {text}m for minutes, {text}h for hours.")
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        raise UsageError(
            f"{option}: {text!r} may be hours and minutes, or minutes and seconds. Needed: {text}:00 or "
            f"{match[1]}m{match[2]}s."
        )
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text) if text else None
    clock = re.fullmatch(r"()(\d+):([0-5]\d):([0-5]\d)", text)
    dated = re.fullmatch(r"(\d+)-(\d+)(?::([0-5]?\d))?(?::([0-5]?\d))?", text)
    match = units or clock or dated
    if not match:
        raise UsageError(f"{option}: {text!r} is not a time. Needed: {_NEEDED}.")
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    total = days * DAY + hours * HOUR + minutes * MINUTE + seconds
    if total == 0:
        raise UsageError(f"{option}: {text!r} is zero seconds. Needed: {_NEEDED}.")
    return total


def slurm_duration(seconds: int) -> str:
    """D-HH:MM:SS, which cannot be misread."""
    days, rest = divmod(seconds, DAY)
    hours, rest = divmod(rest, HOUR)
    return f"{days}-{hours:02}:{rest // MINUTE:02}:{rest % MINUTE:02}"
