"""Where the models and corpora are."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(os.environ.get("GPTWORKS_REAL_MODELS", ROOT / "runs" / "real-models"))
CORPORA = Path(os.environ.get("GPTWORKS_CORPORA", ROOT.parent / "shared" / "data" / "corpora"))


def needed(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path} is not there: make real-models")
    return path
