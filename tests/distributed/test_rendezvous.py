"""Ranks that cannot work together: a clear error on each of them, exit code 2, nobody left behind.

The ranks are real processes that run the command, each with the environment that a launcher would give it; they are
forked from this one, which has imported torch already. What they see of CUDA is patched.
"""

import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gptworks.train.run  # noqa: F401  # once, and not by every rank
from gptworks.cli.main import main
from gptworks.config.schema import ParallelConfig, RunFolderConfig
from gptworks.launch import process_group

SMALL = [f"model.{key}" for key in ("num_layers=2", "hidden_size=16", "num_heads=2", "max_positions=16")]
SETTINGS = [*SMALL, "data.seq_len=16", "batch.global_size=6", "train.steps=2", "run.threads=1", "parallel.dp=auto"]
Environment = dict[str, str]


def _rank(environment: Environment, argv: list[str], output: Path, patch: Callable[[], None] | None) -> None:
    sys.stdout = sys.stderr = output.open("w")
    os.environ.update(environment)
    if patch is not None:
        patch()
    code = main(argv)
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture
def refused(small_store: Path, tmp_path: Path, held_port: Callable[[], int]) -> Callable[..., list[str]]:
    """What each rank said: one for each environment, all of which end by themselves with exit code 2, or `code`."""

    def run(
        *environments: Environment,
        patches: dict[int, Callable[[], None]] | None = None,
        timeout: int = 60,
        device: str = "cpu",
        port: int = 0,
        more: dict[int, list[str]] | None = None,
        code: int = 2,
    ) -> list[str]:
        context = multiprocessing.get_context("fork")
        settings = [*SETTINGS, f"data.path={small_store}", f"parallel.timeout={timeout}", f"run.device={device}"]
        argv = ["train", *settings, "--out", str(tmp_path / "run")]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or held_port())}
        outputs = [tmp_path / f"{number}.txt" for number in range(len(environments))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: none of ours runs here
            processes = [
                context.Process(
                    target=_rank,
                    args=(
                        shared | environment,
                        [*argv, *(more or {}).get(number, [])],
                        output,
                        (patches or {}).get(number),
                    ),
                )
                for number, (environment, output) in enumerate(zip(environments, outputs, strict=True))
            ]
            for process in processes:
                process.start()
        try:
            for process in processes:
                process.join()
            texts = [output.read_text() for output in outputs]
            assert [process.exitcode for process in processes] == [code] * len(processes), texts
        finally:
            for process in processes:
                process.kill()
        assert not any("Traceback" in text for text in texts), texts
        assert not (tmp_path / "run").exists(), "nothing was written"
        return texts

    return run


def told(rank: int, world_size: int, **more: str) -> Environment:
    number, size = str(rank), str(world_size)
    return {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": size} | more


def sees(count: int, identity: str) -> Callable[[], None]:
    """A patch: so many devices of CUDA, the chosen one with this identity."""

    def patch() -> None:
        cuda: Any = torch.cuda
        cuda.is_available, cuda.device_count = (lambda: count > 0), (lambda: count)
        cuda.set_device, cuda.get_device_properties = (lambda _: None), (lambda _: SimpleNamespace(uuid=identity))

    return patch


def test_ranks_that_disagree_about_the_world_size(refused: Callable[..., list[str]]) -> None:
    for text in refused(told(0, 2), told(1, 3)):
        assert "WORLD_SIZE: rank " in text
        assert "was told 2" in text and "was told 3" in text


@pytest.mark.parametrize("data", ["a store", "a text"])
def test_ranks_with_other_configurations(data: str, refused: Callable[..., list[str]], tmp_path: Path) -> None:
    """As where a file was changed on one machine only; the keys are named. A text is prepared before anything else."""
    more = {0: list[str](), 1: ["optim.lr=2e-4", "model.num_heads=1"]}
    if data == "a text":
        (tmp_path / "corpus.txt").write_text("a few words " * 1000)
        more = {rank: [*words, f"data.path={tmp_path / 'corpus.txt'}"] for rank, words in more.items()}
    for text in refused(told(0, 2), told(1, 2), more=more):
        assert "was started with other settings than rank 0" in text
        assert "model.num_heads: 2 there, 1 here; " in text
        assert "; optim.lr: 0.0003 there, 0.0002 here. Needed: the same" in text


def test_ranks_with_other_versions(refused: Callable[..., list[str]]) -> None:
    def older() -> None:
        process_group.__version__ = "0.0.1"

    for text in refused(told(0, 2), told(1, 2), patches={1: older}):
        assert "gptworks: " in text and "there, 0.0.1 here. Needed: the same versions" in text


def test_an_environment_that_contradicts_itself_ends_the_other_ranks_too(refused: Callable[..., list[str]]) -> None:
    for text in refused(told(0, 2), told(1, 2, LOCAL_RANK="2")):
        assert "LOCAL_RANK: 2 of LOCAL_WORLD_SIZE 2. Needed: 0 to 1. Found: LOCAL_RANK=2, LOCAL_WORLD_SIZE=2" in text


def by_srun(rank: int, **more: str) -> Environment:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    return {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **step} | more


def test_what_srun_says_and_contradicts_itself_ends_the_other_ranks_too(refused: Callable[..., list[str]]) -> None:
    for text in refused(by_srun(0), by_srun(1, SLURM_LOCALID="2")):
        assert "SLURM_LOCALID: 2 of SLURM_STEP_TASKS_PER_NODE 2. Needed: 0 to 1. Found: " in text


def test_two_processes_of_the_same_rank(refused: Callable[..., list[str]]) -> None:
    for text in refused(told(0, 3), told(1, 3), told(1, 3)):
        assert "are both told to be rank 1. Needed: each rank once." in text


def test_a_port_that_another_program_uses(refused: Callable[..., list[str]]) -> None:
    """One that takes connections and says nothing: torch alone would wait for it without end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        port = listener.getsockname()[1]
        first, second = refused(told(0, 2), told(1, 2), port=port, timeout=1)
    assert f"MASTER_PORT: {port} is in use by another program" in first
    assert f"what listens at 127.0.0.1:{port} is not rank 0 of this run (no answer for 1 s)" in second


def test_a_rank_that_does_not_come(refused: Callable[..., list[str]]) -> None:
    for text in refused(told(0, 3), told(1, 3), timeout=2, code=75):
        assert (
            "could not connect to the other ranks (rank 2 of 3 has not connected: timed out after 2 s). Check that all"
            in text
        )


def test_a_device_that_is_not_there(refused: Callable[..., list[str]]) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "0,9"}
    patches = {0: sees(1, "GPU-a"), 1: sees(1, "GPU-a")}
    for text in refused(told(0, 2, **visible), told(1, 2, **visible), patches=patches, device="cuda"):
        assert "CUDA_VISIBLE_DEVICES=0,9 names 2 devices, but only 1 of them can be used: 9 is not there" in text


def test_a_half_visible_set_of_devices(refused: Callable[..., list[str]]) -> None:
    patches = {rank: sees(2, f"GPU-{rank}") for rank in range(3)}
    for text in refused(told(0, 3), told(1, 3), told(2, 3), patches=patches, device="cuda"):
        assert "3 or more processes on this machine, and each sees 2 devices" in text


def test_two_ranks_that_share_a_device(refused: Callable[..., list[str]]) -> None:
    """Each sees one, as with srun --gpus-per-task=1, but it is the same one."""
    visible = {"CUDA_VISIBLE_DEVICES": "0"}
    patches = {0: sees(1, "GPU-a"), 1: sees(1, "GPU-a")}
    for text in refused(told(0, 2, **visible), told(1, 2, **visible), patches=patches, device="auto"):
        assert "ranks 0 and 1 share one device (GPU-a)" in text


def test_one_rank_without_a_device_ends_the_others_too(refused: Callable[..., list[str]]) -> None:
    patches = {0: sees(2, "GPU-a"), 1: sees(0, "")}
    first, second = refused(told(0, 2), told(1, 2), patches=patches, device="cuda")
    assert "run.device: cuda is not available here" in second
    assert "run.device: cuda is not available here" in first and "(rank 1 of 2)" in first


def test_devices_of_two_kinds(refused: Callable[..., list[str]]) -> None:
    patches = {0: sees(2, "GPU-a"), 1: sees(0, "")}
    for text in refused(told(0, 2), told(1, 2), patches=patches, device="auto"):
        assert "has cpu, rank 0" in text and "has cuda" in text


def _three_worlds(environment: Environment) -> None:
    os.environ.update(environment)
    for number, layout in enumerate(({"fsdp": 2}, {"dp": 2}, {"fsdp": 2})):
        if number and environment["RANK"] == "0":
            time.sleep(0.3)  # the other one comes first, while what was said before can still be heard
        world = process_group.start(ParallelConfig(timeout=10, **layout), RunFolderConfig(device="cpu", threads=1))
        assert vars(world.layout)[next(iter(layout))] == 2
        counted = torch.ones(())
        torch.distributed.all_reduce(counted)
        assert counted == 2
    process_group.close()
    os._exit(0)


@pytest.mark.parametrize("store", ["of rank 0", "of torchrun"])
def test_one_world_after_another_in_the_same_processes(store: str, held_port: Callable[[], int]) -> None:
    """In a notebook or a program of the user's own: what ranks said before the first is not said for the second."""
    port = held_port()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("fork")
    if store == "of torchrun":
        shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as above
        processes = [context.Process(target=_three_worlds, args=(shared | told(rank, 2),)) for rank in (0, 1)]
        for process in processes:
            process.start()
    keeper = []
    if store == "of torchrun":
        keeper.append(torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    try:
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        keeper.clear()
        for process in processes:
            process.kill()


def _one_world(environment: Environment, late: float) -> None:
    os.environ.update(environment)
    time.sleep(late)
    process_group.start(ParallelConfig(timeout=20, dp=2), RunFolderConfig(device="cpu", threads=1))
    counted = torch.ones(())
    torch.distributed.all_reduce(counted)
    assert counted == 2
    os._exit(0)


def test_attempts_that_torchruns_nodes_count_differently(held_port: Callable[[], int]) -> None:
    """Its store outlives attempts, and the node that did not fail still counts 0: ranks of the new attempt find each
    other all the same, also when the other one comes before rank 0."""
    port = held_port()
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    context = multiprocessing.get_context("fork")
    attempts = [
        {1: 0.0},  # alone, and gone before rank 0 came
        {0: 0.0, 1: 0.0},
        {0: 0.5, 1: 0.0},
        {0: 0.0, 1: 0.5},
    ]
    keeper = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    keeper.set("gptworks/1/leader", "of-an-attempt-that-failed")
    for number, lates in enumerate(attempts):
        processes = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as above
            for rank, late in lates.items():
                count = {"TORCHELASTIC_RESTART_COUNT": str(number if rank else 0)}
                environment = agent | told(rank, 2) | count
                processes.append(context.Process(target=_one_world, args=(environment, late)))
                processes[-1].start()
        try:
            if len(lates) == 1:
                store = torch.distributed.PrefixStore("gptworks/1/of-an-attempt-that-failed", keeper)
                store.wait(["rank/1"])  # it has said that it is there, and is killed
                processes[0].kill()
                continue
            for process in processes:
                process.join()
            assert [process.exitcode for process in processes] == [0, 0], f"attempt {number}"
        finally:
            for process in processes:
                process.kill()
