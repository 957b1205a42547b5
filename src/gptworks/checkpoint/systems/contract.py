"""What a module of this package offers, and what is handed in and out of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gptworks import tokenizer_files
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import Matched
from gptworks.config.load import flatten, from_dict
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, ConfigError
from gptworks.parallel.slices import Region, size_of
from gptworks.pickle_values import brief
from gptworks.tokenizer import Tokenizer, nanogpt_meta
from gptworks.tokenizer.sentencepiece import model_in

EXACT = 1e-5  # the tolerance of a format that keeps the numbers: sums may be taken in another order


@dataclass(frozen=True)
class Opened:
    """A checkpoint of some system: its shape is known, its tensors (our names, our order) are read when asked for.

    It is also the `WeightSource` a model is filled from.
    """

    path: Path
    system: str
    model: ModelConfig
    matched: Matched
    about: dict[str, Any] = field(default_factory=dict)  # for people: step, layout, QKV order, where numbers came from
    files: list[Path] = field(default_factory=list)  # all that hold weights
    tokenizer: Path | None = None  # folder in which the files of one may lie
    embedded_tokenizer: Callable[[], Tokenizer] | None = None  # the tokenizer inside the file itself
    eod_id: int | None = None
    bos_id: int | None = None  # None: nobody says
    remarks: list[str] = field(default_factory=list)  # what a user should know: ignored tensors, unknown classes
    conflicts: dict[str, object] = field(default_factory=dict)  # what the files say and the user stated otherwise

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        return self.matched.tensors

    @property
    def notes(self) -> list[str]:
        """The remarks, and every number of the user's that contradicts the files."""
        return [
            *self.remarks,
            *(
                f"model.{name} is {getattr(self.model, name)} as stated with -o, and the checkpoint says {stored}"
                for name, stored in self.conflicts.items()
            ),
        ]

    def require_whole(self) -> "Opened":
        """Every tensor is there, none is left over, all have the right shape."""
        problems = []
        if self.matched.missing:
            problems.append(f"{len(self.matched.missing)} missing: {_some(self.matched.missing)}")
        if self.matched.unexpected:
            problems.append(
                f"{len(self.matched.unexpected)} that have no place in the model: {_some(self.matched.unexpected)}"
            )
        problems += self.matched.misshapen[:5]
        if len(self.matched.misshapen) > 5:
            problems.append(f"and {len(self.matched.misshapen) - 5} more shapes")
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(
                f"{self.path}: its tensors are not those of a {self.system} GPT with {self.model.num_layers} layers "
                f"of {self.model.hidden_size}:\n{listed}\nIt belongs to another model, or to another version."
            )
        return self

    def open_tokenizer(self) -> Tokenizer | None:
        """None where there is none; one that is there must be readable."""
        return self.embedded_tokenizer() if self.embedded_tokenizer is not None else tokenizer_in(self.tokenizer)

    def tensor(self, name: str, shape: torch.Size, region: Region | None = None) -> Tensor:
        if name not in self.tensors:
            self.require_whole()
        stored = self.tensors[name]
        if stored.shape != shape:
            raise CheckpointError(f"{self.path}: '{name}' has shape {list(stored.shape)}, needed {list(shape)}.")
        tensor = stored.region(region)
        needed = shape if region is None else size_of(region)
        if tensor.shape != needed:
            raise CheckpointError(f"{self.path}: '{name}' gives {list(tensor.shape)}, needed {list(needed)}.")
        return tensor


@dataclass(frozen=True)
class Weights:
    """What a writer gets: our tensors and what else a checkpoint can say."""

    model: ModelConfig
    tensors: Mapping[str, LazyTensor]
    eod_id: int | None = None
    step: int = 0
    tokenizer: Callable[[], Tokenizer | None] = lambda: None
    notes: list[str] = field(default_factory=list)  # a writer adds what a user should know
    bos_id: int | None = None  # None: the end of a document begins one too, as in GPT-2


@dataclass(frozen=True)
class SplitSpec:
    """How the written checkpoint is split. Systems that keep a model whole refuse anything but one."""

    tp: int = 1
    pp: int = 1


class System(Protocol):
    """A module of this package."""

    NAME: str  # as in --to
    TITLE: str  # for people, one line
    CUTS: bool  # whether tp and pp splits can be written
    SUFFIX: str  # of the one file that is written, or "" for a folder
    TOLERANCE: float  # how far logits of what it writes may be from those of what it was given, x the largest

    def recognise(self, path: Path) -> bool:
        """Whether this looks like one of ours. Cheap: names in a folder, first bytes of a file."""

    def open(self, path: Path, overrides: Mapping[str, object]) -> Opened:
        """`overrides`: numbers of the model section that the user states (-o model.num_heads=16)."""

    def write(self, path: Path, weights: Weights, cut: SplitSpec) -> list[Path]:
        """Into a folder that is empty and exists, or the file to make. Gives the files written."""


def tokenizer_in(folder: Path | None) -> Tokenizer | None:
    return Tokenizer.from_pretrained(folder) if folder is not None and _has_tokenizer(folder) else None


def tokenizer_folder(*places: Path) -> Path | None:
    """The first folder in which one lies, such as that of a checkpoint, then the one above it."""
    return next((place for place in places if place.is_dir() and _has_tokenizer(place)), None)


def _has_tokenizer(folder: Path) -> bool:
    files = (*tokenizer_files.VOCABULARIES, nanogpt_meta.NAME)
    return any((folder / file).is_file() for file in files) or bool(model_in(folder))


def model_config(values: Mapping[str, object], where: str) -> ModelConfig:
    """Checked as a config of ours is; what is wrong is the checkpoint's."""
    for key, value in flatten(dict(values)).items():
        is_plain = value is None or isinstance(value, bool | float | str)
        if not is_plain and not (isinstance(value, int) and abs(value) < 2**63):
            raise CheckpointError(f"{where}: model.{key} is {brief(value)}, needed a number or a word.")
    try:
        return from_dict({"model": dict(values)}, where).model
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def unknown_classes(unknown: Sequence[str], file: Path | None = None) -> list[str]:
    """A remark about classes and functions that a pickle names, and that were not called."""
    where = f"{file}: " if file is not None else ""
    return [f"{where}classes of the pickle that were not used: {', '.join(unknown)}"] if unknown else []


def require_divisible(model: ModelConfig, cut: SplitSpec) -> None:
    """Before any file is made."""
    for size, number in (("heads", model.num_heads), ("vocabulary", model.vocab_size), ("ffn_size", model.ffn_size)):
        if number % cut.tp:
            advice = (
                f" Pad it with -o model.vocab_size={-(-number // cut.tp) * cut.tp}." if size == "vocabulary" else ""
            )
            raise CheckpointError(f"--tp {cut.tp}: {size} {number} cannot be cut into {cut.tp} equal parts.{advice}")
    if cut.pp > model.num_layers:
        raise CheckpointError(f"--pp {cut.pp}: the model has {model.num_layers} layers; no stage may be empty.")
    if model.num_layers % cut.pp:
        raise CheckpointError(f"--pp {cut.pp}: {model.num_layers} layers cannot be cut into {cut.pp} equal stages.")


def _some(names: list[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names[:6])
    return listed + (f", ... ({len(names) - 6} more)" if len(names) > 6 else "")
