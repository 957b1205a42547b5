"""A real Slurm on this machine runs the script: two nodes, a requeue, a killed rank, a mistake (`make test-interop`).

Needs slurmctld, slurmd, slurm-client and munge (packages of Debian) and the rights of root. They run in a folder of
their own, on ports of their own, and end with the test; nothing of the machine's own Slurm is touched.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptworks.cli.main import main

pytestmark = pytest.mark.interop

FILES = Path(__file__).parents[1] / "fixtures" / "schedulers"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={control}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=a NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=8 RealMemory=8000 Gres=gpu:8 State=UNKNOWN
NodeName=b NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=8 RealMemory=8000 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
TINY = """\
model: {{num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 512, max_positions: 32}}
data: {{path: {store}, seq_len: 16}}
batch: {{global_size: 4, micro_size: 1}}
train: {{steps: {steps}, log_every: 1}}
checkpoint: {{every: 20}}
parallel: {{dp: 4}}
run: {{threads: 1}}
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "MASTER_ADDR": "127.0.0.1",  # the nodes' names mean nothing to this machine's resolver
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def do(self, *words: str | Path) -> str:
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout + done.stderr

    def submit(self, file: str) -> str:
        return self.do("sbatch", "--parsable", file).strip()

    def job(self, number: str) -> dict[str, str]:
        """Asked again where the controller does not answer in time, as on a busy machine."""
        words = ["scontrol", "show", "job", number]
        while (done := subprocess.run(words, capture_output=True, text=True, env=self.environment)).returncode:
            assert "Invalid job id" not in done.stderr, done.stderr
            time.sleep(0.2)
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait_for(self, number: str, condition: Callable[[], bool]) -> None:
        while not condition():
            state = self.job(number)["JobState"]
            assert state not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), self.log(number)
            time.sleep(0.05)

    def ended(self, number: str) -> dict[str, str]:
        while (job := self.job(number))["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            time.sleep(0.2)
        return job

    def log(self, number: str) -> str:
        return Path(f"tiny-{number}.log").read_text(encoding="utf-8") if Path(f"tiny-{number}.log").exists() else ""


def missing() -> str:
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not on PATH: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd needs the rights of root"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, held_port: Callable[[], int]) -> Iterator[Slurm]:
    if missing():
        pytest.skip(missing())
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state", "a", "b"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o400)
    ports = {name: held_port() for name in ("control", "first", "second")}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, **ports), encoding="utf-8")
    # Any device will do as a GPU that nobody computes on.
    gpus = "".join(f"NodeName={node} Name=gpu File=/dev/tty[0-7]\n" for node in "ab")
    (folder / "gres.conf").write_text(gpus, encoding="utf-8")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    conf = ["-f", str(folder / "slurm.conf")]
    commands = [
        ["munged", "-F", f"--socket={folder}/munge/socket", *munge, "--force"],
        ["slurmctld", "-D", *conf],
        ["slurmd", "-D", *conf, "-N", "a"],
        ["slurmd", "-D", *conf, "-N", "b"],
    ]
    found = Slurm(folder)
    daemons = []
    try:
        for command in commands:
            with (folder / "daemons.log").open("ab") as log:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=found.environment))
            if command[0] == "munged":
                while not (folder / "munge" / "socket").exists():
                    assert daemons[0].poll() is None, (folder / "daemons.log").read_text()
                    time.sleep(0.05)
        while subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True, env=found.environment
        ).stdout.split() != ["2"]:
            assert all(daemon.poll() is None for daemon in daemons), (folder / "daemons.log").read_text()
            time.sleep(0.1)
        yield found
    finally:
        subprocess.run(["scancel", "--state=RUNNING"], env=found.environment, capture_output=True)
        time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


