"""The checkpoints of a run: checkpoints/step-00000100/{manifest.json, state/, portable/}, pointers `latest` and `best`.

A checkpoint is written under a temporary name, synced, and renamed: a crash at any moment leaves the last good one.
With many ranks each writes and describes its own files, and the main process does the rest. The folder must be the
same for all of them: on one machine, or on a filesystem that the machines share.
"""

import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gptworks import file_errors, model_hub, run_paths
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint import portable, retention
from gptworks.checkpoint.manifest import Manifest
from gptworks.config.schema import CheckpointConfig, ModelConfig
from gptworks.durable import make_folder, sync
from gptworks.errors import CheckpointError, first_line
from gptworks.launch.ranks import Ranks
from gptworks.parallel.slices import Pieces, Slice
from gptworks.run_paths import BEST, LATEST
from gptworks.tokenizer import Tokenizer

STATE, PORTABLE, TOKENIZER = run_paths.STATE, run_paths.PORTABLE, run_paths.TOKENIZER
# Before the name of a checkpoint that is neither counted nor chosen: --resume takes it when it is named.
SET_ASIDE, DAMAGED, STOPPED = "set-aside-", "damaged-", "stopped-"
_STEP = re.compile(r"step-(\d{8,})$")
_LONGEST_NAME = 100  # bytes of a pointer's line


