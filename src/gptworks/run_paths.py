"""The names in a run folder, and what is one. docs/reference/run-folder.md says what each holds."""

from pathlib import Path

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
METRICS, NONFINITE, EVENTS = "metrics.jsonl", "nonfinite.jsonl", "events.jsonl"
TEXTS, EVALUATIONS = "texts.jsonl", "evaluations.jsonl"
LOSS_CURVE, REPORT = "loss.svg", "report.html"
LOGS = "logs"  # of the ranks, begun by the launcher before the run itself
TRACKERS, FOREIGN_NAMES = "trackers.json", "foreign_names.json"
INPUTS, LOCK = ".inputs", ".lock"
LATEST, BEST = "latest", "best"  # files that point to a checkpoint
CHECKPOINTS = "checkpoints"
# In a checkpoint.
MANIFEST, STATE, PORTABLE, TOKENIZER = "manifest.json", "state", "portable", "tokenizer"


def step_name(step: int) -> str:
    """What the checkpoint of a step is called, in the folder of checkpoints."""
    return f"step-{step:08d}"


def was_begun(path: Path) -> bool:
    """A run of ours began there, whether or not it came to a checkpoint."""
    return (path / ENVIRONMENT).is_file()


def is_run(path: Path) -> bool:
    """A run folder with checkpoints."""
    return (path / CHECKPOINTS).is_dir()


def is_checkpoint(path: Path) -> bool:
    """One checkpoint of a run."""
    return (path / MANIFEST).is_file()


def is_pointer(path: Path) -> bool:
    return path.name in (LATEST, BEST) and path.is_file()


def is_ours(path: Path) -> bool:
    """A run, a checkpoint of one, or what points to it."""
    return is_run(path) or is_checkpoint(path) or is_pointer(path)


def run_of(path: Path) -> Path:
    """The run folder that is meant by itself or by its folder of checkpoints."""
    return path.parent if path.name == CHECKPOINTS else path
