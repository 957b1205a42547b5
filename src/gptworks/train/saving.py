"""Saving the checkpoints of a run, perhaps beside training, and deleting those that are not kept."""

import math
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path

from torch import Tensor

from gptworks import run_paths
from gptworks.checkpoint import retention
from gptworks.checkpoint.background import Background
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.checkpoint.manifest import Manifest
from gptworks.config.schema import CheckpointConfig, ModelConfig
from gptworks.launch.job import SAVE_TIMEOUT_S
from gptworks.launch.ranks import Ranks
from gptworks.parallel.slices import Pieces, copied_to_cpu
from gptworks.train.setup import Setup

Tensors = Mapping[str, Tensor | Pieces]

_NEWEST_WEIGHS = 0.1  # so that about the last ten steps count


class SmoothedLoss:
    """An exponential mean of the training loss, and what the last step adds to it. Equal on every rank."""

    def __init__(self, value: float | None = None) -> None:
        self.value = value
        self.recent = value  # the worse of the mean and the last step, which goes wrong first; inf: it was not finite
        self.untried = True  # no step has been computed with the weights of the newest checkpoint

    def see(self, loss: float) -> None:
        self.untried = False
        if not math.isfinite(loss):
            self.recent = math.inf
            return
        self.value = loss if self.value is None else self.value + _NEWEST_WEIGHS * (loss - self.value)
        self.recent = max(self.value, loss)


class Saving:
    """On every rank; each writes its own files, and the main process all else."""

    def __init__(
        self, cfg: CheckpointConfig, model: ModelConfig, setup: Setup, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.cfg, self.model, self.tokenizer, self.say = cfg, model, setup.dataset.tokenizer, say
        # Saving has a group of its own: it may be going on in a thread, and a slow disk is not a rank that hangs.
        self.checkpoints = CheckpointFolder(folder, Ranks.shared(setup.world, timedelta(seconds=SAVE_TIMEOUT_S)))
        self._background = Background(setup.world.device)

    def wait(self) -> None:
        """Come back when the last checkpoint is whole."""
        self._background.wait()

    def save(self, manifest: Manifest, tensors: Tensors, loss: SmoothedLoss, *, is_best: bool) -> None:
        """Come back when the checkpoint is whole, or, when asynchronous, when a copy of the state is made."""
        recent, loss.untried = loss.recent, True
        if self.cfg.asynchronous:
            copies = copied_to_cpu(tensors)
            self._background.start(lambda: self._write(manifest, copies, recent, is_best=is_best))
        else:
            self._write(manifest, tensors, recent, is_best=is_best)

    def save_apart(self, manifest: Manifest, tensors: Tensors) -> Path:
        """The state of a run that stops because it went wrong: kept, but neither counted nor chosen."""
        self.wait()
        self.checkpoints.ranks.on_main(self.checkpoints.remove_stopped)
        return self._save(manifest, tensors, apart=True)

    def finish(self, loss: SmoothedLoss) -> None:
        """The last checkpoint is whole, and only those are left that are kept."""
        self.wait()
        self._retain(loss.recent)

    def newest_sound(
        self, loss: SmoothedLoss, *, scheduled: bool = False, without: Collection[Path] = ()
    ) -> Path | None:
        """The newest checkpoint that training went on well after. `scheduled`: of those that a run has which nobody
        stops, if there is one: what follows from it must not depend on when a run was stopped."""
        self.wait()
        recent = math.inf if loss.untried else loss.recent
        every = self.cfg.every

        def find() -> Path | None:
            steps = {step: path for step, path in self.checkpoints.steps().items() if path not in without}
            losses = {step: each for step, each in self.checkpoints.smoothed_losses().items() if step in steps}
            sound = None
            if scheduled and every:
                regular = {step: each for step, each in losses.items() if step % every == 0}
                is_newest = bool(losses) and max(losses) in regular
                sound = retention.newest_sound(regular, recent if is_newest else loss.recent)
            if sound is None:
                sound = retention.newest_sound(losses, recent)
            return None if sound is None else steps[sound]

        return self.checkpoints.ranks.on_main(find)

    def _write(self, manifest: Manifest, tensors: Tensors, recent: float | None, *, is_best: bool) -> None:
        """All that comes after the state is at hand; perhaps in a thread, while training goes on.

        Deleted is before writing: the steps since the newest checkpoint have shown by now whether it is sound, and
        there is never more than one checkpoint too many.
        """
        self._retain(recent)
        path = self._save(manifest, tensors)
        if is_best:
            self.checkpoints.ranks.on_main(lambda: self.checkpoints.point(run_paths.BEST, path.name))
        self.say(f"saved {path}")

    def _save(self, manifest: Manifest, tensors: Tensors, *, apart: bool = False) -> Path:
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        portable = weights if self.cfg.portable else None
        return self.checkpoints.save(manifest, tensors, portable, self.model, self.tokenizer, apart=apart)

    def _retain(self, recent: float | None) -> None:
        checkpoints = self.checkpoints
        for path in checkpoints.ranks.on_main(lambda: checkpoints.retain(self.cfg, recent)):
            self.say(f"kept beyond checkpoint.keep_last: {path}, because the loss has become much worse since")
