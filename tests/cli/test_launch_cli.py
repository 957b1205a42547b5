"""gptworks launch, and the options of train that start several processes: what is refused before any starts."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.errors import LostRunError, UsageError
from gptworks.launch import rank_env, rdma, supervise
from gptworks.launch.nodes import PORT, Nodes

Call = Callable[..., Any]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[supervise.Job]:
    """What would have been started."""
    found: list[supervise.Job] = []

    def run(job: supervise.Job) -> int:
        found.append(job)
        return 0

    monkeypatch.setattr(supervise, "run", run)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", rank_env.FAILURES, rank_env.ATTEMPT):
        monkeypatch.delenv(name, raising=False)
    return found


# Rank tables


def test_s4_04_a_rank_table_is_made_merged_and_shown(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = "10.155.111.140", "10.155.111.141"
    for machine in (first, second):
        done = call("launch", "--make-rank-table", "[0,8]", "--server-ip", machine)
        assert f"hccl_8p_01234567_{machine}.json: 1 machine, 8 ranks" in done.out
    tables = [f"hccl_8p_01234567_{machine}.json" for machine in (first, second)]
    call("launch", "--merge-rank-tables", *tables, "--out", "both.json")
    data = json.loads((tmp_path / "both.json").read_text())
    assert data["server_count"] == "2"
    assert [d["rank_id"] for server in data["server_list"] for d in server["device"]] == [str(i) for i in range(16)]
    shown = call("launch", "--show-rank-table", "both.json").out
    assert "node 1  10.155.111.141  ranks [8,16]  devices 0, 1, 2, 3, 4, 5, 6, 7" in shown


def test_a_table_can_be_printed(call: Call) -> None:
    printed = call("launch", "--make-rank-table", "[0,2)", "--device-ips", "a,b", "--server-ip", "h", "--out", "-").out
    assert [device["device_ip"] for device in json.loads(printed)["server_list"][0]["device"]] == ["a", "b"]


def test_this_machine_has_an_address(call: Call) -> None:
    printed = call("launch", "--make-rank-table", "[0,1]", "--out", "-").out
    assert json.loads(printed)["server_list"][0]["server_id"].count(".") == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--make-rank-table", "8"], "--make-rank-table: '8' is not a range"),
        (["--show-rank-table", "none.json"], "none.json: cannot be read"),
        (["--show-rank-table", "none.json", "--out", "x"], "--out: nothing is written"),
        (["--merge-rank-tables", "none.json", "--server-ip", "a"], "--server-ip: only with --make-rank-table"),
        (["--make-rank-table", "[0,1]", "--server-ip", "a", "--out", "/nowhere/x"], "/nowhere/x: cannot be written"),
    ],
)
def test_what_launch_refuses(args: list[str], message: str, call: Call) -> None:
    done = call("launch", *args, expect=2)
    assert done.err.startswith(f"error: {message}")


# Starting


def test_processes_of_one_machine(recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job]) -> None:
    """The ranks get the command as it was typed, so that the run's record of it is what the user did."""
    typed = ["train", "-c", str(recipe), "--out", str(tmp_path / "run"), "--nproc", "2", "parallel.dp=2"]
    call(*typed, "--max-restarts", "3")
    log_dir = tmp_path / "run" / "logs"
    command = ("-m", "gptworks", *typed, "--max-restarts", "3")
    preload = ("gptworks.cli.train", "gptworks.train.run", "gptworks.checkpoint.formats.dcp")
    assert jobs == [supervise.Job(command, 2, log_dir, Nodes(), 3, preload=preload)]
    assert not (tmp_path / "run").exists(), "this process writes nothing of the run"


