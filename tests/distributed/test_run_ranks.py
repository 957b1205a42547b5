"""A run on several ranks: one of them writes, all agree when to stop and why to fail, and any layout can go on.

The ranks are started by the test; everything else is what `gptworks train` does.
"""

import contextlib
import errno
import io
import json
import math
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks
from gptworks import file_errors
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.checkpoint.formats import dcp
from gptworks.config.derive import Layout
from gptworks.config.schema import RunConfig
from gptworks.errors import GPTWorksError
from gptworks.launch import process_group
from gptworks.launch.ranks import Ranks
from gptworks.launch.world import World
from gptworks.train import loop
from gptworks.train import run as runs

RunLayout = Callable[..., list[Any]]
TWO = Layout(tp=2)


@pytest.fixture
def configured(small_store: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(*overrides: str, out: Path = tmp_path / "run") -> RunConfig:
        model = ["num_layers=1", "hidden_size=16", "num_heads=2", "vocab_size=512", "max_positions=16"]
        rest = ["data.split=90,10", "data.seq_len=16", "batch.global_size=4", "train.steps=4", "train.log_every=1"]
        here = [f"data.path={small_store}", f"run.out={out}", "run.device=cpu", "run.threads=1", "evaluate.every=0"]
        return gptworks.load_config(overrides=[*(f"model.{word}" for word in model), *rest, *here, *overrides])

    return make


def train(cfg: RunConfig, world: World, **options: Any) -> tuple[Any, str]:
    """On this rank: what came of it, or the error, and what was printed."""
    process_group.start = lambda *_: world  # type: ignore[assignment]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            return loop.train(cfg, **options), printed.getvalue()
        except GPTWorksError as error:
            return f"{type(error).__name__}: {error}", printed.getvalue()


def lines(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in {"tokens_per_sec", "mfu", "memory"} and not k.endswith("_seconds")}
        for line in found
    ]


def same_numbers(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    return len(mine) == len(theirs) and all(
        a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], abs=5e-6, rel=1e-5) for k in a)
        for a, b in zip(mine, theirs, strict=True)
    )


def test_two_ranks_write_what_one_writes(configured, run_layout: RunLayout, tmp_path: Path) -> None:
    settings = ["evaluate.every=2", "evaluate.batches=1", "checkpoint.every=2", "checkpoint.keep_best=true"]
    one, two = tmp_path / "one", tmp_path / "two"
    ((outcome, _),) = run_layout(Layout(), lambda world: train(configured(*settings, out=one), world))
    both = run_layout(TWO, lambda world: train(configured(*settings, "parallel.tp=2", out=two), world))
    assert [result.step for result, _ in both] == [4, 4]
    assert both[0][0] == both[1][0] == replace(outcome, folder=two, held_out_loss=both[0][0].held_out_loss)
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    assert same_numbers(lines(two), lines(one))
    assert "2 processes, tp2" in both[0][1]
    assert both[0][1].count("saved ") == 2
    assert both[1][1] == "", "only the main process speaks"
    step = two / "checkpoints" / "step-00000004"
    assert manifests.read(step).layout == "tp2"
    assert manifests.read(step).consumed == 16
    assert "state/__1_0.distcp" in manifests.read(step).files
    one_portable, two_portable = (run / "checkpoints" / step.name / "portable" for run in (one, two))
    assert {path.name for path in one_portable.iterdir()} == {path.name for path in two_portable.iterdir()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
def test_a_step_says_no_more_to_more_ranks(configured, run_layout: RunLayout, tmp_path: Path) -> None:
    """Collectives of steps that are logged, whatever they are for, as torch's profiler sees them on rank 0."""

    def collectives(num_ranks: int) -> Counter[str]:
        out = tmp_path / str(num_ranks)
        cfg = configured("train.profile=[2,3]", f"parallel.dp={num_ranks}", "batch.micro_size=1", out=out)
        run_layout(Layout(dp=num_ranks), lambda world: train(cfg, world))
        trace = json.loads((out / "profile" / "steps-2-3.json").read_text())
        return Counter(event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("gloo:"))

    two, four = collectives(2), collectives(4)
    assert two == four and two.keys() == {"gloo:all_reduce"}


def test_a_run_goes_on_with_another_number_of_ranks(configured, run_layout: RunLayout, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    settings = ["train.steps=6", "optim.decay_steps=6", "optim.warmup_steps=0", "checkpoint.every=2"]
    run_layout(Layout(), lambda world: train(configured(*settings, out=alone), world))
    run = tmp_path / "run"
    run_layout(TWO, lambda world: train(configured(*settings, "train.steps=2", "parallel.tp=2"), world))
    ((result, said),) = run_layout(
        Layout(), lambda world: train(configured(*settings, "train.steps=4"), world, resume_from="auto")
    )
    assert result.step == 4
    assert "changed: parallel.tp: 2 -> 1" in said
    both = run_layout(TWO, lambda world: train(configured(*settings, "parallel.tp=2"), world, resume_from="auto"))
    assert "changed: parallel.tp: 1 -> 2" in both[0][1]
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5, 6]
    assert same_numbers(lines(run), lines(alone))


LLAMA = ["norm=rmsnorm", "positions=rope", "mlp=swiglu", "bias=qkv", "qk_norm=false", "num_kv_heads=1"]


@pytest.mark.slow
def test_copies_of_heads_of_keys_are_saved_once(configured, run_layout: RunLayout, tmp_path: Path) -> None:
    """Two ranks share one head of keys and values: what they write, one process goes on from, and the other way."""
    settings = ["train.steps=6", "optim.decay_steps=6", "optim.warmup_steps=0", "checkpoint.every=2"]
    settings += [f"model.{word}" for word in LLAMA]
    alone, run = tmp_path / "alone", tmp_path / "run"
    run_layout(Layout(), lambda world: train(configured(*settings, out=alone), world))
    later = ["parallel.tp=2", "checkpoint.asynchronous=true"]
    run_layout(TWO, lambda world: train(configured(*settings, "train.steps=2", *later), world))
    step = run / "checkpoints" / "step-00000002"
    shapes = dcp.shapes(step / "state")
    assert shapes["model.blocks.0.attn.qkv.weight"] == shapes["optim.exp_avg.blocks.0.attn.qkv.weight"] == (32, 16)
    weights = gptworks.GPT.from_pretrained(step)
    assert weights.cfg.num_kv_heads == 1 and (step / "portable" / "config.json").is_file()
    first = gptworks.GPT.from_pretrained(alone / "checkpoints" / "step-00000002")
    for name, parameter in first.named_parameters():
        assert weights.get_parameter(name).detach() == pytest.approx(parameter.detach(), abs=1e-5), name
    run_layout(Layout(), lambda world: train(configured(*settings, "train.steps=4"), world, resume_from="auto"))
    run_layout(TWO, lambda world: train(configured(*settings, *later), world, resume_from="auto"))
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5, 6]
    assert same_numbers(lines(run), lines(alone))


