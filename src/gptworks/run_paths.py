"""The names in a run folder, DIR/{config.yaml, checkpoints/step-.../manifest.json, latest, best}, and what is one."""

from pathlib import Path

CONFIG, CHECKPOINTS, MANIFEST = "config.yaml", "checkpoints", "manifest.json"
LATEST, BEST = "latest", "best"  # files that point to a checkpoint


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
