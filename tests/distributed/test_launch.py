"""The launcher with real processes: what they compute, what the user sees, and what happens when something goes wrong.

The ranks run launched_rank.py, which adds numbers over all ranks and saves them as training would.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from gptworks.checkpoint import manifest
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.cli.main import main
from gptworks.config.derive import Layout
from gptworks.launch import process_group
from gptworks.launch.world import World

SCRIPT = Path(__file__).with_name("launched_rank.py")
LAUNCHER = """
import sys
from pathlib import Path
from gptworks.launch import supervise
restarts, nproc, stopped, folder, *rest = sys.argv[1:]
command = ({script!r}, folder, *rest)
more = dict(max_restarts=int(restarts), stopped_code=int(stopped) if stopped else None, preload=("torch",))
sys.exit(supervise.run(supervise.Job(command, int(nproc), Path(folder) / "logs", **more)))
"""


@contextmanager
def launched(
    folder: Path, *args: str | int, restarts: int = 0, nproc: int = 2, stopped: int | str = ""
) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    code = LAUNCHER.format(script=str(SCRIPT))
    command = [sys.executable, "-c", code, str(restarts), str(nproc), str(stopped), str(folder)]
    process = subprocess.Popen(
        [*command, *(str(arg) for arg in args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], *, code: int) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == code, (out, err)
    return out, err


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def values(folder: Path) -> dict[int, float]:
    """Step -> value; what was computed again after a restart must be what it was."""
    path = folder / "values.jsonl"
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        step, value = json.loads(line)
        assert found.setdefault(step, value) == value
    return found


def expected(steps: int, world_size: int = 2) -> dict[int, float]:
    value, found = 0.0, {}
    for step in range(1, steps + 1):
        value = 0.9 * value + sum(step * (rank + 1) for rank in range(world_size))
        found[step] = value
    return found


def log(folder: Path, rank: int) -> str:
    return (folder / "logs" / f"rank-{rank}.log").read_text()


def pid(folder: Path, rank: int, attempt: int = 0) -> int:
    return int((folder / f"rank-{rank}-{attempt}.pid").read_text())


def children(number: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def is_gone(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_two_processes_sum_and_rank_0_is_what_the_user_sees(tmp_path: Path) -> None:
    with launched(tmp_path, 3, stopped=143) as process:
        out, err = finish(process, code=0)
    assert values(tmp_path) == expected(3)
    assert f"2 processes, ranks 0 to 1 of 2; logs in {tmp_path / 'logs'}" in out
    assert "rank 0 ends after step 3" in out
    assert "rank 1" not in out
    assert err == ""
    for rank in range(2):
        assert log(tmp_path, rank).splitlines()[-1] == f"rank {rank} ends after step 3"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        assert (tmp_path / f"rank-{rank}.threads").read_text() == str(max(1, cores // 2))


def test_the_error_of_the_first_rank_that_fails_is_what_the_user_sees(tmp_path: Path) -> None:
    """It is the user's to fix, so that it is not tried again."""
    with launched(tmp_path, 6, "--mishap", "1:3:user", restarts=3) as process:
        _, err = finish(process, code=2)
    assert err == "error: rank 1 of 2: data/corpus: the store is too small.\n"
    assert log(tmp_path, 1).splitlines()[-1] == "error: data/corpus: the store is too small."
    assert "error: stopped because rank 1 failed: data/corpus: the store is too small." in log(tmp_path, 0)
    assert values(tmp_path) == expected(2)


def test_a_rank_that_ends_by_itself_with_2_is_not_started_again(tmp_path: Path) -> None:
    """As the command does for a mistake that it finds before there is a run; its log says which."""
    with launched(tmp_path, 6, "--mishap", "1:3:exit", restarts=3) as process:
        _, err = finish(process, code=2)
    assert err == (
        f"error: rank 1 of 2: ended with exit code 2. Its log, {tmp_path / 'logs' / 'rank-1.log'}, ends with:\n"
        "rank 1 of 2 begins after step 0\nerror: no such preset: gtp2\n"
    )


def test_a_killed_rank_is_started_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    with launched(tmp_path, 12, "--pause", "0.1", restarts=1) as process:
        wait_for(process, lambda: len(values(tmp_path)) >= 5)
        os.kill(pid(tmp_path, 1), signal.SIGKILL)
        out, err = finish(process, code=0)
    assert "rank 1 of 2: killed by SIGKILL." in err
    assert "starting again from the last checkpoint (1 of 1)" in err
    assert "begins after step 0" in out
    assert values(tmp_path) == expected(12)
    again = [line for line in out.splitlines() if "begins after step" in line][1]
    assert int(again.split()[-1]) >= 4
    assert "stopped because rank 1 failed: killed by SIGKILL" in log(tmp_path, 0)


