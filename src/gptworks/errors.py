"""One exception tree. Every failure a user can cause is one of these; the command line turns it into its exit code.

A message answers, in this order: what failed, where, what was found, what is needed, what to do.
"""

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the same command, started again, goes on


class GPTWorksError(Exception):
    """Something the user can fix. Anything else that escapes is our own fault.

    >>> import gptworks
    >>> try:
    ...     gptworks.Tokenizer.from_pretrained("no/where")
    ... except gptworks.GPTWorksError as error:
    ...     print(str(error)[:25])
    no/where: not a tokenizer
    """

    exit_code = 2


class UsageError(GPTWorksError):
    """A command or function was called with options that do not fit together."""


class ConfigError(GPTWorksError):
    """One or more problems in a configuration, reported together."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  {problem}" for problem in problems))


class TokenizerError(GPTWorksError):
    """A tokenizer that cannot be read, or is not the one the data or the weights were made with."""


class DeviceError(GPTWorksError):
    """A processor or device that cannot do what is asked of it."""


class DataError(GPTWorksError):
    """A corpus or a store that is missing, empty, broken or too small."""


class EmptySplitError(DataError):
    """A split of a dataset, such as the held-out one, that has no text, or not enough for one sample."""


class CheckpointError(GPTWorksError):
    """A checkpoint that cannot be written, read or continued from."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not as it was written: `--resume auto` takes an earlier one instead."""


class TrainingError(GPTWorksError):
    """Training cannot go on: a loss or a gradient is not finite, or a limit was reached."""


class LostRunError(TrainingError):
    """A run that something outside of it has ended: a killed rank, a machine that is gone or has not come, a wait that
    took too long. Started again with `--resume auto` it goes on from its last checkpoint."""

    exit_code = TRY_AGAIN


class GenerationError(GPTWorksError):
    """A prompt or a setting that generation cannot honour."""


class VerificationError(GPTWorksError):
    """Two ways of computing the same gave different numbers."""


def first_line(error: Exception) -> str:
    """What another library says in many lines, for a message of ours; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
