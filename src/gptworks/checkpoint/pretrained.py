"""Weights for use: from a run, a step of it, or a Hugging Face GPT-2 folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from gptworks.checkpoint import folder as folders
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.formats import dcp, huggingface
from gptworks.config.load import from_dict
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, TokenizerError
from gptworks.model import GPT
from gptworks.parallel.apply import WeightSource, build
from gptworks.parallel.launch import World, pick_device
from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.sentencepiece import model_in


@dataclass(frozen=True)
class Pretrained:
    """A folder with weights, opened: its shape is known, its tensors are read when asked for."""

    folder: Path
    model: ModelConfig
    weights: WeightSource
    tokenizer: Tokenizer | None

    @classmethod
    def open(cls, name_or_path: str | Path) -> "Pretrained":
        path = Path(name_or_path)
        if not path.is_dir() and path.name not in (folders.LATEST, folders.BEST):
            raise CheckpointError(
                f"{path}: no such folder. Needed: a run folder of gptworks, or a Hugging Face GPT-2 folder."
            )
        if (path / "config.json").is_file():
            return cls._portable(path)
        step = folders.find(path)
        if (step / folders.PORTABLE / "config.json").is_file():
            return cls._portable(step / folders.PORTABLE)
        manifest = manifests.read(step)
        model = from_dict(manifest.config, str(step)).model
        return cls(step, model, _StateWeights(step / folders.STATE), _tokenizer_in(step / folders.TOKENIZER))

    @classmethod
    def _portable(cls, path: Path) -> "Pretrained":
        model = huggingface.read_config(path)
        return cls(path, model, huggingface.Weights(path, model), _tokenizer_in(path))

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(
                f"{self.folder}: has no tokenizer. Put tokenizer.json (or vocab.json and merges.txt, "
                "or a sentencepiece .model) beside the weights."
            )
        return self.tokenizer


def _tokenizer_in(folder: Path) -> Tokenizer | None:
    """Weights alone are fine; whoever needs a tokenizer asks for it. One that is there must be readable."""
    names = ("tokenizer.json", "vocab.json", "encoder.json")
    is_there = any((folder / name).is_file() for name in names) or model_in(folder)
    return Tokenizer.from_pretrained(folder) if is_there else None


class _StateWeights:
    """The parameters inside a training checkpoint."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        target = {f"model.{name}": torch.empty(shape)}
        dcp.load_into(self.state, target)
        return target[f"model.{name}"]


class PretrainedGPT(GPT):
    """The model with its weights and tokenizer; exported as `gptworks.GPT`.

    >>> model = gptworks.GPT.from_pretrained("runs/quickstart")   # doctest: +SKIP
    >>> logits = model(torch.tensor([model.tokenizer.encode("Hello")]))   # doctest: +SKIP
    """

    tokenizer: Tokenizer | None = None

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Self:
        """From a run folder, one of its steps, or a Hugging Face GPT-2 folder; in evaluation mode."""
        opened = Pretrained.open(name_or_path)
        model = build(opened.model, World(pick_device(device)), dtype, opened.weights, model_type=cls)
        if isinstance(opened.weights, huggingface.Weights):
            opened.weights.require_all_used()
        assert isinstance(model, cls)
        model.tokenizer = opened.tokenizer
        return model.eval()
