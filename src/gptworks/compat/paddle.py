"""The two names of Paddle that FleetX's lines for a checkpoint use; arrays are numpy's, which have `astype` too."""

from pathlib import Path

import numpy as np

from gptworks.checkpoint.formats import pdparams

float32, float16 = np.float32, np.float16


def load(path: str | Path) -> dict[str, np.ndarray]:
    """The tensors of a .pdparams file by name. Nothing in the file is executed."""
    return {name: stored.read().numpy() for name, stored in pdparams.read(Path(path)).tensors.items()}
