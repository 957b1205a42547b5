"""Weights for use: from a run, a step of it, a Hugging Face GPT-2 folder, or the name of one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from gptworks import names
from gptworks.checkpoint import folder as folders
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.formats import dcp
from gptworks.checkpoint.systems import huggingface
from gptworks.config.load import from_dict
from gptworks.config.schema import ModelConfig
from gptworks.errors import TokenizerError
from gptworks.model import GPT
from gptworks.model.inference import require_kind, store_weights
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
    def open(cls, name_or_path: str | Path, *, download: bool | None = None) -> "Pretrained":
        """`download`: whether a name that is not on this machine may be fetched; None = as $GPTWORKS_DOWNLOAD says."""
        path = Path(name_or_path)
        if path.is_dir() or path.name in (folders.LATEST, folders.BEST):
            return cls._open_folder(path)
        opened = cls._open_folder(names.resolve(str(name_or_path), download=download))
        if opened.tokenizer is None and _is_gpt2(str(name_or_path), opened.model):
            return replace(opened, tokenizer=Tokenizer.from_pretrained("gpt2"))
        return opened

    @classmethod
    def _open_folder(cls, path: Path) -> "Pretrained":
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
        opened = huggingface.open(path, {}).require_whole()
        return cls(path, opened.model, opened, _tokenizer_in(path))

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


def _is_gpt2(name: str, model: ModelConfig) -> bool:
    """Whether GPT-2's vocabulary, which comes with the installation, is that of the weights."""
    return name in names.GPT2_NAMES and model.vocab_size >= 50257


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

    Called with token ids [rows, tokens] it gives logits [rows, tokens, vocabulary], in training as in evaluation mode.

    >>> model = gptworks.GPT.from_pretrained("runs/quickstart")   # doctest: +SKIP
    >>> logits = model(torch.tensor([model.tokenizer.encode("Hello")]))   # doctest: +SKIP
    >>> loss = model.loss(torch.tensor([model.tokenizer.encode("Hello world")]))   # doctest: +SKIP
    """

    tokenizer: Tokenizer | None = None
    folder: Path | None = None  # where the weights came from

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: str = "fp32",
        download: bool | None = None,
    ) -> Self:
        """From a run folder, one of its steps, a Hugging Face GPT-2 folder, or a name; in evaluation mode.

        A name such as gpt2, gpt2-medium-en or openai-community/gpt2-xl is looked for in $GPTWORKS_HOME/models and in
        the Hugging Face cache. It is downloaded only with `download=True` or GPTWORKS_DOWNLOAD=1.

        dtype: what activations are computed in. weights: bf16 or int8 keep the matrices in half or a quarter of the
        memory, which is what generation on a CPU waits for; such a model predicts, and cannot be trained or saved.

        >>> model = gptworks.GPT.from_pretrained("gpt2", device="auto", dtype=torch.bfloat16)   # doctest: +SKIP
        """
        require_kind(weights)
        opened = Pretrained.open(name_or_path, download=download)
        model = build(opened.model, World(pick_device(device)), dtype, opened.weights, model_type=cls)
        assert isinstance(model, cls)
        model.tokenizer, model.folder = opened.tokenizer, opened.folder
        store_weights(model, weights)
        return model.eval()