@pytest.mark.slow
def test_a_hang_ends_with_the_name_of_the_rank_and_the_collective(tmp_path: Path) -> None:
    with launched(tmp_path, 10000, "--pause", "0.05", "--timeout", 4) as process:
        wait_for(process, lambda: len(values(tmp_path)) >= 3)
        time.sleep(0.5)  # a few heartbeats
        os.kill(pid(tmp_path, 1), signal.SIGSTOP)
        _, err = finish(process, code=75)
    assert "error: rank 1 of 2 has not answered for 4 s; last seen in step " in err
    assert "Rank 0 waited for it in step " in err
    assert ", all_reduce in train_a_little." in err
    assert "Traceback" not in err
    assert is_gone(pid(tmp_path, 1))


TWO_RANKS = """
import sys
from pathlib import Path
from gptworks.launch import supervise
preload = ("gptworks.cli.train", "gptworks.train.run")
sys.exit(supervise.run(supervise.Job(tuple(sys.argv[2:]), 2, Path(sys.argv[1]), preload=preload)))
"""


@contextmanager
def two_ranks(logs: Path, script: Path, *args: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Of a script that trains, as `gptworks train --nproc 2` starts them."""
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_RANKS, str(logs), str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_hang_that_no_group_notices_gets_its_name_from_the_heartbeat(settings: list[str], tmp_path: Path) -> None:
    """As under NCCL, whose own limit comes later and ends the process without a word."""
    out, here = tmp_path / "run", Path(__file__).with_name("hanging_rank.py")
    argv = ["train", *settings, "parallel.dp=2", "parallel.timeout=4", "checkpoint.every=0", "--out", str(out)]
    environment = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "logs" / "collectives-rank-")}
    with two_ranks(tmp_path / "logs", here, *argv, **environment) as process:
        _, err = finish(process, code=75)
    assert re.search(r"error: rank 1 of 2 did not come to step 3, (all_reduce in )?\w*sum\w* within 4 s\. ", err), err
    assert "It is alive, in step 3, called." in err
    assert "Traceback" not in err
    assert max(losses(out)) == 2
    trace = tmp_path / "logs" / "collectives-rank-0"
    assert f"Last collectives of each rank: {str(trace)[:-1]}N" in err
    assert b"all_reduce" in trace.read_bytes()


def test_every_group_of_the_mesh_gives_up_after_the_timeout(
    run_layout: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Not only the group of all ranks: torch's default for the others is half an hour."""

    def wait_in_vain(world: World) -> None:
        distributed.destroy_process_group()
        store = distributed.FileStore(str(tmp_path / "again"), 4)
        layout = Layout(dp=2, tp=2)
        again = process_group.join(layout, world.rank, world.device, store=store, timeout=2)
        axis = again.axis("tp")
        assert axis is not None
        given_up = f"given up by {again.coords.dp}"
        if again.coords.tp == 0:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                distributed.all_reduce(torch.zeros(1), group=axis.get_group())
            store.set(given_up, "yes")
        else:
            store.wait([given_up], timedelta(minutes=10))

    run_layout(Layout(dp=2, tp=2), wait_in_vain)


@pytest.mark.parametrize(
    ("number", "asked", "code"), [(signal.SIGINT, "", 130), (signal.SIGTERM, "", 0), (signal.SIGINT, 143, 143)]
)
def test_a_signal_lets_all_ranks_save_and_end(
    number: signal.Signals, asked: int | str, code: int, tmp_path: Path
) -> None:
    with launched(tmp_path, 100000, "--pause", "0.02", restarts=2, stopped=asked) as process:
        wait_for(process, lambda: len(values(tmp_path)) >= 3)
        process.send_signal(number)
        out, err = finish(process, code=code)
    step, value = json.loads((tmp_path / "saved.json").read_text())
    assert expected(step)[step] == value
    assert out.splitlines()[-1] == f"rank 0 ends after step {step}"
    assert err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_there_are_ranks_ends_it_without_a_word(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, 3) as process:
        wait_for(process, lambda: bool(children(process.pid)))  # it imports torch now, for a second or more
        process.send_signal(number)
        _, err = finish(process, code=128 + number)
    assert err == ""


@pytest.mark.slow
def test_the_second_ctrl_c_ends_all_ranks_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, 10, "--mishap", "1:2:late", restarts=2) as process:
        wait_for(process, lambda: len(values(tmp_path)) >= 1)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None, "the first signal waits for the step"
        process.send_signal(signal.SIGINT)
        finish(process, code=130)  # and not 0, with which the ranks end that have come to the end of their step
    assert "stopped at once; what is not in a checkpoint is lost." in log(tmp_path, 1)
    assert is_gone(pid(tmp_path, 0))
    assert is_gone(pid(tmp_path, 1))