@pytest.mark.parametrize(
    ("ended", "options", "code"),
    [
        (75, [], 75),
        (75, ["--try-again-code", "203"], 203),
        (LostRunError("node 0 is gone"), ["--try-again-code", "203"], 203),
        (2, ["--try-again-code", "203"], 2),
        (UsageError("no"), ["--try-again-code", "203"], 2),
        (1, ["--try-again-code", "203"], 1),
    ],
)
def test_a_scheduler_may_have_its_own_code_for_what_is_to_be_tried_again(
    ended: int | Exception,
    options: list[str],
    code: int,
    recipe: Path,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_: supervise.Job) -> int:
        if isinstance(ended, Exception):
            raise ended
        return ended

    monkeypatch.setattr(supervise, "run", run)
    call("train", "-c", recipe, "--out", tmp_path / "run", "--nproc", "2", *options, expect=code)


@pytest.mark.parametrize(
    ("said", "layout"),
    [
        (["--dry-run", "--nproc", "3", "batch.global_size=6"], "dp3: 3 processes"),
        (["--dry-run", "--world", "4", "batch.global_size=8"], "dp4: 4 processes"),
        (["--dry-run", "--nproc", "2", "parallel.tp=2"], "tp2: 2 processes"),
    ],
)
def test_processes_without_a_layout_are_replicas(
    said: list[str], layout: str, recipe: Path, tmp_path: Path, call: Call
) -> None:
    done = call("train", "-c", recipe, "--out", tmp_path / "run", *said, "batch.micro_size=1")
    assert f"layout           {layout}" in done.out


def test_s2_05_logs_go_where_they_are_wanted(
    recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job]
) -> None:
    call("train", "-c", recipe, "--out", tmp_path / "run", "--nproc", "2", "parallel.dp=2", "--log-dir", tmp_path / "l")
    assert jobs[0].log_dir == tmp_path / "l"


def test_s4_03_processes_from_a_rank_table(recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job]) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json", "both.json")]
    addresses = ("10.1.1.1", "127.0.0.1")
    for file, machine in zip(files[:2], addresses, strict=True):
        call("launch", "--make-rank-table", "[0,8]", "--server-ip", machine, "--out", file)
    call("launch", "--merge-rank-tables", files[0], files[1], "--out", files[2])
    table = ["--rank-table", files[2], "parallel.dp=16", "batch.global_size=32"]
    call("train", "-c", recipe, "--out", tmp_path / "run", *table, "--rank-range", "[8,16]")
    assert jobs[0].nproc == 8
    assert jobs[0].nodes == Nodes(2, 2, 1, "10.1.1.1", PORT, tuple(range(8)), (8, 8), addresses)


def test_the_same_command_on_every_machine(recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job]) -> None:
    ips = ["--node-ips", "203.0.113.1,127.0.0.1", "parallel.dp=4", "batch.global_size=8"]
    call("train", "-c", recipe, "--out", tmp_path / "run", *ips)
    assert (jobs[0].nproc, jobs[0].nodes.rank) == (2, 1), "as many on each as the layout needs"


def test_srun_with_one_task_per_machine(
    recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {"PROCID": "1", "STEP_NUM_TASKS": "2", "LOCALID": "0", "JOB_NODELIST": "gpu[07-08]", "NODEID": "1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")  # its port, so that two jobs of a machine are not in each other's way
    call("train", "-c", recipe, "--out", tmp_path / "run", "--nnodes", "2", "parallel.dp=2")
    call("train", "-c", recipe, "--out", tmp_path / "run", "--nnodes", "2", "--nproc", "2", "batch.global_size=8")
    assert [(job.nodes, job.nproc) for job in jobs] == [(Nodes(2, 2, 1, "gpu07", 24711), nproc) for nproc in (1, 2)]


def test_what_would_be_started_on_several_machines_is_shown(
    recipe: Path, small_store: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job]
) -> None:
    """As a line for a shell; and on which disks what must be."""
    machines = ["--nnodes", "2", "--node-rank", "1", "--master", "127.0.0.1:1234", "--max-restarts", "3"]
    typed = ["train", "-c", str(recipe), "--out", str(tmp_path / "run"), "parallel.dp=2", *machines]
    shown = call(*typed, "--dry-run").out
    *_, shared, _, line = shown.splitlines()
    assert shared.startswith(f"shared by all machines: {tmp_path / 'run'} (checkpoints, metrics).")
    assert f"shared or copied: {small_store}. May be local" in shared
    words = shlex.split(line)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words and f"GPTWORKS_LOG_DIR={tmp_path / 'run' / 'logs'}" in words
    assert " ".join(words).count("-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 3") == 1
    again = ["--resume", "auto"]  # torchrun does not tell its ranks to go on where they were
    started = ["-m", "gptworks.launch.rank_process", "--", "-m", "gptworks", *typed, *again]
    assert words[-len(started) :] == started
    assert jobs == [] and not (tmp_path / "run").exists()


