"""Before the first step: the checkpoint that a run goes on from, the weights that it starts from, and its data."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gptworks.checkpoint import folder as folders
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.checkpoint.manifest import Manifest
from gptworks.checkpoint.pretrained import Pretrained, fields_not_stored
from gptworks.config.schema import ModelConfig, RunConfig
from gptworks.errors import CheckpointError, DamagedCheckpoint, DataError
from gptworks.launch.ranks import Ranks
from gptworks.parallel.build import WeightSource
from gptworks.tokenizer import Tokenizer
from gptworks.train import resume
from gptworks.train.setup import Setup


@dataclass(frozen=True)
class Source:
    """The checkpoint that a run goes on from, and the newer ones that are damaged, with the reason for each."""

    path: Path
    manifest: Manifest
    damaged: dict[Path, str] = field(default_factory=dict)


def refuse_different_data(setup: Setup, ranks: Ranks) -> None:
    """Machines with stores of their own must have the same ones."""
    all_identities = ranks.gather(setup.dataset.identities)
    for rank, identities in enumerate(all_identities):
        if identities != all_identities[0]:
            here, there = (", ".join(str(i)[:12] for i in ids) for ids in (all_identities[0], identities))
            raise DataError(
                f"data.path: rank {rank} reads other data (store {there}) than rank 0 (store {here}). Copy the "
                "same store to all machines, or point data.path at a filesystem they share."
            )


def find_source(
    resume_from: str, checkpoints: CheckpointFolder, cfg: RunConfig, setup: Setup, ranks: Ranks
) -> Source | None:
    """`never`: none; `auto`: the newest whole checkpoint of the run; else the one that is named, whole or refused.

    All ranks look at a share of the files each, and take the same one.
    """
    if resume_from == "never":
        return None
    if resume_from != "auto":
        path = ranks.on_main(lambda: folders.find(Path(resume_from)))
        return Source(path, ranks.on_all(lambda: _accepted(path, cfg, setup, ranks)))
    damaged: dict[Path, str] = {}
    for _, path in sorted(ranks.on_main(checkpoints.named_as_steps).items(), reverse=True):
        try:
            return Source(path, ranks.on_all(partial(_accepted, path, cfg, setup, ranks)), damaged)
        except DamagedCheckpoint as error:
            damaged[path] = str(error)
    if damaged:
        listed = "\n".join(f"  {reason}" for reason in damaged.values())
        raise CheckpointError(
            f"{checkpoints.folder}: no checkpoint is whole:\n{listed}\nNothing was changed. Put a whole one back, or "
            "start anew in another --out."
        )
    return None


def _accepted(path: Path, cfg: RunConfig, setup: Setup, ranks: Ranks) -> Manifest:
    """The manifest of a checkpoint that is whole and belongs to this configuration and data."""
    if not (path / manifests.NAME).is_file():
        raise DamagedCheckpoint(f"{path}: {manifests.NAME} is missing.")
    manifest = manifests.read(path)
    resume.refuse_fixed(resume.changes(manifest.config, cfg), str(path))
    resume.refuse_derived_batch(manifest, cfg.batch, setup.batch, str(path))
    resume.stages_going_on(manifest, setup.dataset, str(path))
    going_on, order = setup.going_on(cfg, manifest.step, manifest.consumed), cfg.data.order
    read_at_end = manifest.consumed + (going_on.last_step - manifest.step) * going_on.batch.global_size
    resume.refuse_other_number(manifest.samples_asked, going_on.samples_asked, read_at_end, order, str(path))
    now = setup.dataset.identities
    if manifest.data_identities != now:
        then, here = (", ".join(str(i)[:12] for i in ids) for ids in (manifest.data_identities, now))
        raise DataError(
            f"{path}: was trained on other data (store {then}; now {here}). "
            "Point data.path at the same store, or start anew in another --out with init.checkpoint."
        )
    if setup.dataset.tokenizer:
        setup.dataset.tokenizer.require(manifest.tokenizer_identity, source=str(path))
    manifests.verify(path, manifest, share=ranks.rank, shares=ranks.size)
    return manifest


def weights_to_tune(checkpoint: str, model: ModelConfig, tokenizer: Tokenizer | None) -> WeightSource:
    """`tokenizer`: of the data."""
    opened = open_to_tune(checkpoint, model)
    if opened.tokenizer and tokenizer:
        tokenizer.require(opened.tokenizer.identity, source=str(opened.folder))
    return opened.weights


def open_to_tune(checkpoint: str, model: ModelConfig) -> Pretrained:
    """`init.checkpoint`, which must hold the model of the configuration."""
    mine = model.model_dump()
    opened = Pretrained.open(checkpoint, shape=fields_not_stored(mine))
    theirs = opened.model.model_dump() | opened.weights.conflicts
    different = [
        f"  model.{name}: {theirs[name]} there, {mine[name]} here"
        for name in mine
        if theirs[name] != mine[name] and resume.is_fixed(f"model.{name}")
    ]
    if different:
        raise CheckpointError(
            f"{checkpoint}: holds another model:\n" + "\n".join(different) + "\n"
            "Leave out --preset and these keys: the model section is then that of the checkpoint."
        )
    return opened
