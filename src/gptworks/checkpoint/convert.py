"""Weights from one system's checkpoint to another's, a tensor at a time."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptworks import __version__, tokenizer_files
from gptworks.checkpoint import conversion_check, staging
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import Matched
from gptworks.checkpoint.systems import registry
from gptworks.checkpoint.systems.contract import Opened, SplitSpec, System, Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, TokenizerError, VerificationError
from gptworks.tokenizer import Tokenizer, gpt2_for

CERTIFICATE = "certificate.json"
_TOKENIZER_FILES = (*tokenizer_files.EVERY, "generation_config.json")


@dataclass(frozen=True)
class Converted:
    source: Opened
    destination: Path
    to: str
    files: list[Path]
    certificate: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)


def convert(
    source: str | Path,
    destination: str | Path,
    to: str,
    *,
    from_name: str | None = None,
    overrides: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
    cut: SplitSpec | None = None,
    verify: bool = False,
) -> Converted:
    """Nothing appears at `destination` before all of it is there, and with `verify` before it is proved equal.

    `overrides`: numbers of the model that the source does not carry, and a `vocab_size` to pad or cut the
    vocabulary to. `dtype`: None keeps that of each tensor.

    >>> convert("gpt2", "gpt2.ckpt", "mindspore", verify=True)   # doctest: +SKIP
    """
    cut = cut or SplitSpec()
    source, destination = Path(source), Path(destination)
    target = registry.system(to)
    if (cut.tp, cut.pp) != (1, 1) and not target.CUTS:
        able = ", ".join(name for name in registry.NAMES if registry.system(name).CUTS)
        raise CheckpointError(f"--to {to}: keeps a model in one piece; --tp and --pp are for {able}.")
    if not destination.name.endswith(target.SUFFIX):
        raise CheckpointError(
            f"{destination}: --to {to} writes one file, whose name ends in {target.SUFFIX}. "
            f"Call it {destination.name or 'model'}{target.SUFFIX}."
        )
    beside = f".{CERTIFICATE}" if target.SUFFIX else None
    staging.require_free(destination, is_folder=not target.SUFFIX, beside=beside)
    overrides = dict(overrides or {})
    vocab_size = overrides.pop("vocab_size", None)
    opened = registry.open_any(source, overrides, name=from_name).require_whole()
    notes = list(opened.notes)
    if vocab_size is not None:
        opened = _with_vocabulary(opened, _count(vocab_size), notes)
    tensors = {name: each.cast(dtype) if dtype else each for name, each in opened.tensors.items()}
    step = int(opened.about.get("step") or 0)
    weights = Weights(opened.model, tensors, opened.eod_id, step, opened.open_tokenizer, notes, opened.bos_id)
    certificate = None
    with staging.staged(destination, is_folder=not target.SUFFIX, beside=beside) as staged:
        written = target.write(staged, weights, cut)
        if staged.is_dir():
            written += _copy_tokenizer(opened, staged, notes)
        notes += _not_kept(opened, target, staged)
        if verify:
            certificate = _prove(opened, weights, target, staged, written, overrides)
            written.append(staged / CERTIFICATE if staged.is_dir() else Path(f"{staged}{beside}"))
            written[-1].write_text(json.dumps(certificate, indent=2) + "\n", encoding="utf-8")
    if target.SUFFIX:
        files = [destination.with_name(file.name) for file in written]
    else:
        files = [destination / file.relative_to(staged) for file in written]
    return Converted(opened, destination, target.NAME, files, certificate, notes)


def _count(value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise CheckpointError(f"model.vocab_size: got {value!r}; needs a number of 1 or more.")
    return number


def _with_vocabulary(opened: Opened, vocab_size: int, notes: list[str]) -> Opened:
    """Rows are left out at the end, or the last one is repeated, as Megatron's own tools pad."""
    had = opened.model.vocab_size
    if vocab_size == had:
        return opened

    if vocab_size < had:
        opened = _without_tokens(opened, vocab_size, notes)

    def resized(stored: LazyTensor) -> LazyTensor:
        if vocab_size < had:
            return stored.first_rows(vocab_size)

        def read() -> Tensor:
            rows = stored.read()
            return torch.cat([rows, rows[-1:].expand(vocab_size - had, -1)])

        return LazyTensor(torch.Size([vocab_size, stored.shape[1]]), stored.dtype, read)

    tensors = {
        name: resized(each) if name in ("wte.weight", "head.weight") else each for name, each in opened.tensors.items()
    }
    how = "left out" if vocab_size < had else "added, copies of the last one"
    notes.append(f"vocabulary: {had:,} -> {vocab_size:,} rows, {abs(vocab_size - had):,} {how}")
    return replace(
        opened,
        model=opened.model.model_copy(update={"vocab_size": vocab_size}),
        matched=Matched(tensors, [], [], []),
    )


def _without_tokens(opened: Opened, vocab_size: int, notes: list[str]) -> Opened:
    """A tokenizer must not give ids that the model has no row for, nor the settings name one."""
    try:
        tokenizer = opened.open_tokenizer()
    except TokenizerError:
        tokenizer = None
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"model.vocab_size: got {vocab_size:,}; {opened.path} has a tokenizer of {tokenizer.vocab_size:,} tokens, "
            "and each needs a row."
        )
    if opened.bos_id is not None and opened.bos_id >= vocab_size:
        opened = replace(opened, bos_id=None)
    if opened.eod_id is None or opened.eod_id < vocab_size:
        return opened
    notes.append(f"the end of a document was token {opened.eod_id}, which has no row any more: it is left out")
    return replace(opened, eod_id=None, tokenizer=None)  # generation_config.json names it as well