def test_a_rank_of_the_shown_command_starts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from gptworks.cli import train

    monkeypatch.setenv(rank_env.LOG_DIR, "logs")
    assert not train._starts_processes(argparse.Namespace(nproc=2), None)


KUBEFLOW = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0.job", "MASTER_PORT": "7", "NPROC_PER_NODE": "2"}


def test_a_pod_of_kubeflow_starts_its_ranks(
    recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(f"PET_{name}", value)
    command = ["train", "-c", recipe, "--out", tmp_path / "run", "parallel.dp=auto", "batch.global_size=8"]
    call(*command)
    assert (jobs[0].nodes, jobs[0].nproc) == (Nodes(2, 2, 1, "node-0.job", 7), 2)
    done = call(*command, "--nproc", "4", expect=2)
    assert "--nproc: 4, but PET_NPROC_PER_NODE is 2. Needed: the same." in done.err


ONE_OR_TWO = ["--nnodes", "1:2", "--node-rank", "0", "--master", "a", "--nproc", "1"]


def test_one_or_two_machines(recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job]) -> None:
    call("train", "-c", recipe, "--out", tmp_path / "run", *ONE_OR_TWO, "parallel.dp=auto")
    assert jobs[0].nodes == Nodes(2, 1, 0, "a", PORT)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nproc", "0"], "--nproc: 0. Needed: 1 or more"),
        (["--nproc", "3", "parallel.dp=2"], "needs 2"),
        (["--nproc", "2", "model.num_layers=0"], "model.num_layers"),
        (["--nproc", "2", "--max-restarts", "-1", "parallel.dp=2"], "--max-restarts: -1"),
        (["--nnodes", "2", "parallel.dp=2"], "--nnodes 2: needs --master"),
        (["--nnodes", "2", "--master", "a", "--node-rank", "0", "parallel.tp=1"], "--nproc: not given"),
        (["--nproc", "2", "parallel.dp=auto", "batch.global_size=3", "batch.micro_size=1"], "3 is not a multiple of"),
        (["--nproc", "4", "parallel.tp=auto"], "4 does not divide model.num_heads (2)"),
        (["--nproc", "4", "parallel.pp=auto", "batch.micro_size=1"], "4 pipeline stages, but the model has 2 layers"),
        (["--nproc", "2", "parallel.pp=auto", "batch.micro_size=4"], "fewer than the 2 pipeline stages"),
        ([*ONE_OR_TWO, "parallel.dp=2"], "--nnodes 1:2: the number of processes may change, but parallel has room"),
        ([*ONE_OR_TWO, "parallel.dp=auto", "batch.micro_size=4"], "4 is not a multiple of"),
        ([*ONE_OR_TWO, "parallel.dp=auto", "batch.global_size=0"], "the batch would be 2 or 4 samples"),
        (["--nnodes", "2:4", *ONE_OR_TWO[2:], "parallel.dp=auto"], "is not a multiple of"),
        (["--rank-table", "none.json"], "none.json: cannot be read"),
        (["--master", "a"], "--master: of how many machines"),
        (["--rdma", "--nproc", "2", "parallel.dp=2"], "--rdma: the device is cpu"),
    ],
)
def test_what_is_wrong_is_said_before_a_process_starts(
    args: list[str], message: str, recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job]
) -> None:
    done = call("train", "-c", recipe, "--out", tmp_path / "run", *args, expect=2)
    assert message in done.err
    assert jobs == []