@pytest.fixture
def run(small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes tiny.yaml and tiny.sbatch here; gives the run folder."""
    monkeypatch.chdir(tmp_path)

    def make(*words: str, steps: int = 400, store: Path = small_store) -> Path:
        Path("tiny.yaml").write_text(TINY.format(store=store, steps=steps), encoding="utf-8")
        options = ["--nodes", "2", "--processes-per-node", "2", "--time", "30m"]
        assert main(["launch", "--to", "slurm", "-c", "tiny.yaml", *options, *words]) == 0
        return Path("runs/tiny")

    return make


def steps_of(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["step"] for line in lines if "loss" in line]


@pytest.mark.parametrize("words", [[], ["--task-per", "node"]], ids=["task per process", "task per node"])
def test_a_job_is_told_to_save_is_requeued_and_goes_on(
    slurm: Slurm, run: Callable[..., Path], words: list[str]
) -> None:
    folder = run(*words)
    job = slurm.submit("tiny.sbatch")
    slurm.wait_for(job, lambda: len(steps_of(folder)) >= 3)
    slurm.do("scancel", "--batch", "--signal=USR1", job)  # as Slurm itself does before the limit
    slurm.wait_for(job, lambda: slurm.job(job)["JobState"] == "PENDING")
    saved = steps_of(folder)[-1]
    assert 3 <= saved < 400 and (folder / "checkpoints" / f"step-{saved:08}").is_dir(), slurm.log(job)
    # Not after the two minutes that Slurm takes; but its credentials count in seconds, and one that is as old as the
    # order to end the first start counts as revoked with it ("Killing non-startable batch JobId").
    slurm.do("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    ended = slurm.ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), slurm.log(job)
    assert steps_of(folder) == list(range(1, 401)), "no step is lost and none is done twice"
    assert f"job {job} goes back into the queue" in slurm.log(job), "the log of both"
    assert f"resuming from {folder}/checkpoints/step-{saved:08}" in slurm.log(job)


def test_slurm_itself_tells_the_job_before_its_limit(slurm: Slurm, run: Callable[..., Path]) -> None:
    folder = run("--time", "3m", "--grace", "60", steps=1_000_000)
    job = slurm.submit("tiny.sbatch")
    slurm.wait_for(job, lambda: slurm.job(job)["JobState"] == "PENDING" and slurm.job(job)["Restarts"] == "1")
    saved = steps_of(folder)[-1]
    assert (folder / "checkpoints" / f"step-{saved:08}").is_dir(), slurm.log(job)
    assert f"The time is up; job {job} goes back into the queue" in slurm.log(job)
    slurm.do("scancel", job)


def test_a_killed_rank_starts_all_again_from_the_last_checkpoint(slurm: Slurm, run: Callable[..., Path]) -> None:
    folder = run()
    job = slurm.submit("tiny.sbatch")
    slurm.wait_for(job, lambda: (folder / "checkpoints" / "step-00000020").is_dir())
    pids = [line.split()[0] for line in slurm.do("scontrol", "listpids", f"{job}.0", "a").splitlines()[1:]]
    os.kill(int(pids[-1]), signal.SIGKILL)
    ended = slurm.ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), slurm.log(job)
    assert "Attempt 2 of 4 begins from the last checkpoint." in slurm.log(job)
    assert steps_of(folder) == list(range(1, 401))


def test_a_mistake_ends_the_job_with_2(slurm: Slurm, run: Callable[..., Path], tmp_path: Path) -> None:
    run(store=tmp_path / "nowhere")
    job = slurm.submit("tiny.sbatch")
    ended = slurm.ended(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), slurm.log(job)
    assert "nowhere" in slurm.log(job) and "Attempt" not in slurm.log(job)


@pytest.mark.parametrize("file", sorted(path.name for path in FILES.glob("*.sbatch")))
def test_slurm_would_start_it(slurm: Slurm, file: str) -> None:
    if file == "pyxis.sbatch":
        assert "--container-image=" in (FILES / file).read_text(encoding="utf-8")  # srun has it where pyxis is
    said = slurm.do("sbatch", "--test-only", FILES / file)
    assert "to start at" in said and "nodes a,b" in said.replace("[", "").replace("]", ""), said
