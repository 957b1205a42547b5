"""A run in progress: the live objects of training, and what is done with them besides stepping."""

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from gptworks.checkpoint import folder as folders
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.background import Background
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.checkpoint.formats import dcp
from gptworks.checkpoint.manifest import Manifest
from gptworks.checkpoint.pretrained import Pretrained, unseen
from gptworks.config import yaml_text
from gptworks.config.schema import ParallelConfig, RunConfig
from gptworks.data.loader import Batch
from gptworks.errors import CheckpointError, DataError, TrainingError
from gptworks.evaluate.heldout import held_out_loss
from gptworks.launch.job import SAVE_TIMEOUT_S
from gptworks.launch.ranks import Ranks
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel import apply, recompute, shard
from gptworks.parallel.apply import FreshWeights, WeightSource
from gptworks.parallel.parts import named_parameters
from gptworks.parallel.slices import Slice, copied_to_cpu, to_fill, to_store
from gptworks.plan import sizes
from gptworks.train import optim, plot, prefetch, resume, run_folder, schedule
from gptworks.train.console import LogLine, TrainConsole
from gptworks.train.metrics import NONFINITE, Metrics
from gptworks.train.precision import DTYPES, LossScaler
from gptworks.train.profile import profiled
from gptworks.train.setup import Setup
from gptworks.train.speed import Stopwatch, find_peak
from gptworks.train.step import StepReport


@dataclass
class Progress:
    """What a checkpoint remembers besides tensors and the number of samples."""

    step: int = 0
    updates: int = 0  # skipped steps are not among them
    skipped_in_a_row: int = 0
    held_out_loss: float | None = None
    best: dict[str, float] | None = None  # step, held_out_loss
    evaluations_since_best: int = 0