def _copy_tokenizer(opened: Opened, folder: Path, notes: list[str]) -> list[Path]:
    """Copies the tokenizer's files as they are, or writes the one that the source carried inside."""
    if opened.embedded_tokenizer is not None:
        try:
            opened.embedded_tokenizer().save(folder)
        except TokenizerError as error:
            notes.append(f"no tokenizer was written: {error}")
            return []
        return [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if opened.tokenizer is None or not opened.tokenizer.is_dir():
        return []
    return [
        Path(shutil.copyfile(file, folder / file.name))
        for file in _tokenizer_files(opened.tokenizer)
        if not (folder / file.name).exists()
    ]


def _tokenizer_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return [file for file in files if file.name in _TOKENIZER_FILES or file.suffix == ".model"]


def _not_kept(opened: Opened, target: System, staged: Path) -> list[str]:
    """Where a format does not say how the model computes, and its system computes otherwise."""
    result = target.open(staged, {"num_heads": opened.model.num_heads})
    theirs, lost = result.model, []
    if (
        target.SUFFIX
        and result.embedded_tokenizer is None
        and opened.tokenizer is not None
        and _tokenizer_files(opened.tokenizer)
    ):
        lost = [
            f"{target.NAME} is one file without a tokenizer: copy that in {opened.tokenizer} beside it, or name it "
            "with --tokenizer"
        ]
    return lost + [
        f"{target.NAME} does not keep model.{name}: it computes with {getattr(theirs, name)}, and this model is made "
        f"for {getattr(opened.model, name)}. To read it back, give -o model.{name}={getattr(opened.model, name)}"
        for name in ("gelu", "layernorm_eps")
        if getattr(theirs, name) != getattr(opened.model, name)
    ]


def _prove(
    opened: Opened, weights: Weights, target: System, staged: Path, written: list[Path], overrides: dict[str, object]
) -> dict[str, Any]:
    """The result is opened as a user would open it, and both sides compute. Raises when they differ."""
    unsaid = {name: getattr(opened.model, name) for name in ("num_heads", "gelu", "layernorm_eps")}
    numbers = {name: value for name, value in overrides.items() if name in ModelConfig.model_fields}
    result = target.open(staged, {**unsaid, **numbers}).require_whole()
    if result.model.vocab_size != opened.model.vocab_size:
        raise VerificationError(f"{staged}: vocabulary {result.model.vocab_size}, needed {opened.model.vocab_size}.")
    same = [torch.equal(each.read(), result.tensors[name].read()) for name, each in weights.tensors.items()]
    tokens = conversion_check.sample_tokens(opened.model)
    expected = conversion_check.logits(opened.model, weights.tensors, tokens)
    largest = float(expected.abs().max())
    difference = float((expected - conversion_check.logits(result.model, result.tensors, tokens)).abs().max())
    allowed = target.TOLERANCE * max(1.0, largest)
    if not difference <= allowed:
        raise VerificationError(
            f"{opened.path}: as {target.NAME} its logits differ by {difference:.3g}, allowed {allowed:.3g}. "
            "Nothing was written."
        )
    certificate: dict[str, Any] = {
        "gptworks": __version__,
        "source": {"system": opened.system, "name": opened.path.name, "sha256": _hashes(opened.files, opened.path)},
        "result": {"system": target.NAME, "sha256": _hashes(written, staged)},
        "model": opened.model.model_dump(),
        "given": {
            name: {"value": value, "source": opened.conflicts.get(name)} for name, value in (overrides or {}).items()
        },
        "dtype": sorted({str(each.dtype).removeprefix("torch.") for each in weights.tensors.values()}),
        "tensors": {"equal_to_the_bit": sum(same), "different": len(same) - sum(same)},
        "logits": {"tokens": tokens.tolist(), "largest": largest, "difference": difference, "allowed": allowed},
    }
    if (tokenizer := _english_tokenizer(opened)) is not None:
        loss = conversion_check.english_loss(opened.model, weights.tensors, tokenizer)
        certificate["english"] = {
            "loss": round(loss, 4),
            "chance": round(conversion_check.chance(tokenizer.vocab_size), 4),
        }
    return certificate


def _english_tokenizer(opened: Opened) -> Tokenizer | None:
    """The source's tokenizer, or GPT-2's where the vocabulary has that size (or is padded from it)."""
    try:
        tokenizer = opened.open_tokenizer()
    except TokenizerError:
        tokenizer = None
    tokenizer = tokenizer or gpt2_for(opened.model.vocab_size)
    return tokenizer if tokenizer and tokenizer.vocab_size <= opened.model.vocab_size else None


def _hashes(files: list[Path], base: Path) -> dict[str, str]:
    hashes = {}
    for path in files:
        with path.open("rb") as file:
            name = str(path.relative_to(base)) if path != base and path.is_relative_to(base) else path.name
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes
