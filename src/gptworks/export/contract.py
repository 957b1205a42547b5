"""What a target of this package offers, and what is handed in and out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from gptworks.architecture import Known
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.systems.contract import Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import UsageError
from gptworks.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """What is exported: our tensors, in the type that is wanted, with as many words as the tokenizer has."""

    model: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: Tokenizer
    notes: list[str] = field(default_factory=list)  # what a user should know

    def weights(self) -> Weights:
        words = self.tokenizer
        return Weights(
            self.model, self.tensors, words.eod_id, tokenizer=lambda: words, notes=self.notes, bos_id=words.bos_id
        )


@dataclass(frozen=True)
class Written:
    """What a target says of the files it made."""

    parameters: list[dict[str, Any]]  # name, shape, dtype
    inputs: dict[str, str] = field(default_factory=dict)  # name -> type and shape, in words
    outputs: dict[str, str] = field(default_factory=dict)


class Runner(Protocol):
    def continue_greedily(self, tokens: Sequence[int], max_new_tokens: int, eod_id: int | None) -> list[int]:
        """The new tokens; the end of document, if it comes, is the last of them."""


class Target(Protocol):
    """A module of this package."""

    NAME: str  # as in --to
    TITLE: str  # for people
    WEIGHTS: tuple[str, ...]  # kinds of --weights, the usual one first
    KNOWN: Known  # the variants of GPT-2 that it computes
    RUNTIME: tuple[str, ...]  # what a user of the folder installs beside a tokenizer

    def require(self) -> None:
        """Stop unless all that writing needs is installed."""

    def write(self, folder: Path, stem: str, source: Source, weights: str) -> Written:
        """Into a folder that exists. `stem` names those files whose names are ours to choose."""

    def script(self, stem: str, source: Source) -> tuple[list[str], list[str]]:
        """Parts of run.py: its imports, and the lines that make `new`, a list of ids, from `ids` and `count`."""

    def recognise(self, folder: Path) -> Path | None:
        """The main file, if the folder looks like one of ours."""

    def open(self, file: Path, model: ModelConfig) -> Runner:
        """With its own runtime."""


def import_or_explain(module: str, what_for: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise UsageError(f'{what_for} needs {name}, which is not installed: pip install "gptworks[{extra}]"') from None


def described(name: str, shape: Sequence[int], dtype: object) -> dict[str, Any]:
    """A row of the list of parameters."""
    return {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


def array(stored: LazyTensor) -> Any:
    """As numpy, in fp32."""
    return stored.read().to(torch.float32).contiguous().numpy()