def test_a_folder_in_use_is_refused_before_a_process_starts(
    recipe: Path, finished: Path, call: Call, jobs: list[supervise.Job]
) -> None:
    done = call("train", "-c", recipe, "--out", finished, "--nproc", "2", "parallel.dp=2", expect=2)
    assert "not empty" in done.err
    assert jobs == []


def test_logs_alone_do_not_make_a_folder_full(recipe: Path, tmp_path: Path, call: Call) -> None:
    """The launcher has begun them before the run looks at its folder."""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    call("train", "-c", recipe, "--out", tmp_path / "run", "train.steps=1")


def test_processes_that_torchrun_started_start_no_more(
    recipe: Path, tmp_path: Path, call: Call, jobs: list[supervise.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "--nproc", "2", expect=2)
    assert "torchrun has started the processes already" in done.err
    assert jobs == []


@pytest.mark.parametrize(("resume", "again"), [("never", "auto"), ("auto", "auto"), ("elsewhere", "elsewhere")])
def test_a_restart_goes_on_from_the_runs_own_checkpoint(
    resume: str, again: str, recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse
    from types import SimpleNamespace

    from gptworks.cli import train

    def chosen(attempt: str, out: Path) -> str:
        monkeypatch.setenv(rank_env.ATTEMPT, attempt)
        config = SimpleNamespace(run=SimpleNamespace(out=str(out)))
        return train._resume_from(argparse.Namespace(resume=resume), config)

    assert chosen("0", tmp_path) == resume
    assert chosen("1", tmp_path) == again, "nothing saved yet"
    assert chosen("1", finished) == "auto"


def test_s1_12_rdma_sets_the_transport_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in rdma.TRANSPORT:
        monkeypatch.setenv(name, "before")
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(rdma, "_DEVICES", tmp_path)
    assert rdma.enable("cuda").startswith("rdma: NCCL_IB_DISABLE=0, NCCL_NET=IB; cards mlx5_0.")
    assert os.environ["NCCL_NET"] == "IB"


def test_s1_12_rdma_is_refused_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptworks.errors import UsageError

    with pytest.raises(UsageError, match="--rdma: the device is cpu, where processes talk through gloo"):
        rdma.enable("cpu")
    monkeypatch.setattr(rdma, "_DEVICES", tmp_path / "none")
    with pytest.raises(UsageError, match="--rdma: no RDMA card on this machine"):
        rdma.enable("cuda")


def test_launching_on_one_machine_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from gptworks.launch import nodes, supervise; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_processes_alone_are_replicas_and_a_layout_alone_starts_its_processes(
    small_store: Path, tmp_path: Path, run_cli: Any
) -> None:
    """--nproc 2 means parallel.dp=2, which is written down: to go on from a run folder needs no --nproc."""
    shape = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=1", "model.vocab_size=512"]
    settings = [*shape, "model.max_positions=16", f"data.path={small_store}", "batch.global_size=4"]
    out = tmp_path / "run"
    done = run_cli("train", *settings, "train.steps=2", "--out", out, "--nproc", "2")
    assert "  dp: 2\n" in (out / "config.yaml").read_text() or "dp: 2," in (out / "config.yaml").read_text()
    assert "2 processes, ranks 0 to 1 of 2" in done.stdout and "ranks: 2 processes, dp2" in done.stdout
    done = run_cli("train", "-c", out / "config.yaml", "train.steps=3", "--resume", "auto")
    assert "ranks: 2 processes, dp2" in done.stdout and "step 3/3" in done.stdout
