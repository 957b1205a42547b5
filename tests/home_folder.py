"""A GPTWORKS_HOME of a test's own, with the C++ functions that are built already: building them takes half a minute."""

from pathlib import Path

from gptworks import model_hub


def own_home(folder: Path) -> str:
    built = model_hub.home() / "kernels"
    built.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(built)
    return str(folder)
