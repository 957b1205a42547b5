"""A run in progress: the live objects of training, and what is done with them besides stepping."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptworks import run_paths
from gptworks.checkpoint import folder as folders
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.manifest import Manifest
from gptworks.config import yaml_text
from gptworks.config.schema import ParallelConfig, RunConfig
from gptworks.counted import counted
from gptworks.data import mixture
from gptworks.data.loader import Batch
from gptworks.data.passed_over import PassedOver
from gptworks.launch.ranks import Ranks
from gptworks.launch.world import World
from gptworks.parallel import recompute, shard
from gptworks.parallel.build import FreshWeights, WeightSource, build, can_compile
from gptworks.parallel.parts import Part
from gptworks.parallel.slices import Pieces, to_fill, to_store
from gptworks.plan import sizes
from gptworks.train import (
    event_file,
    memory,
    native_blocks,
    opening,
    optim,
    plot,
    prefetch,
    resume,
    run_folder,
    schedule,
    trackers,
)
from gptworks.train.console import LogLine, TrainConsole
from gptworks.train.events import EventLog
from gptworks.train.guard import Guard
from gptworks.train.metrics import Metrics, Observer
from gptworks.train.opening import Source
from gptworks.train.precision import DTYPES, LossScaler
from gptworks.train.profile import profiled
from gptworks.train.progress import Progress
from gptworks.train.saving import Saving, SmoothedLoss
from gptworks.train.setup import Setup
from gptworks.train.speed import DATA, SAVING, Stopwatch, find_peak, peak_memory
from gptworks.train.step import StepReport


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
        provenance: dict[str, Any],
        ranks: Ranks,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.cfg, self.setup, self.folder, self.ranks = cfg, setup, folder, ranks
        self.saving = Saving(cfg.checkpoint, cfg.model, setup, folder, say=lambda text: self.console.say(text))
        checkpoints = self.saving.checkpoints
        ranks.on_main(checkpoints.remove_leftovers)
        ranks.on_all(lambda: opening.refuse_different_data(setup, ranks))
        source = opening.find_source(resume_from, checkpoints, cfg, setup, ranks)
        if source:
            stages = resume.stages_going_on(source.manifest, setup.dataset, str(source.path))
            setup = setup.going_on(cfg, source.manifest.step, source.manifest.consumed).with_stages(stages)
            self.setup = setup

        needed = sizes.checkpoint_bytes(cfg.model, cfg.checkpoint.portable)
        ranks.on_main(lambda: folders.check_free_space(folder, needed))
        weights = None if source else self._first_weights()  # what a checkpoint fills is not drawn before
        self.part = ranks.on_all(lambda: build_part(cfg, setup.world, setup.parallel, weights))
        self.optimizer = optim.build(self.part, cfg.optim)
        self.who_computes = native_blocks.use_where_known(self.part, self.optimizer, cfg.train, cfg.precision.compute)
        self.scaler = LossScaler(cfg.precision.scaler, enabled=cfg.precision.compute == "fp16")
        self.progress, self.losses, self.guard = Progress(), SmoothedLoss(), Guard(cfg.train.guard)
        if cfg.train.guard.action != "off":
            self.part.keep_sample_losses()
        self.batches = setup.batches()
        self.events = EventLog(folder, ranks, setup.origins)
        if source:
            self.restore(source.path, source.manifest)
            self.batches.consumed = source.manifest.consumed
            self.batches.passed_over = PassedOver.from_json(source.manifest.passed_over)

        self._begin_writing(source, provenance, observers)
        self.reader = self._closing.enter_context(prefetch.reading(self.batches, setup.world.device))
        self.saved_at = time.monotonic()
        self.watch = Stopwatch(cfg.model, cfg.data.seq_len, peak=self.peak, num_devices=ranks.size)

    def _first_weights(self) -> WeightSource:
        """The weights that training begins with where no checkpoint of this run has any."""
        cfg, tokenizer = self.cfg, self.setup.dataset.tokenizer
        if cfg.init.checkpoint:
            return self.ranks.on_all(lambda: opening.weights_to_tune(cfg.init.checkpoint, cfg.model, tokenizer))
        return FreshWeights(cfg.init, cfg.model.num_layers, cfg.train.seed)

    def _begin_writing(self, source: Source | None, provenance: dict[str, Any], observers: Sequence[Observer]) -> None:
        """Into the folder and on the screen: what the run is, then a line for each step that is logged."""
        cfg, setup, folder, ranks = self.cfg, self.setup, self.folder, self.ranks
        self.peak = find_peak(setup.world.device, cfg.precision.compute, self.who_computes.multiply)
        ranks.on_main(lambda: self._write_down(provenance))
        quiet = not ranks.is_main
        self._closing = contextlib.ExitStack()
        self.console = TrainConsole(setup.last_step, cfg.train.log_style, first_step=self.progress.step, quiet=quiet)
        self._closing.callback(self.console.close)
        self._greet(source)
        ranks.on_main(lambda: self._go_back(source.damaged if source else {}))
        progress, say = self.progress, self.console.say
        ranks.on_main(lambda: event_file.forget_after(folder, progress.step, progress.rollbacks, say))
        self.metrics = Metrics(
            folder,
            resumed_step=self.progress.step,
            quiet=quiet,
            say=self.console.say,
            observers=observers,
            trackers=ranks.on_all(lambda: [] if quiet else trackers.begin(cfg, folder, self.progress.step)),
        )
        self._closing.callback(self.metrics.close)
        profiled_steps = () if quiet else cfg.train.profile
        self.profiler = self._closing.enter_context(profiled(profiled_steps, folder, self.progress.step))

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

    def finish(self) -> None:
        """Come back when the last checkpoint is whole, and only those are left that are kept."""
        self.saving.finish(self.losses)

    # Before the first step

    def _write_down(self, provenance: dict[str, Any]) -> None:
        """`provenance`: how the run was started, and what was predicted of it."""
        plan = memory.as_json(provenance["plan"], self.peak)
        data = [store.facts() for store in self.setup.dataset.stores]
        run_folder.write_environment(self.folder, **{**provenance, "plan": plan}, data=data, mfu_of=vars(self.peak))
        run_folder.replace_text(self.folder / run_paths.CONFIG, yaml_text.dump(self.cfg.model_dump(mode="json")))

    def restore(self, source: Path, manifest: Manifest) -> None:
        """All that a checkpoint holds but the samples that come next."""
        from gptworks.checkpoint.formats import dcp  # slow to import, and only needed once there is a checkpoint

        self.part.reshard_all()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        moments = optim.moments(self.part, self.optimizer)
        wanted = to_fill(self.part.as_stored(self._named_state(moments)), tied=self.cfg.model.tied)
        dcp.load_into(source / folders.STATE, wanted, self.ranks)
        optim.set_moments(self.part, self.optimizer, moments, manifest.optimizer_updates)
        self.scaler.restore(manifest.scaler)
        self.losses = SmoothedLoss(manifest.smoothed_loss)
        self.guard.restore(manifest.guard)
        self.progress = Progress(
            step=manifest.step,
            updates=manifest.optimizer_updates,
            held_out_loss=manifest.held_out_loss,
            best=manifest.best,
            evaluations_since_best=manifest.evaluations_since_best,
            held_out_samples=manifest.held_out_samples,
            skipped_in_a_row=manifest.skipped_in_a_row,
            rollbacks=manifest.rollbacks,
            unlogged_loss=manifest.unlogged_loss,
            unlogged_steps=manifest.unlogged_steps,
        )

    def roll_back(self, good: Path, damaged: Mapping[Path, str]) -> None:
        """To a checkpoint of this run; the samples since then are passed over. What follows is what a run would do
        that was started from the checkpoint which is saved here. `damaged`: newer ones, with the reason for each."""
        manifest = self.ranks.on_main(lambda: manifests.read(good))
        rollbacks = self.progress.rollbacks + 1
        self.restore(good, manifest)
        self.progress.rollbacks = rollbacks
        self.batches.pass_over_since(manifest.consumed)
        self.ranks.on_main(lambda: self._go_back(damaged))
        self.metrics.go_back(manifest.step)
        self.save()

    def _named_state(self, moments: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        weights = [(f"model.{name}", p.detach()) for name, p in self.part.named_parameters()]
        return weights + [(f"optim.{name}", tensor) for name, tensor in moments.items()]

    def _greet(self, source: Source | None) -> None:
        cfg, batch, say = self.cfg, self.setup.batch, self.console.say
        device, count = self.setup.world.device, sizes.num_parameters(cfg.model)
        size = f"{count / 1e6:,.1f}M" if count >= 1e5 else f"{count:,}"
        say(
            f"model: {size} parameters, {cfg.precision.compute} on {device.type}\n"
            f"batch: {counted(batch.global_size, 'sample')} of {counted(cfg.data.seq_len, 'token')} = "
            f"{batch.micro_size} micro-batch x {batch.accumulation} accumulation x "
            f"{batch.data_parallel} data-parallel\n"
            f"data:  {counted(self.setup.train_samples.per_epoch, 'sample')} per epoch; "
            f"{counted(self.setup.last_step, 'step')}"
        )
        if cfg.train.log_style != "fleetx":  # whose lines have none
            say(str(self.peak))
        if self.ranks.size > 1:
            say(f"ranks: {self.ranks.size} processes, {self.setup.world.layout}")
        for store in self.setup.train_samples.sources:
            if store.note:
                say(store.note)
        for text in self.setup.notes:
            say(f"note:  {text}")
        if self.setup.dataset.tokenizer is None:
            say("data:  its tokenizer is not known; data.tokenizer names it, so that the model can read and write text")
        if cfg.init.checkpoint and source is None:
            say(f"weights from {cfg.init.checkpoint}")
        if self.who_computes.line:
            say(self.who_computes.line)
        if cfg.train.compile and not can_compile(device):
            say("train.compile: no C++ compiler found (g++ or clang++), so nothing is compiled. Install one for speed.")
        elif cfg.train.compile:
            say("train.compile: the first step compiles the blocks, which may take a minute; later steps are faster")
            self.console.doing("compiling")
        for note in (
            recompute.note(cfg.train.recompute, cfg.model.attention, cfg.model.dropout_attention, device.type),
            shard.note(self.setup.parallel),
        ):
            if note:
                say(note)
        if source:
            manifest = source.manifest
            say(f"resuming from {source.path} ({manifest.consumed:,} samples done)")
            if manifest.passed_over:
                say(f"  {counted(len(self.batches.passed_over), 'sample')} passed over by train.guard")
            if self.setup.stages and self.setup.stages[-1].first == self.batches.place():
                say(f"  weights of the stores change from sample {self.batches.place():,} on")
            for change in resume.changes(manifest.config, cfg):
                say(f"  changed: {change}")
            if manifest.global_size not in (0, batch.global_size):
                say(
                    f"  changed: samples per step: {manifest.global_size} -> {batch.global_size}; steps that are left "
                    "are counted from the samples done"
                )

    def _go_back(self, damaged: Mapping[Path, str]) -> None:
        best = self.progress.best if self.cfg.checkpoint.keep_best else None
        for reason in damaged.values():
            self.console.say(f"  damaged: {reason}")
        best_step = int(best["step"]) if best else None
        for path in self.saving.checkpoints.go_back_to(self.progress.step, best_step, list(damaged)):
            self.console.say(f"  later checkpoint set aside: {path}")
        if damaged:
            self.console.say(f"  the steps after {self.progress.step} are computed again")

    # During and after

    def next_batches(self) -> list[Batch]:
        with self.watch.timed(DATA):
            return self.reader.next_step()

    def record(self, step: int, report: StepReport) -> None:
        """Note how far the run is, and what the step's losses were."""
        progress = self.progress
        progress.step = step
        progress.updates += report.updated
        progress.skipped_in_a_row = 0 if report.updated else progress.skipped_in_a_row + 1
        if report.updated or not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            self.losses.see(report.loss)  # a spike that was kept from the weights says nothing of them
        if report.updated:
            progress.unlogged_loss += report.loss
            progress.unlogged_steps += 1
        self.console.step(step)
        self.watch.count(self.setup.batch.global_size * self.cfg.data.seq_len)
        self.profiler.step()

    def log(self, step: int, lr: float, report: StepReport) -> None:
        cfg, setup, speed = self.cfg, self.setup, self.watch.lap()
        if self.watch.peak is not self.peak:
            self.peak = self.watch.peak
            self.console.say(f"step {step}: {self.peak}")
        loss = self.progress.mean_loss() if report.updated else report.loss
        per_epoch = max(1, setup.train_samples.per_epoch // setup.batch.global_size)
        # As FleetX counts: epochs are whole batches. Those that were of another size count as they would today.
        epoch, batch_in_epoch = divmod(self.batches.consumed // setup.batch.global_size - 1, per_epoch)
        line = LogLine(
            step=step,
            last_step=setup.last_step,
            epoch=epoch,
            batch_in_epoch=batch_in_epoch,
            loss=loss,
            lr=lr,
            next_lr=schedule.lr_at(step + 1, cfg.optim, setup.last_step),
            grad_norm=report.grad_norm,
            speed=speed,
            loss_scale=report.loss_scale if self.scaler.enabled else None,
            num_ranks=self.ranks.size,
        )
        values = {
            "loss": loss,
            "lr": lr,
            "grad_norm": report.grad_norm,
            "tokens": self.batches.consumed * cfg.data.seq_len,
            "tokens_per_sec": round(speed.tokens_per_sec, 1),
        }
        values |= {f"{name}_seconds": round(seconds, 6) for name, seconds in speed.seconds.items()}
        if speed.saving_seconds:
            values["saving_seconds"] = round(speed.saving_seconds, 6)
        if memory := peak_memory(setup.world.device):
            values["memory"] = memory
        if speed.mfu is not None:
            values["mfu"] = round(speed.mfu, 4)
        if self.scaler.enabled:
            values["loss_scale"] = report.loss_scale
        if self.progress.updates < step:
            values["skipped"] = step - self.progress.updates
        self.metrics.log(step, values)
        self.console.log(line)

    def is_time_to_save(self) -> bool:
        """By the clock of the main process, for all ranks."""
        minutes = self.cfg.checkpoint.every_minutes
        if not minutes:
            return False
        return self.ranks.on_main(lambda: time.monotonic() - self.saved_at >= 60 * minutes)

    def is_best(self) -> bool:
        """Whether the present weights are the best so far, by what `checkpoint.best_by` names."""
        return self.progress.best is not None and self.progress.best["step"] == self.progress.step

    def save(self) -> None:
        """Come back when the checkpoint is whole, or, when asynchronous, when a copy of the state is made."""
        self.saved_at = time.monotonic()
        with self.watch.paused(), self.watch.timed(SAVING):
            self.saving.wait()
            self.metrics.sync()
            is_best = self.cfg.checkpoint.keep_best and self.is_best()
            self.saving.save(self._manifest(), self.state(), self.losses, is_best=is_best)

    def save_apart(self) -> Path:
        """Save the state of a run that has gone wrong, where no run goes on from by itself."""
        return self.saving.save_apart(self._manifest(), self.state())

    def state(self) -> dict[str, Tensor | Pieces]:
        """What this rank holds of weights (model.) and optimizer (optim.), by the names of the whole."""
        self.part.reshard_all()
        named = self._named_state(optim.moments(self.part, self.optimizer))
        return to_store(self.part.as_stored(named), tied=self.cfg.model.tied)

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
            held_out_samples=progress.held_out_samples,
            skipped_in_a_row=progress.skipped_in_a_row,
            passed_over=self.batches.passed_over.as_json(),
            rollbacks=progress.rollbacks,
            stages=mixture.as_json([stage for stage in self.setup.stages if stage.first < self.batches.place()]),
            guard=self.guard.state(),
            smoothed_loss=self.losses.value,
            unlogged_loss=progress.unlogged_loss,
            unlogged_steps=progress.unlogged_steps,
            torch_version=str(torch.__version__),
            layout=str(self.setup.world.layout),
        )


def build_part(cfg: RunConfig, world: World, parallel: ParallelConfig, weights: WeightSource | None) -> Part:
    """This rank's part of the model of a run; without weights its parameters hold no numbers yet."""
    return build(
        cfg.model,
        world,
        DTYPES[cfg.precision.compute],
        weights,
        parallel=parallel,
        reduce_dtype=DTYPES["fp32" if cfg.precision.reduce == "fp32" else cfg.precision.compute],
        recompute_mode=cfg.train.recompute,
        compile_blocks=cfg.train.compile and can_compile(world.device),
    )