def test_torchrun_starts_the_ranks_as_well(tmp_path: Path, held_port: Callable[[], int]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run(
        [*command, str(held_port()), str(SCRIPT), str(tmp_path), "4", "--mishap", "1:3:user"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert values(tmp_path) == expected(2), done.stderr
    assert done.returncode != 0
    assert "DataError: data/corpus: the store is too small." in done.stderr
    assert "TrainingError: stopped because rank 1 failed: data/corpus: the store is too small." in done.stderr


@pytest.mark.slow
def test_torchrun_does_not_try_a_mistake_of_the_user_again(tmp_path: Path, held_port: Callable[[], int]) -> None:
    """It starts ranks again after any failure; the next ones end at once, with the same words."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{held_port()}"]
    script = [str(SCRIPT), str(tmp_path), "4", "--mishap", "1:3:user"]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run([*command, *where, *script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("begins after step") == 2, "trained again"
    (ended,) = tmp_path.glob(".ended-*.json")
    assert "data/corpus: the store is too small." in json.loads(ended.read_text())["message"]
    assert "data/corpus: the store is too small." in done.stderr


# The command itself


@pytest.mark.slow
def test_repeated_signals_to_all_processes_do_not_interrupt_a_save(
    settings: list[str], one_process: dict[int, float], tmp_path: Path
) -> None:
    """As Slurm sends them, to the launcher and to every rank, while the launcher passes them on as well."""
    out, marker, script = tmp_path / "run", tmp_path / "saving", Path(__file__).with_name("saving_rank.py")
    argv = ["train", *settings, "parallel.dp=2", "--out", str(out)]
    with two_ranks(tmp_path / "logs", script, str(marker), "1", *argv) as process:
        wait_for(process, marker.exists)
        (copied,) = children(process.pid)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            for each in (process.pid, copied, *children(copied)):
                os.kill(each, number)
            time.sleep(0.15)
        shown, err = finish(process, code=0)
    assert err == ""
    saved = CheckpointFolder(out).latest()
    assert saved is not None
    found = manifest.read(saved)
    manifest.verify(saved, found)
    assert re.search(rf"SIG\w+: stopped after step {found.step} of 24 and saved", shown)
    assert main(["train", *settings, "--out", str(out), "--resume", "auto"]) == 0
    assert losses(out) == pytest.approx(one_process, abs=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", pytest.param("late", marks=pytest.mark.slow)])
def test_a_rank_that_is_suspended_while_all_save_is_named_and_a_slow_one_is_waited_for(
    how: str, settings: list[str], tmp_path: Path
) -> None:
    """A save may take hours, so that its group does not give up: only the beats tell that a rank is not there."""
    out, script = tmp_path / "run", Path(__file__).with_name("saving_rank.py")
    argv = ["train", *settings, "train.steps=2", "parallel.dp=2", "parallel.timeout=3", "--out", str(out)]
    with two_ranks(tmp_path / "logs", script, str(tmp_path / "saving"), how, *argv) as process:
        _, err = finish(process, code=0 if how == "late" else 75)
    if how == "late":
        assert err == ""
        return
    assert re.search(r"error: rank 1 of 2 has not answered for 3 s; last seen in .*\. Rank 0 was in step 2, ", err), err
    assert "Traceback" not in err
    assert CheckpointFolder(out).latest() is None


def losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def settings(small_store: Path) -> list[str]:
    return (
        "model.num_layers=2 model.hidden_size=16 model.num_heads=2 model.vocab_size=512 model.max_positions=16 "
        f"data.path={small_store} data.split=90,10 data.seq_len=16 batch.global_size=4 train.log_every=1 "
        "evaluate.every=0 train.steps=24 checkpoint.every=8 checkpoint.portable=false run.device=cpu run.threads=1 "
        "optim.lr=3e-3"
    ).split()


@pytest.fixture(scope="module")
def one_process(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    out = tmp_path_factory.mktemp("one") / "run"
    assert main(["train", *settings, "--out", str(out)]) == 0
    return losses(out)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["two nodes", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_s1_11_the_command_on_two_nodes_and_by_torchrun_equals_one_process(
    start: str, settings: list[str], one_process: dict[int, float], tmp_path: Path, held_port: Callable[[], int]
) -> None:
    """The pair is two launchers on loopback, each with one process."""
    train, port = ["-m", "gptworks", "train", *settings, "parallel.dp=2", "--out", str(tmp_path / "run")], held_port()
    commands = [
        [*train, "--nnodes", "2", "--node-rank", str(rank), "--master", f"127.0.0.1:{port}", "--nproc", "1"]
        for rank in range(2)
    ]
    if start == "torchrun":
        commands = [["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), *train]]
    processes = [
        subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = [finish(process, code=0)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert "2 processes, dp2" in said[0] and "done: 24 steps." in said[0]
    assert not any("done:" in other for other in said[1:])
    assert losses(tmp_path / "run") == pytest.approx(one_process, abs=5e-6)


@pytest.mark.slow
def test_training_with_a_rank_that_is_killed_equals_one_process(
    settings: list[str], one_process: dict[int, float], tmp_path: Path
) -> None:
    out = tmp_path / "many"
    many = ["--nproc", "2", "parallel.dp=2", "--max-restarts", "1", "--out", str(out)]
    command = [sys.executable, "-m", "gptworks", "train", *settings, *many]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(process, lambda: len(losses(out)) >= 10)
        (copied,) = children(process.pid)
        os.kill(children(copied)[-1], signal.SIGKILL)
        shown, err = finish(process, code=0)
    finally:
        process.kill()
        process.communicate()
    assert "rank 1 of 2: killed by SIGKILL." in err
    assert "resuming from" in shown
    assert "done: 24 steps." in log(out, 0)
    assert losses(out) == pytest.approx(one_process, abs=5e-6)