class CheckpointFolder:
    """`save` is called on all ranks; all else by the main process."""

    def __init__(self, run: Path, ranks: Ranks | None = None) -> None:
        self.run = run
        self.ranks = ranks or Ranks()
        self.folder = run / run_paths.CHECKPOINTS

    def remove_leftovers(self) -> None:
        """What a crash left half-written or half-deleted. Only while the run is locked."""
        for path in self.folder.glob(".replaced-*step-*"):
            final = self.folder / path.name.removeprefix(".replaced-")
            if not final.exists():  # the crash came before the new one took its place
                path.rename(final)
        for path in self.folder.glob(".*-step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def go_back_to(self, step: int, best_step: int | None, damaged: Collection[Path] = ()) -> list[Path]:
        """Put checkpoints after `step`, which will be done again, out of the way; let `best` be that of the time."""
        aside = [_renamed(path, DAMAGED) for path in damaged]
        for later, path in sorted(self.steps().items()):
            if later > step:
                aside.append(_renamed(path, SET_ASIDE))
        best, pointed = self.steps().get(best_step or 0), self.pointed(BEST)
        if best:
            self.point(BEST, best.name)
        elif not (pointed and pointed.exists()):
            (self.run / BEST).unlink(missing_ok=True)
        newest = self.latest()
        if aside and newest:
            self.point(LATEST, newest.name)
        return aside

    def save(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor | Slice | Pieces],
        weights: Mapping[str, Tensor | Slice | Pieces] | None,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        apart: bool = False,
    ) -> Path:
        """tensors: all that is needed to go on; weights: parameters for the portable folder, None = none.

        `apart`: the state of a run that has gone wrong, under a name that is neither counted nor chosen. Each rank
        gives what it has. Where one fails, all fail, and earlier checkpoints are as before.
        """
        from gptworks.checkpoint.formats import dcp  # slow to import, and only needed to write

        final = self.folder / f"{STOPPED if apart else ''}{run_paths.step_name(manifest.step)}"
        temporary = self.folder / f".writing-{final.name}"
        ranks = self.ranks
        try:
            with _named_failures(final):
                ranks.on_main(lambda: _make_anew(temporary))
                dcp.save(temporary / STATE, tensors, ranks)
                written = dcp.files_of(temporary / STATE, ranks.rank)
                if weights is not None:
                    ids = {"eod_id": tokenizer.eod_id, "bos_id": tokenizer.bos_id} if tokenizer else {"eod_id": None}
                    written += portable.write(temporary / PORTABLE, model, weights, ranks, **ids)
                if tokenizer:
                    words = temporary / (PORTABLE if weights is not None else TOKENIZER)
                    ranks.on_main(lambda: tokenizer.save(words))
                files = self._describe(temporary, written)
                ranks.on_main(lambda: self._publish(replace(manifest, files=files), temporary, final))
        except BaseException:
            if ranks.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _describe(self, temporary: Path, written: list[Path]) -> dict[str, dict[str, Any]]:
        """Each rank syncs and hashes what it wrote itself, the main process also what nobody names."""
        ranks = self.ranks
        named = {path for paths in ranks.gather(written) for path in paths}

        def describe() -> dict[str, dict[str, Any]]:
            mine = written
            if ranks.is_main:
                mine = written + [path for path in temporary.rglob("*") if path.is_file() and path not in named]
            for path in mine:
                sync(path)
            return manifests.describe_files(temporary, mine)

        described = ranks.gather(ranks.on_all(describe))
        merged = {name: entry for entries in described for name, entry in entries.items()}
        return {name: merged[name] for name in sorted(merged, key=Path)}

    def _publish(self, manifest: Manifest, temporary: Path, final: Path) -> None:
        for name, entry in manifest.files.items():
            if not (temporary / name).is_file() or (temporary / name).stat().st_size != entry["bytes"]:
                raise CheckpointError(
                    f"{temporary / name}: written by another rank, but not visible here. The run folder must be "
                    "on a filesystem that all machines share."
                )
        manifest.write(temporary)
        for path in [temporary / manifests.NAME, *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            sync(path)
        replaced = final.with_name(f".replaced-{final.name}")
        if final.exists():  # saved before at this very step
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        if _STEP.match(final.name):
            self.point(LATEST, final.name)

    def point(self, pointer: str, name: str) -> None:
        """`latest` and `best` are one-line text files, replaced in one go."""
        path = self.run / f".{pointer}.new"
        path.write_text(name + "\n", encoding="utf-8")
        sync(path)
        path.replace(self.run / pointer)
        sync(self.run)

    def pointed(self, pointer: str) -> Path | None:
        """None where it is missing, or holds something else than the name of a checkpoint."""
        try:
            with (self.run / pointer).open("rb") as file:
                name = file.read(_LONGEST_NAME).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        return self.folder / name if _STEP.fullmatch(name) else None

    def latest(self) -> Path | None:
        """The newest whole checkpoint: a rename may have happened whose pointer was not written any more."""
        steps = self.steps()
        return steps[max(steps)] if steps else None

    def steps(self) -> dict[int, Path]:
        return {step: path for step, path in self.named_as_steps().items() if (path / manifests.NAME).is_file()}

    def named_as_steps(self) -> dict[int, Path]:
        """All that has the name of a checkpoint, with a manifest or without."""
        named = ((_STEP.match(path.name), path) for path in self.folder.glob("step-*"))
        return {int(match[1]): path for match, path in named if match}

    def smoothed_losses(self) -> dict[int, float | None]:
        """The smoothed loss of each checkpoint; None where its manifest does not say, or cannot be read."""
        return {step: _smoothed_loss(path) for step, path in self.steps().items()}

    def retain(self, cfg: CheckpointConfig, loss: float | None = None) -> list[Path]:
        """Delete what the configuration does not keep. Returns what stays besides, because newer ones are much worse.

        `loss`: the smoothed loss of now, which shows whether the newest checkpoint is sound.
        """
        steps, best = self.steps(), self.pointed(BEST)
        if len(steps) <= cfg.keep_last:
            return []
        best_step = next((step for step, path in steps.items() if path == best), None)
        kept = retention.choose(self.smoothed_losses(), loss, cfg, best_step)
        for step in steps.keys() - kept.asked - kept.needed:
            _delete(steps[step])
        return [steps[step] for step in sorted(kept.needed)]

    def put_apart(self, good: Path) -> list[Path]:
        """Checkpoints after the last good one of a run that has gone wrong: kept, but neither counted nor chosen.

        One that is the best by a held-out loss, which was measured with its very weights, stays.
        """
        steps, best = self.steps(), self.pointed(BEST)
        bad = [path for step, path in sorted(steps.items()) if step > _step_of(good) and path != best]
        apart = [_renamed(path, STOPPED) for path in bad]
        newest = self.latest()
        if apart and newest:
            self.point(LATEST, newest.name)
        return apart

    def remove_stopped(self) -> None:
        """The states that earlier stops left apart: only the last is of use."""
        for path in self.folder.glob(f"{STOPPED}step-*"):
            _delete(path)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _smoothed_loss(checkpoint: Path) -> float | None:
    try:
        manifest = manifests.read(checkpoint)
        # The smoothed loss does not count steps that were not finite: they show here.
        return math.inf if manifest.skipped_in_a_row else manifest.smoothed_loss
    except CheckpointError:  # nothing is known of it, and it is deleted or kept as any other
        return None


def at_step(source: str) -> Path | None:
    """The checkpoint that RUN@100, RUN@best or RUN@latest means; None for what is no such word or is there itself."""
    run, _, which = source.rpartition("@")
    if not run or Path(source).exists() or not run_paths.is_run(Path(run)):
        return None
    checkpoints = CheckpointFolder(Path(run))
    if which in (LATEST, BEST):
        checkpoint = checkpoints.latest() if which == LATEST else checkpoints.pointed(BEST)
    else:
        checkpoint = {str(step): path for step, path in checkpoints.steps().items()}.get(which.lstrip("0") or "0")
    if checkpoint is None:
        steps = ", ".join(str(step) for step in sorted(checkpoints.steps())) or "none"
        raise CheckpointError(
            f"{source}: no checkpoint {which[:40]} of {run}. Steps: {steps}; also {LATEST} and {BEST}."
        )
    return checkpoint


def find(path: Path) -> Path:
    """The step folder meant by a run folder, its `latest` or `best`, a `checkpoints` folder or a step folder."""
    if run_paths.is_pointer(path):
        pointed = CheckpointFolder(path.parent).pointed(path.name)
        if pointed is None:
            raise CheckpointError(
                f"{path}: holds no name of a checkpoint. Needed: a line such as step-00000100. Name the folder itself, "
                f"one of {path.parent / run_paths.CHECKPOINTS}/step-..., or the run for its newest."
            )
        path = pointed
    if (path / manifests.NAME).is_file():
        return path
    latest = CheckpointFolder(run_paths.run_of(path)).latest()
    if latest is None:
        file_errors.refuse_unreadable(path)
        raise CheckpointError(
            f"{path}: no checkpoint here. Needed: a run folder, one of its checkpoints/step-... folders, or a "
            "Hugging Face folder (config.json and weights)."
        )
    return latest


def check_free_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: {free / 1e6:,.1f} MB free, but one checkpoint needs {needed / 1e6:,.1f} MB. "
            "Free some space, choose another --out, or set checkpoint.portable: false."
        )


@contextmanager
def _named_failures(final: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the disk is full, in the words of Python, torch or safetensors
        reason = (isinstance(error, OSError) and file_errors.explain(error)) or f"{first_line(error).rstrip('.')}."
        raise CheckpointError(
            f"{final}: could not be saved: {reason} Earlier checkpoints are untouched: fix that, and go on with "
            "--resume auto."
        ) from error


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder.parent)
    folder.mkdir()


def _renamed(folder: Path, prefix: str) -> Path:
    target = folder.with_name(f"{prefix}{folder.name}")
    shutil.rmtree(target, ignore_errors=True)
    return folder.rename(target)


def _delete(folder: Path) -> None:
    """First out of sight, then piece by piece: a crash in between leaves no half checkpoint under a good name."""
    doomed = folder.with_name(f".deleting-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def config_of(path: Path) -> dict[str, Any]:
    """The configuration a folder was trained with; empty for a folder from elsewhere."""
    if not path.exists():
        path = at_step(str(path)) or model_hub.find(str(path)) or path
    if path.name == PORTABLE and (path.parent / manifests.NAME).is_file():
        path = path.parent
    return manifests.read(find(path)).config if run_paths.is_ours(path) else {}
