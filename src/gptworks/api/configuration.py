"""The configuration of a run, as the command line would read it."""

from collections.abc import Iterable
from pathlib import Path

from gptworks.config.load import load_with_origins
from gptworks.config.schema import RunConfig
from gptworks.data.store import vocabulary_of


def load_config(path: str | Path | None = None, *, preset: str = "", overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of a run from a YAML file, a preset and `a.b=c` overrides.

    The vocabulary is that of the data where none of them says it.

    >>> config = load_config(preset="gpt2", overrides=["optim.lr=1e-4"])
    >>> config.model.num_layers, config.optim.lr
    (12, 0.0001)
    """
    return load_with_origins(path, preset=preset, overrides=overrides, vocabulary_of=vocabulary_of).config