def test_a_layout_alone_does_not_change_the_batch(configured, run_layout: RunLayout, tmp_path: Path) -> None:
    settings = ["batch.global_size=0", "batch.micro_size=2", "train.steps=0", "checkpoint.every=2"]
    run_layout(Layout(), lambda world: train(configured(*settings, "train.tokens=128"), world))
    more = [*settings, "train.tokens=256", "parallel.dp=2"]

    def go_on(*extra: str) -> list[Any]:
        return run_layout(Layout(dp=2), lambda world: train(configured(*more, *extra), world, resume_from="auto"))

    for error, _ in go_on():
        assert "was trained with 2 samples per step" in error
        assert "Set batch.global_size=2 to go on as before" in error
    both = go_on("batch.global_size=4")
    assert "changed: samples per step: 2 -> 4" in both[0][1]
    assert [result.step for result, _ in both] == [4 + 2] * 2, "8 samples in twos, 8 in fours"
    assert lines(tmp_path / "run")[-1]["tokens"] == 256
    ended = lines(tmp_path / "run")[-1]["lr"]
    assert ended == pytest.approx(configured().optim.min_lr), "the schedule ends with the training"


@pytest.mark.slow
def test_s1_09_a_run_goes_from_a_pipeline_of_shards_to_cut_matrices(configured, run_layout, tmp_path: Path) -> None:
    """Data, order, evaluation, schedule and state of a whole run, on two layouts, are those of one process."""
    settings = ["model.num_layers=2", "batch.micro_size=1", "optim.decay_steps=4", "optim.warmup_steps=0"]
    settings += ["checkpoint.every=2", "evaluate.every=2", "evaluate.batches=3", "data.mask_eod=true"]
    alone, run = tmp_path / "alone", tmp_path / "run"
    run_layout(Layout(), lambda world: train(configured(*settings, out=alone), world))
    degrees = ["train.steps=2", "parallel.pp=2", "parallel.fsdp=2"]
    first = run_layout(Layout(pp=2, fsdp=2), lambda world: train(configured(*settings, *degrees), world))
    assert "= 1 micro-batch x 2 accumulation x 2 data-parallel" in first[0][1]
    both = run_layout(TWO, lambda world: train(configured(*settings, "parallel.tp=2"), world, resume_from="auto"))
    assert [result.step for result, _ in both] == [4, 4]
    assert same_numbers(lines(run), lines(alone))


