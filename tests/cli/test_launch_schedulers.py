"""gptworks launch --to: the files that are written, what is refused, and what the script of Slurm does."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gptworks.cli.main import build_parser
from gptworks.config.load import load
from gptworks.errors import GPTWorksError

Call = Callable[..., Any]
FILES = Path(__file__).parents[1] / "fixtures" / "schedulers"
_spec = importlib.util.spec_from_file_location("make_files", FILES / "make_files.py")
assert _spec and _spec.loader
make_files = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_files)

# How much and how long is the planner's, which has tests of its own.
PLANNED = ("# memory: ", "# time: ")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(FILES / "run.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_plan(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(PLANNED)]


@pytest.mark.parametrize("file", make_files.COMMANDS)
def test_the_files_are_those_that_the_schedulers_accepted(file: str, folder: Path, call: Call) -> None:
    """tests/interop gives the files of tests/fixtures/schedulers to the schedulers themselves."""
    done = call("launch", *make_files.COMMANDS[file], "--out", file, "--force")
    wanted = (FILES / file).read_text(encoding="utf-8")
    assert without_plan((folder / file).read_text(encoding="utf-8")) == without_plan(wanted)
    assert f"Submit it with: {' '.join(done.out.splitlines()[-1].split()[3:-1])} {file}" in done.out
    assert "GiB" in done.out


def test_the_default_name_and_the_printed_file(folder: Path, call: Call) -> None:
    words = ["launch", "--to", "slurm", "-c", "run.yaml", "--nodes", "2", "--gpus-per-node", "8"]
    assert call(*words).out.startswith("run.sbatch:\n")
    printed = call(*words, "--out", "-").out
    assert without_plan(printed)[1:] and printed.startswith("#!/bin/bash\n")
    assert "error: run.sbatch: is there already." in call(*words, expect=2).err
    (folder / "run.sbatch").write_text("mine")
    call(*words, expect=2)
    assert (folder / "run.sbatch").read_text() == "mine", "nothing is lost"
    call(*words, "--force")
    assert (folder / "run.sbatch").read_text() != "mine"


def test_a_pod_gets_the_whole_configuration(folder: Path, call: Call) -> None:
    """Of the file, the one it is based on, the preset and the command line, as one file that means the same."""
    (folder / "more.yaml").write_text("base: run.yaml\noptim: {lr: 0.5}\n", encoding="utf-8")
    words = ["-c", "more.yaml", "--nodes", "2", "--gpus-per-node", "8", "train.seed=7"]
    text = call("launch", *make_files._POD, *words, "--out", "-").out
    config_map = next(yaml.safe_load_all(text))
    (folder / "inside.yaml").write_text(config_map["data"]["run.yaml"], encoding="utf-8")
    inside, outside = load("inside.yaml"), load("more.yaml", overrides=["train.seed=7", "run.out=runs/more"])
    assert inside == outside and (inside.optim.lr, inside.train.seed) == (0.5, 7)


# What the schedulers and the system tell a node, as the second of two.
TOLD = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "first",
    "PET_MASTER_PORT": "29400",
    "HOME": "home",
    "SKYPILOT_NODE_RANK": "1",
    "master": "first",
}


def command_in(text: str) -> list[str]:
    """The words of `gptworks train` in a manifest, a task or a script, with what the scheduler fills in."""
    documents = [] if text.startswith("#!") else list(yaml.safe_load_all(text))
    commands = [node["command"] for document in documents for node in nodes_of(document) if "command" in node]
    if commands:
        words = commands[0]
    else:
        script = (documents[0]["run"] if documents else text).replace("\\\n", "")
        words = shlex.split(script[script.index(" gptworks train ") :].split("&")[0].split("\n")[0])
    filled = [re.sub(r"\$\(?(\w+)\)?", lambda name: TOLD[name[1]], word) for word in words]
    return filled[filled.index("gptworks") + 1 :]


def nodes_of(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes_of(each)


@pytest.mark.parametrize("file", [file for file in make_files.COMMANDS if file != "one.sky.yaml"])
def test_every_file_starts_16_processes_by_options_that_there_are(file: str) -> None:
    args = build_parser().parse_args(command_in((FILES / file).read_text(encoding="utf-8")))
    assert (args.verb, args.resume, args.device) == ("train", "auto", "cpu" if file.startswith("cpu") else "cuda")
    if file.endswith(".sbatch") and file != "node.sbatch":
        assert (args.nproc, args.nnodes, args.max_restarts) == (None, "", 0), "srun starts them"
        return
    assert (args.nproc, args.nnodes, args.max_restarts) == (8, "2", 3)
    if file == "node.sbatch":
        assert (args.node_rank, args.master) == (None, ""), "srun says it"
    else:
        assert args.node_rank == 1 and args.master in ("first:29400", "run-0.run:29400")


def answer(document: dict[str, Any], code: int) -> str:
    """What Kubernetes or Kubeflow does about a pod that ended with that code, by the words of the manifest alone."""
    policies = [node["podFailurePolicy"] for node in nodes_of(document) if "podFailurePolicy" in node]
    restart = {node["restartPolicy"] for node in nodes_of(document) if "restartPolicy" in node}
    if document["kind"] == "PyTorchJob":  # the operator takes 128 and more for what passes
        assert restart == {"ExitCode"} and not policies
        return "again" if code >= 128 else "failed"
    assert restart == {"Never"}, "Kubernetes looks at exit codes only then"
    rules = [rule for rule in policies[0]["rules"] if "onExitCodes" in rule]
    actions = [rule["action"] for rule in rules if code in rule["onExitCodes"]["values"]]
    return {"FailJob": "failed", "Ignore": "again, not counted"}[actions[0]] if actions else "again"


@pytest.mark.parametrize("file", [file for file in make_files.COMMANDS if file.endswith(".k8s.yaml")])
def test_a_mistake_is_final_and_what_passes_is_tried_again(file: str) -> None:
    text = (FILES / file).read_text(encoding="utf-8")
    pods = next(each for each in yaml.safe_load_all(text) if any("restartPolicy" in node for node in nodes_of(each)))
    args = build_parser().parse_args(command_in(text))
    assert answer(pods, GPTWorksError.exit_code) == "failed"
    assert answer(pods, args.try_again_code).startswith("again"), "a rank was killed, or a machine is gone"
    assert answer(pods, 137).startswith("again"), "a pod was killed"
    stopped = answer(pods, args.stopped_code)
    assert stopped == ("again" if file.startswith("pytorchjob") else "again, not counted"), "it has saved"


def test_a_train_job_is_of_the_runtime_beside_it() -> None:
    made = {each["kind"]: each for each in yaml.safe_load_all((FILES / "trainjob.k8s.yaml").read_text())}
    runtime, job = made["TrainingRuntime"], made["TrainJob"]
    assert job["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"], "kind": runtime["kind"]}


SLURM = ["--to", "slurm", "-c", "run.yaml", "--nodes", "2", "--gpus-per-node", "8"]
POD = [*make_files._POD, "-c", "run.yaml", "--nodes", "2", "--gpus-per-node", "8"]
SKY = ["--to", "skypilot", "-c", "run.yaml", "--nodes", "2", "--gpus-per-node", "8"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "launch: nothing to do. Needed: --to SCHEDULER"),
        (["--to", "pbs", "-c", "run.yaml"], "--to: 'pbs' is not known. Needed: slurm, kubernetes, skypilot."),
        (["--to", "slurm", "--nodes", "2", "--gpus-per-node", "8"], "--to slurm: nothing to train"),
        (["--to", "slurm", "-c", "run.yaml", "--gpus-per-node", "8"], "--to slurm: --nodes not given"),
        (["--to", "slurm", "-c", "run.yaml", "--nodes", "2"], "--to slurm: --gpus-per-node not given"),
        ([*SLURM, "--processes-per-node", "4"], "--gpus-per-node 8 and --processes-per-node 4"),
        ([*SLURM[:-1], "none"], "--gpus-per-node: 'none'. Needed: a whole number, 1 or more."),
        ([*SLURM[:-1], "0"], "--gpus-per-node: '0'"),
        ([*SLURM, "--grace", "-3"], "--grace: '-3'"),
        ([*SLURM, "--max-restarts", "often"], "--max-restarts: 'often'"),
        ([*SLURM, "-c", "gone.yaml"], "gone.yaml: 1 problem\n  no such file"),
        ([*SLURM, "parallel.tp=3"], "parallel.tp: 3 does not divide model.num_heads (16)"),
        ([*SLURM, "parallel.fsdp=4"], "fsdp=4 x tp=2 needs 8 ranks, but the world has 16"),
        ([*SLURM, "--device", "a100-20g"], "device 'a100-20g' is unknown"),
        ([*SLURM, "--device", "v100-16g", "batch.micro_size=64", "train.recompute=none"], "--device v100-16g: "),
        ([*SLURM, "run.device=cpu"], "run.device: cpu, but the job would run on cuda."),
        ([*SLURM, "--time", "90"], "--time: '90' has no unit"),
        ([*SLURM, "--time", "6m"], "--time: 360 s leave nothing to train: 300 s of it are for saving"),
        ([*SLURM, "--kind", "job"], "--kind: means nothing to --to slurm."),
        ([*SLURM, "--task-per", "core"], "--task-per: 'core'. Needed: gpu or node."),
        ([*SLURM, "--volume", "/a:/b"], "--volume: /a:/b is a folder of a container. Add --image"),
        ([*SLURM, "--name", "My Run"], "--name: 'My Run'"),
        ([*SLURM, "--mount", "."], "--mount: not with --to."),
        ([*SLURM, "--out", "no/where/a.sbatch"], "no/where/a.sbatch: cannot be written (No such file or directory)"),
        ([*POD, "--kind", "cronjob"], "--kind: 'cronjob' is not known. Needed: job, pytorchjob, trainjob."),
        ([*POD, "--setup", "true"], "--setup: means nothing to --to kubernetes."),
        ([*POD, "run.out=/scratch/a"], "run.out: /scratch/a lies in no --volume (/data)"),
        ([*POD, "--time", "5m"], "--time: 300 s leave nothing to train"),
        (["--to", "kubernetes", *SLURM[2:]], "--image: not given, and pods are made of one."),
        (
            ["--to", "kubernetes", *SLURM[2:], "--image", "i"],
            "--volume: not given, and what a pod writes goes with it.",
        ),
        (SKY, "--image: not given, and a rented machine has no gptworks."),
        ([*SKY, "--image", "i"], "--volume: not given, and 2 machines share no disk."),
        ([*SKY, "--image", "i", "--volume", "claim:/data"], "--volume: claim is not a bucket."),
        ([*SKY, "--image", "i", "--volume", "s3://b:/data", "--task-per", "node"], "--task-per: means nothing to"),
        (["--image", "i", "gptworks", "train", "-c", "run.yaml"], "-c: only with --to. Before a command of your own"),
        (["--make-rank-table", "[0,8]", "--nodes", "2"], "--nodes: only with --to."),
        (["--make-rank-table", "[0,8]", "--image", "i"], "--make-rank-table: not with --image."),
    ],
)
def test_mistakes_are_answered_and_nothing_is_written(words: list[str], told: str, folder: Path, call: Call) -> None:
    assert told in call("launch", *words, expect=2).err
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


# The script of Slurm, with stand-ins for Slurm's programs and for gptworks. tests/interop has the real ones.

SRUN = """#!/bin/bash
echo x >> attempts
case $(wc -l < attempts) in {codes} esac
trap 'echo saved; exit 0' TERM
touch training
for ((i = 0; i < 600; i++)); do sleep 0.05; done
"""
SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM 7" ] && kill -TERM "$(pgrep -f "$PWD/bin/srun")"
"""


def start(folder: Path, call: Call, codes: str) -> subprocess.Popen[str]:
    call("launch", *SLURM, "--max-restarts", "1")
    programs = {"srun": SRUN.format(codes=codes), "scancel": SCANCEL, "gptworks": "#!/bin/bash\n"}
    programs["scontrol"] = '#!/bin/bash\necho "$*" > requeued\n'
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text, encoding="utf-8")
        (folder / "bin" / name).chmod(stat.S_IRWXU)
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return subprocess.Popen(["bash", "run.sbatch"], env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)


def test_before_the_limit_the_ranks_save_and_the_job_is_queued_again(folder: Path, call: Call) -> None:
    job = start(folder, call, "")
    while not (folder / "training").exists():
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate()
    assert job.returncode == 0 and (folder / "requeued").read_text() == "requeue 7\n"
    assert output.splitlines() == ["saved", "The time is up; job 7 goes back into the queue."]


@pytest.mark.parametrize(
    ("codes", "ended", "attempts", "is_requeued"),
    [
        ("1) exit 137 ;; 2) exit 0 ;;", 0, 2, False),
        ("1) exit 137 ;; 2) exit 1 ;;", 1, 2, False),
        ("1) exit 137 ;; 2) exit 75 ;;", 0, 2, True),
        ("*) exit 2 ;;", 2, 1, False),
        ("*) exit 143 ;;", 143, 1, False),
    ],
    ids=["killed", "a fault of ours", "killed too often", "a mistake", "cancelled"],
)
def test_what_failed_is_tried_again_and_a_mistake_is_not(
    codes: str, ended: int, attempts: int, is_requeued: bool, folder: Path, call: Call
) -> None:
    job = start(folder, call, codes)
    output, _ = job.communicate()
    assert job.returncode == ended, output
    assert len((folder / "attempts").read_text().splitlines()) == attempts
    assert ("The run ended with code 137. Attempt 2 of 2 begins" in output) is (attempts == 2)
    assert (folder / "requeued").exists() is is_requeued
    assert ("The run ended with code 75; job 7 goes back into the queue." in output) is is_requeued


def test_a_job_whose_nodes_fail_again_and_again_is_not_queued_for_ever(folder: Path, call: Call) -> None:
    first = start(folder, call, "*) exit 75 ;;")
    first.communicate()
    assert first.returncode == 0
    for file in ("requeued", "attempts"):
        (folder / file).unlink()
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    again = subprocess.run(["bash", "run.sbatch"], env=environment, capture_output=True, text=True)
    assert again.returncode == 75 and not (folder / "requeued").exists(), again.stdout
    assert (folder / "run-7.failures").read_text() == "75 on \n75 on a,b\n"


def test_a_batch_that_nobody_said_is_the_one_that_training_would_take(folder: Path, call: Call) -> None:
    words = ["--preset", "gpt2", "--nodes", "1", "--gpus-per-node", "1", "--out", "-", "data.path=x", "train.steps=10"]
    shown = call("launch", "--to", "slurm", *words)
    assert "batch 512 = 4 micro-batch x 128 accumulation x 1 data-parallel" in shown.out + shown.err