class Run:
    """Opened on a locked folder; closes its files at the end of the `with` block.

    Every rank has one and calls the same methods. What is written once is written by the main process.
    """

    def __init__(
        self,
        cfg: RunConfig,
        setup: Setup,
        folder: Path,
        resume_from: str,
        command: list[str] | None,
        ranks: Ranks,
    ) -> None:
        self.cfg, self.setup, self.folder, self.ranks = cfg, setup, folder, ranks
        # Saving has a group of its own: it may be going on in a thread, and a slow disk is not a rank that hangs.
        self.checkpoints = CheckpointFolder(folder, Ranks(setup.world, timeout=timedelta(seconds=SAVE_TIMEOUT_S)))
        self.saving = Background(setup.world.device)
        ranks.main_does(self.checkpoints.remove_leftovers)
        ranks.all_do(self._refuse_different_data)
        source = ranks.main_does(lambda: self._checkpoint_to_resume(resume_from))
        manifest = ranks.all_do(lambda: self._accepted(source)) if source else None
        if manifest:
            self.setup = setup = setup.going_on(cfg, manifest.step, manifest.consumed)

        needed = sizes.checkpoint_bytes(cfg.model, cfg.checkpoint.portable)
        ranks.main_does(lambda: folders.check_free_space(folder, needed))
        weights = ranks.all_do(self._weights_to_tune) if cfg.init.checkpoint and source is None else None
        # What a checkpoint fills is not drawn before.
        fresh = FreshWeights(cfg.init, cfg.model.num_layers, cfg.train.seed) if source is None else None
        self.part = ranks.all_do(lambda: build_part(cfg, setup.world, setup.parallel, weights or fresh))
        self.optimizer = optim.build(self.part, cfg.optim)
        self.scaler = LossScaler(cfg.precision.scaler, enabled=cfg.precision.compute == "fp16")
        self.progress = self._restore(source, manifest) if source and manifest else Progress()
        self.batches = setup.batches(consumed=manifest.consumed if manifest else 0)

        self.peak = find_peak(setup.world.device, cfg.precision.compute)
        ranks.main_does(lambda: self._write_down(command or sys.argv))
        quiet = not ranks.is_main
        self._closing = contextlib.ExitStack()
        self.console = TrainConsole(setup.last_step, cfg.train.log_style, first_step=self.progress.step, quiet=quiet)
        self._closing.callback(self.console.close)
        self._greet(source, manifest)
        ranks.main_does(self._go_back)
        self.metrics = Metrics(folder, resumed_step=self.progress.step, quiet=quiet)
        self._closing.callback(self.metrics.close)
        profiled_steps = () if quiet else cfg.train.profile
        self.profiler = self._closing.enter_context(profiled(profiled_steps, folder, self.progress.step))
        self.reader = self._closing.enter_context(prefetch.reading(self.batches, setup.world.device))
        self.watch = Stopwatch(cfg.model, cfg.data.seq_len, peak=self.peak, num_devices=ranks.size)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.saving.wait()
        except Exception:
            if kind is None:  # otherwise what ended the run is what the user should see
                raise
        finally:
            self._closing.close()
            if self.ranks.is_main:
                plot.write(self.folder)

    def finish_saving(self) -> None:
        """Come back when the last checkpoint is whole."""
        self.saving.wait()

    # Before the first step

    def _refuse_different_data(self) -> None:
        """Machines with stores of their own must have the same ones."""
        all_identities = self.ranks.gather(self.setup.dataset.identities)
        for rank, identities in enumerate(all_identities):
            if identities != all_identities[0]:
                here, there = (", ".join(str(i)[:12] for i in ids) for ids in (all_identities[0], identities))
                raise DataError(
                    f"data.path: rank {rank} reads other data (store {there}) than rank 0 (store {here}). Copy the "
                    "same store to all machines, or point data.path at a filesystem they share."
                )

    def _write_down(self, command: list[str]) -> None:
        run_folder.write_environment(self.folder, command, mfu_of=vars(self.peak))
        run_folder.replace_text(self.folder / "config.yaml", yaml_text.dump(self.cfg.model_dump(mode="json")))

    def _checkpoint_to_resume(self, resume_from: str) -> Path | None:
        if resume_from == "never":
            return None
        return self.checkpoints.latest() if resume_from == "auto" else folders.find(Path(resume_from))

    def _accepted(self, source: Path) -> Manifest:
        """The manifest of a checkpoint that is whole and belongs to this configuration and data."""
        manifest = manifests.read(source)
        resume.refuse_fixed(resume.changes(manifest.config, self.cfg), str(source))
        resume.refuse_derived_batch(manifest, self.cfg.batch, self.setup.batch, str(source))
        setup, order = self.setup.going_on(self.cfg, manifest.step, manifest.consumed), self.cfg.data.order
        read_at_end = manifest.consumed + (setup.last_step - manifest.step) * setup.batch.global_size
        resume.refuse_other_number(manifest.samples_asked, setup.samples_asked, read_at_end, order, str(source))
        now = self.setup.dataset.identities
        if manifest.data_identities != now:
            then, here = (", ".join(str(i)[:12] for i in ids) for ids in (manifest.data_identities, now))
            raise DataError(
                f"{source}: was trained on other data (store {then}; now {here}). "
                "Point data.path at the same store, or start anew in another --out with init.checkpoint."
            )
        if self.setup.dataset.tokenizer:
            self.setup.dataset.tokenizer.require(manifest.tokenizer_identity, what=str(source))
        manifests.verify(source, manifest, share=self.ranks.rank, shares=self.ranks.size)
        return manifest

    def _weights_to_tune(self) -> WeightSource:
        mine = self.cfg.model.model_dump()
        opened = Pretrained.open(self.cfg.init.checkpoint, shape=unseen(mine))
        theirs = opened.model.model_dump() | opened.weights.overruled
        different = [
            f"  model.{name}: {theirs[name]} there, {mine[name]} here"
            for name in mine
            if theirs[name] != mine[name] and resume.is_fixed(f"model.{name}")
        ]
        if different:
            raise CheckpointError(
                f"{self.cfg.init.checkpoint}: holds another model:\n" + "\n".join(different) + "\n"
                "Set the model section to what is there."
            )
        if opened.tokenizer and self.setup.dataset.tokenizer:
            self.setup.dataset.tokenizer.require(opened.tokenizer.identity, what=str(opened.folder))
        return opened.weights

    def _restore(self, source: Path, manifest: Manifest) -> Progress:
        moments = optim.moments(self.part, self.optimizer)
        wanted = to_fill(self._named_state(moments), tied=self.cfg.model.tied)
        dcp.load_into(source / folders.STATE, wanted, self.ranks)
        optim.set_moments(self.part, self.optimizer, moments, manifest.optimizer_updates)
        self.scaler.restore(manifest.scaler)
        return Progress(
            step=manifest.step,
            updates=manifest.optimizer_updates,
            held_out_loss=manifest.held_out_loss,
            best=manifest.best,
            evaluations_since_best=manifest.evaluations_since_best,
            skipped_in_a_row=manifest.skipped_in_a_row,
        )

    def _named_state(self, moments: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        weights = [(f"model.{name}", p.detach()) for name, p in named_parameters(self.part)]
        return weights + [(f"optim.{name}", tensor) for name, tensor in moments.items()]

    def _greet(self, source: Path | None, manifest: Manifest | None) -> None:
        cfg, batch, say = self.cfg, self.setup.batch, self.console.say
        device = self.setup.world.device
        say(
            f"model: {sizes.num_parameters(cfg.model) / 1e6:,.1f}M parameters, {cfg.precision.compute} on "
            f"{device.type}\n"
            f"batch: {batch.global_size} sample{'s' * (batch.global_size > 1)} of {cfg.data.seq_len} tokens = "
            f"{batch.micro_size} micro-batch x {batch.accumulation} accumulation x "
            f"{batch.data_parallel} data-parallel\n"
            f"data:  {self.setup.train_samples.per_epoch:,} samples per epoch; {self.setup.last_step:,} steps"
        )
        if cfg.train.log_style != "fleetx":  # whose lines have none
            say(str(self.peak))
        if self.ranks.size > 1:
            say(f"ranks: {self.ranks.size} processes, {self.setup.world.layout}")
        for store in self.setup.train_samples.sources:
            if store.note:
                say(store.note)
        if self.setup.dataset.tokenizer is None:
            say("data:  its tokenizer is not known; data.tokenizer names it, so that the model can read and write text")
        if cfg.init.checkpoint and source is None:
            say(f"weights from {cfg.init.checkpoint}")
        if cfg.train.compile and not apply.can_compile(device):
            say("train.compile: no C++ compiler found (g++ or clang++), so nothing is compiled. Install one for speed.")
        for note in (
            recompute.note(cfg.train.recompute, cfg.model.attention, cfg.model.dropout_attention, device.type),
            shard.note(self.setup.parallel),
        ):
            if note:
                say(note)
        if source and manifest:
            say(f"resuming from {source} ({manifest.consumed:,} samples done)")
            for change in resume.changes(manifest.config, cfg):
                say(f"  changed: {change}")
            if manifest.global_size not in (0, batch.global_size):
                say(
                    f"  changed: samples per step: {manifest.global_size} -> {batch.global_size}; steps that are left "
                    "are counted from the samples done"
                )

    def _go_back(self) -> None:
        best = self.progress.best if self.cfg.checkpoint.keep_best else None
        for path in self.checkpoints.go_back_to(self.progress.step, int(best["step"]) if best else None):
            self.console.say(f"  later checkpoint set aside: {path}")

    # During and after

    def next_batches(self) -> list[Batch]:
        with self.watch.reading():
            return self.reader.next_step()

    def count(self, step: int, report: StepReport) -> None:
        progress = self.progress
        progress.step = step
        progress.updates += report.updated
        progress.skipped_in_a_row = 0 if report.updated else progress.skipped_in_a_row + 1
        self.watch.count(self.setup.batch.global_size * self.cfg.data.seq_len)
        self.profiler.step()

    def log(self, step: int, lr: float, report: StepReport) -> None:
        cfg, setup, speed = self.cfg, self.setup, self.watch.lap()
        if self.watch.peak is not self.peak:
            self.peak = self.watch.peak
            self.console.say(f"step {step}: {self.peak}")
        per_epoch = max(1, setup.train_samples.per_epoch // setup.batch.global_size)
        # As FleetX counts: epochs are whole batches. Those that were of another size count as they would today.
        epoch, batch_in_epoch = divmod(self.batches.consumed // setup.batch.global_size - 1, per_epoch)
        line = LogLine(
            step=step,
            last_step=setup.last_step,
            epoch=epoch,
            batch_in_epoch=batch_in_epoch,
            loss=report.loss,
            lr=lr,
            next_lr=schedule.at(step + 1, cfg.optim, setup.last_step),
            grad_norm=report.grad_norm,
            speed=speed,
            loss_scale=report.loss_scale if self.scaler.enabled else None,
            num_ranks=self.ranks.size,
        )
        values = {
            "loss": report.loss,
            "lr": lr,
            "grad_norm": report.grad_norm,
            "tokens": self.batches.consumed * cfg.data.seq_len,
            "tokens_per_sec": round(speed.tokens_per_sec, 1),
        }
        if speed.mfu is not None:
            values["mfu"] = round(speed.mfu, 4)
        if self.scaler.enabled:
            values["loss_scale"] = report.loss_scale
        if self.progress.updates < step:
            values["skipped"] = step - self.progress.updates
        self.metrics.log(step, values)
        self.console.log(line)

    def evaluate(self) -> None:
        assert self.setup.held_out is not None
        with self.watch.paused():
            result = held_out_loss(
                self.part,
                self.setup.held_out,
                self.setup.dataset.borders,
                micro_size=self.setup.batch.micro_size,
                num_batches=self.cfg.evaluate.batches,
                device=self.setup.world.device,
                world=self.setup.world,
            )
        result = self.ranks.gather(result)[0]  # what follows from it must be the same everywhere, to the last bit
        progress = self.progress
        progress.held_out_loss = result.loss if math.isfinite(result.loss) else None
        is_best = math.isfinite(result.loss) and (progress.best is None or result.loss < progress.best["held_out_loss"])
        if is_best:
            progress.best = {"step": progress.step, "held_out_loss": result.loss}
        progress.evaluations_since_best = 0 if is_best else progress.evaluations_since_best + 1
        self.metrics.log(progress.step, {"held_out_loss": result.loss, "held_out_tokens": result.tokens})
        self.console.say(
            f"step {progress.step}: held-out loss {result.loss:.4f} over {result.tokens:,} tokens"
            + (", the best so far" if is_best else "")
        )

    def is_best(self) -> bool:
        """Whether the present weights are those of the lowest held-out loss."""
        return self.progress.best is not None and self.progress.best["step"] == self.progress.step

    def save(self) -> None:
        """Come back when the checkpoint is whole, or, when asynchronous, when a copy of the state is made."""
        with self.watch.paused():
            self.saving.wait()
            shard.settle(self.part)
            named = self._named_state(optim.moments(self.part, self.optimizer))
            tensors = to_store(named, tied=self.cfg.model.tied)
            manifest, is_best = self._manifest(), self.cfg.checkpoint.keep_best and self.is_best()
            if self.cfg.checkpoint.asynchronous:
                copies = copied_to_cpu(tensors)
                self.saving.start(lambda: self._write_checkpoint(manifest, copies, is_best=is_best))
            else:
                self._write_checkpoint(manifest, tensors, is_best=is_best)

    def _write_checkpoint(self, manifest: Manifest, tensors: Mapping[str, Tensor | Slice], *, is_best: bool) -> None:
        """All that comes after the state is at hand; perhaps in a thread, while `progress` goes on."""
        cfg, checkpoints = self.cfg, self.checkpoints
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        portable = weights if cfg.checkpoint.portable else None
        path = checkpoints.save(manifest, tensors, portable, cfg.model, self.setup.dataset.tokenizer)

        def keep() -> None:
            if is_best:
                checkpoints.point(folders.BEST, path.name)
            checkpoints.retain(cfg.checkpoint)

        checkpoints.ranks.main_does(keep)
        self.console.say(f"saved {path}")

    def _manifest(self) -> Manifest:
        cfg, progress, dataset = self.cfg, self.progress, self.setup.dataset
        return Manifest(
            step=progress.step,
            consumed=self.batches.consumed,
            optimizer_updates=progress.updates,
            config=cfg.model_dump(mode="json"),
            tokenizer_identity=dataset.tokenizer_identity,
            data_identities=dataset.identities,
            global_size=self.setup.batch.global_size,
            samples_asked=self.setup.samples_asked,
            scaler=self.scaler.state(),
            held_out_loss=progress.held_out_loss,
            best=progress.best,
            evaluations_since_best=progress.evaluations_since_best,
            skipped_in_a_row=progress.skipped_in_a_row,
            torch_version=str(torch.__version__),
            layout=str(self.setup.world.layout),
        )

    def stop_or_skip(self, step: int, report: StepReport) -> None:
        """A step that was not finite: write down its samples; stop unless it may be skipped."""
        sample_ids = report.sample_ids
        if self.ranks.size > 1:
            sample_ids = sorted(set().union(*self.ranks.gather(sample_ids)))
        entry = {
            "step": step,
            "loss": str(report.loss),
            "grad_norm": str(report.grad_norm),
            "loss_scale": report.loss_scale,
            "sample_ids": sample_ids,
        }
        details = self.folder / NONFINITE
        if self.ranks.is_main:
            with details.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        cfg = self.cfg.train
        # With fp16 an overflow is part of the method: the scale shrinks and the step is skipped.
        is_overflow = self.scaler.enabled and report.loss_scale > self.cfg.precision.scaler.floor
        skips = self.progress.skipped_in_a_row + 1
        if (cfg.nonfinite == "skip" or is_overflow) and skips < cfg.max_skips:
            self.console.say(f"step {step}: not finite, skipped ({skips} in a row); samples in {details}")
            return
        why = "train.nonfinite: stop" if skips < cfg.max_skips else f"train.max_skips: {cfg.max_skips} in a row"
        self.batches.consumed -= self.setup.batch.global_size
        if self.progress.step:
            self.save()
            self.finish_saving()
        ids = ", ".join(str(i) for i in sample_ids[:8]) + (", ..." if len(sample_ids) > 8 else "")
        raise TrainingError(
            f"step {step}: loss {report.loss:g}, gradient norm {report.grad_norm:g} in samples {ids}: not finite, "
            f"so training stopped ({why}). The samples are written down in {details}. "
            "Lower optim.lr, lengthen optim.warmup_steps, or set train.nonfinite: skip; go on with --resume auto."
        )


def build_part(cfg: RunConfig, world: World, parallel: ParallelConfig, weights: WeightSource | None) -> GPT:
    """This rank's part of the model of a run; without weights its parameters hold no numbers yet."""
    return apply.build(
        cfg.model,
        world,
        DTYPES[cfg.precision.compute],
        weights,
        parallel=parallel,
        reduce_dtype=DTYPES["fp32" if cfg.precision.reduce == "fp32" else cfg.precision.compute],
        recompute_mode=cfg.train.recompute,
        compile_blocks=cfg.train.compile and apply.can_compile(world.device),
    )