@pytest.mark.slow
def test_saving_beside_training_gives_the_same_run(configured, run_layout: RunLayout, tmp_path: Path) -> None:
    """With two ranks and with one; the slow writer is overtaken by training, and waited for at the end."""
    settings = ["checkpoint.every=1", "checkpoint.keep_last=9"]

    def slowly(world: World, out: Path, *extra: str) -> Any:
        publish, done = CheckpointFolder._publish, []
        report, overtaken = runs.Run.record, threading.Event()

        def slow(self: CheckpointFolder, *arguments: Any) -> None:
            if arguments[0].step == 1 and extra:
                assert overtaken.wait(60)
            publish(self, *arguments)
            done.append(("published", arguments[0].step))

        def count(self: runs.Run, step: int, *arguments: Any) -> None:
            done.append(("trained", step))
            if step == 2:
                overtaken.set()
            report(self, step, *arguments)

        CheckpointFolder._publish, runs.Run.record = slow, count  # type: ignore[method-assign]
        result, _ = train(configured(*settings, *extra, out=out), world)
        return result.step, done

    plain, beside, alone = tmp_path / "plain", tmp_path / "beside", tmp_path / "alone"
    run_layout(TWO, lambda world: slowly(world, plain))
    (first, order), _ = run_layout(TWO, lambda world: slowly(world, beside, "checkpoint.asynchronous=true"))
    run_layout(Layout(), lambda world: slowly(world, alone, "checkpoint.asynchronous=true"))
    assert first == 4
    assert order.index(("trained", 2)) < order.index(("published", 1)), "training did not wait"
    assert order.index(("published", 1)) < order.index(("trained", 3)), "the second save waited for the first"
    assert order[-1] == ("published", 4)
    assert lines(plain) == lines(beside)
    for step in sorted(path.name for path in (plain / "checkpoints").iterdir()):
        for run in (beside, alone):
            found = manifests.read(run / "checkpoints" / step)
            manifests.verify(run / "checkpoints" / step, found)
        portable = [run / "checkpoints" / step / "portable" / "model.safetensors" for run in (plain, beside)]
        assert portable[0].read_bytes() == portable[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("received", "by_all"),
    [
        ({1: signal.SIGINT}, "SIGINT"),
        ({0: signal.SIGTERM}, "SIGTERM"),
        ({0: signal.SIGINT, 1: signal.SIGTERM}, "SIGTERM"),
    ],
    ids=["one", "other", "both"],
)
def test_a_signal_stops_all_at_the_end_of_the_next_step(received, by_all, configured, run_layout: RunLayout) -> None:
    """It travels with the numbers of that step."""

    def interrupted(world: World) -> Any:
        count = runs.Run.record

        def count_and_raise(self: runs.Run, step: int, *arguments: Any) -> None:
            count(self, step, *arguments)
            if step == 3 and world.rank in received:
                signal.raise_signal(received[world.rank])

        runs.Run.record = count_and_raise  # type: ignore[method-assign]
        return train(configured("train.steps=100", "checkpoint.every=0"), world)

    for result, _ in run_layout(TWO, interrupted):
        assert (result.step, result.stopped_by) == (4, by_all)
    assert set(CheckpointFolder(Path(configured().run.out)).steps()) == {4}


def test_what_the_main_process_refuses_all_refuse_in_the_same_words(configured, run_layout, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    first, second = run_layout(TWO, lambda world: train(configured(), world)[0])
    assert first == second
    assert first.startswith(f"UsageError: {tmp_path / 'run'}: not empty (thesis.txt).")


def test_a_folder_that_only_the_main_process_sees_is_refused(configured, run_layout, tmp_path: Path) -> None:
    folders = [tmp_path / "shared", tmp_path / "private"]
    first, second = run_layout(TWO, lambda world: train(configured(out=folders[world.rank]), world)[0])
    for message in (first, second):
        assert message.startswith(f"UsageError: {folders[1]}: rank 1 on ")
        assert "run.out must be on a filesystem that all machines share." in message


def test_other_data_on_one_machine_is_refused(configured, run_layout: RunLayout) -> None:
    def with_own_data(world: World) -> str:
        prepare = loop.prepare

        def prepared(cfg: RunConfig) -> Any:
            setup = prepare(cfg)
            if world.rank == 1:
                type(setup.dataset).identities = property(lambda _: ["somethingelse"])  # type: ignore[assignment]
            return setup

        loop.prepare = prepared
        return train(configured(), world)[0]

    first, second = run_layout(TWO, with_own_data)
    assert first == second
    assert "DataError: data.path: rank 1 reads other data (store somethingels) than rank 0" in first


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_or_passed_over_by_all(configured, run_layout, tmp_path: Path) -> None:
    """Each rank looks at a share of the files: what one of them finds damaged, all of them leave alone."""
    run_layout(TWO, lambda world: train(configured("checkpoint.every=2"), world))
    wanted = lines(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    shard = checkpoints / "step-00000004" / "state" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    named = str(shard.parent.parent)
    said = run_layout(TWO, lambda world: train(configured(), world, resume_from=named)[0])
    for message in said:
        assert message.startswith("DamagedCheckpoint: ")
        assert str(shard) in message
    assert {path.name for path in checkpoints.iterdir()} == {"step-00000002", "step-00000004"}

    (first, told), (second, quiet) = run_layout(TWO, lambda world: train(configured(), world, resume_from="auto"))
    assert (first.step, second.step, quiet) == (4, 4, "")
    assert f"resuming from {checkpoints / 'step-00000002'}" in told
    assert f"damaged: {shard}: " in told
    assert {path.name for path in checkpoints.iterdir()} == {
        "step-00000002",
        "step-00000004",
        "damaged-step-00000004",
    }
    assert lines(tmp_path / "run") == wanted, "the steps are computed again, none is skipped"


def test_a_loss_that_is_not_finite_stops_all_and_is_written_down_once(configured, run_layout, tmp_path: Path) -> None:
    def broken(world: World) -> str:
        backward = loop.backward

        def step(*arguments: Any, **options: Any) -> Any:
            gradients = backward(*arguments, **options)
            if options["step"] == 3:
                batch = replace(gradients.micro_batches[0], sample_ids=torch.tensor([world.rank + 40]))
                return replace(gradients, loss=math.nan, micro_batches=[batch])
            return gradients

        loop.backward = step
        return train(configured("checkpoint.every=0"), world)[0]

    first, second = run_layout(TWO, broken)
    assert first == second
    assert "TrainingError: step 3: loss nan" in first
    assert "in samples 40, 41" in first
    (line,) = (tmp_path / "run" / "nonfinite.jsonl").read_text().splitlines()
    assert json.loads(line)["sample_ids"] == [40, 41]
    apart = tmp_path / "run" / "checkpoints" / "stopped-step-00000002"
    assert str(apart) in first
    assert manifests.read(apart).consumed == 8
    assert CheckpointFolder(tmp_path / "run").latest() is None


def test_ranks_fail_together(run_layout: RunLayout) -> None:
    def work(world: World) -> list[str]:
        ranks = Ranks(world)

        def fail() -> None:
            raise ValueError("our own fault")

        def said(function: Callable[[], object]) -> str:
            try:
                return f"fine: {function()}"
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        return [
            said(lambda: ranks.on_all(lambda: fail() if world.rank == 1 else None)),
            said(lambda: ranks.on_main(fail)),
            said(lambda: ranks.on_main(lambda: world.rank + 5)),
            said(lambda: ranks.gather(world.rank)),
        ]

    same = ["fine: 5", "fine: [0, 1]"]
    assert run_layout(TWO, work) == [
        ["TrainingError: rank 1 of 2: ValueError: our own fault", "ValueError: our own fault", *same],
        ["ValueError: our own fault", "TrainingError: rank 0 of 2: ValueError: our own fault", *same],
    ]


def test_a_program_that_trains_again_and_again_makes_no_more_groups(configured, run_layout, tmp_path: Path) -> None:
    def number_of_groups(world: World) -> list[int]:
        from torch.distributed import distributed_c10d

        found = []
        for number in range(3):
            assert train(configured("train.steps=1", out=tmp_path / f"run-{number}"), world)[0].step == 1
            found.append(len(distributed_c10d._world.pg_map))
        return found

    for first, *later in run_layout(TWO, number_of_groups):
        assert later == [first, first]


def test_what_the_system_refuses_on_one_rank_is_said_by_all(run_layout: RunLayout, tmp_path: Path) -> None:
    """What, where, what is needed, what to do: as one process says it, not `PermissionError`."""
    (tmp_path / "a file").write_text("")
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "a file"))

    def work(world: World) -> list[str]:
        ranks = Ranks(world)

        def fail() -> None:
            raise refused

        def said(function: Callable[[], object]) -> str:
            try:
                return f"fine: {function()}"
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        return [
            said(lambda: ranks.on_all(lambda: fail() if world.rank == 1 else None)),
            said(lambda: ranks.on_main(fail)),
        ]

    words = f"TrainingError: {file_errors.explain(refused)}"
    assert re.search(r"a file: permission denied: .* Needed: .* Change its mode or owner", words)
    assert run_layout(TWO, work) == [[f"{words} (rank 1 of 2)", words]] * 2


@pytest.mark.slow
def test_a_rank_of_a_machine_that_has_just_been_started_resumes_as_the_others_do(
    configured, run_layout: RunLayout, tmp_path: Path
) -> None:
    """It has not seen the starts before, so that it says `never`."""
    run_layout(TWO, lambda world: train(configured("parallel.tp=2", "train.steps=2"), world))
    both = run_layout(
        TWO, lambda world: train(configured("parallel.tp=2"), world, resume_from="never" if world.rank else "auto")
    )
    assert [result.step for result, _ in both] == [4, 4]
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4]
