"""FleetX's `GPTGenerationModule`: made of its YAML, filled with a state of Paddle's names, asked for text."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptworks.checkpoint.formats import pdparams
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import fleetx
from gptworks.config.load import flatten
from gptworks.errors import UsageError
from gptworks.generate.engine import generate
from gptworks.interop.fleetx import translate_values

__all__ = ["GPTGenerationModule"]


class GPTGenerationModule:
    """`configs`: the sections of a FleetX YAML, as a dictionary."""

    def __init__(self, configs: Mapping[str, Any]) -> None:
        values = translate_values(flatten(dict(configs)), "configs").config
        self.settings = {key.partition(".")[2]: values[key] for key in values if key.startswith("generate.")}
        self.model = _Network(values["model.num_heads"])

    def eval(self) -> "GPTGenerationModule":
        """Text is always generated in evaluation mode."""
        return self

    def generate(self, input_text: str) -> list[str]:
        """What follows the text, once for each of Generation.num_return_sequences."""
        if self.model.gpt is None:
            raise UsageError("GPTGenerationModule: no weights yet. Call module.model.set_state_dict(...) first.")
        return generate(self.model.gpt, input_text, **self.settings)


class _Network:
    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads  # the one number that no shape tells
        self.gpt: PretrainedGPT | None = None

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / fleetx.FILE
            pdparams.write(file, {name: _stored(value) for name, value in state.items()})
            shape = {"num_heads": self.num_heads}
            self.gpt = PretrainedGPT.from_pretrained(file, tokenizer="gpt2", shape=shape).eval()


def _stored(value: Any) -> LazyTensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    return LazyTensor(tensor.shape, tensor.dtype, lambda: tensor)
