"""Twenty faults in a row: does a run on two machines lose a step?

    python benchmarks/faults.py [--faults 20] [--json FILE]

Two machines are two network namespaces with a bridge between them (root, iproute2), two ranks each. Against the peer,
the same run in one process that nothing happens to: every step must be there once, with the same loss. The table is
that of docs/howto/launch.md.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

import net  # noqa: E402

TIMEOUT_S = 8  # parallel.timeout: after which a rank that does not answer is given up
TOLERANCE = 1e-4  # of a loss: four ranks add up in another order than one
TEXT = (
    "model.num_layers=2 model.hidden_size=16 model.num_heads=2 model.vocab_size=512 model.max_positions=16 "
    "data.split=90,10 data.seq_len=16 batch.global_size=8 train.log_every=1 optim.lr=3e-3 optim.schedule=constant "
    "checkpoint.every=5 checkpoint.keep_last=3 checkpoint.portable=false run.device=cpu run.threads=1 "
    "train.check_memory=off"
)
SETTINGS = TEXT.split()


class Run:
    """The command on both machines, started again where it was killed."""

    def __init__(self, folder: Path, data: Path, machines: list[net.Machine]) -> None:
        self.folder, self.machines, self.out = folder, machines, folder / "run"
        self.settings = [*SETTINGS, f"data.path={data}", "train.steps=1000000"]
        self.launchers: list[subprocess.Popen[bytes]] = [self.start(k) for k in range(2)]

    def start(self, machine: int) -> subprocess.Popen[bytes]:
        where = ["--nnodes", "2", "--node-rank", str(machine), "--master", self.machines[0].address, "--nproc", "2"]
        many = [*where, "--max-restarts", "1000", "--resume", "auto", "--out", str(self.out)]
        layout = ["parallel.dp=4", f"parallel.timeout={TIMEOUT_S}"]
        command = [sys.executable, "-m", "gptworks", "train", *self.settings, *layout, *many]
        with (self.folder / f"machine-{machine}.txt").open("ab") as log:
            return subprocess.Popen(self.machines[machine].command(command), stdout=log, stderr=log)

    def step(self) -> int:
        return max(losses(self.out), default=0)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"no more steps; see {self.folder}")
            time.sleep(0.05)

    def processes(self, machine: int) -> list[int]:
        """The launcher, its agent and the ranks."""
        found, left = [], [self.launchers[machine].pid]
        while left:
            found.append(left.pop())
            children = Path(f"/proc/{found[-1]}/task/{found[-1]}/children")
            left += [int(child) for child in children.read_text().split()] if children.exists() else []
        return found

    def says(self, machine: int) -> str:
        return (self.folder / f"machine-{machine}.txt").read_text(errors="replace")


def losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.endswith("}") and "loss" in (entry := json.loads(line)):
            if entry["step"] in found:
                raise SystemExit(f"step {entry['step']} is there twice")
            found[entry["step"]] = entry["loss"]
    return found


# The faults. Each comes back when it has been mended, if it is one that somebody must mend.


def kill_rank_0(run: Run) -> None:
    os.kill(run.processes(0)[-1], signal.SIGKILL)


def kill_rank(run: Run) -> None:
    os.kill(run.processes(1)[-1], signal.SIGKILL)


def kill_all_ranks_of_a_machine(run: Run) -> None:
    for pid in run.processes(1)[2:]:
        os.kill(pid, signal.SIGKILL)


def kill_agent(run: Run) -> None:
    os.kill(run.processes(1)[1], signal.SIGKILL)


def kill_agent_0(run: Run) -> None:
    os.kill(run.processes(0)[1], signal.SIGKILL)


def lose_machine(run: Run, machine: int = 1) -> None:
    run.launchers[machine].kill()
    run.launchers[machine].wait()
    time.sleep(1)
    run.launchers[machine] = run.start(machine)


def lose_machine_0(run: Run) -> None:
    lose_machine(run, 0)


def cut_for_a_moment(run: Run) -> None:
    run.machines[1].set_link("down")
    time.sleep(2)
    run.machines[1].set_link("up")


def cut_until_noticed(run: Run) -> None:
    before = run.says(0).count("has not answered for")
    run.machines[1].set_link("down")
    run.wait(lambda: run.says(0).count("has not answered for") > before)
    run.machines[1].set_link("up")


def stop_machine_until_noticed(run: Run) -> None:
    before, there = run.says(0).count("has not answered for"), run.processes(1)
    for pid in there:
        os.kill(pid, signal.SIGSTOP)
    run.wait(lambda: run.says(0).count("has not answered for") > before)
    for pid in there:
        os.kill(pid, signal.SIGCONT)


def end_by_signal_and_start_again(run: Run) -> None:
    run.launchers[1].send_signal(signal.SIGTERM)
    if [launcher.wait() for launcher in run.launchers] != [0, 0]:
        raise SystemExit(f"a signal did not end both machines well; see {run.folder}")
    run.launchers = [run.start(k) for k in range(2)]


FAULTS: dict[str, Callable[[Run], None]] = {
    "a rank is killed": kill_rank,
    "rank 0 is killed": kill_rank_0,
    "all ranks of machine 1 are killed": kill_all_ranks_of_a_machine,
    "torchrun of machine 1 is killed": kill_agent,
    "machine 1 is lost, and started again": lose_machine,
    "the cable is out for 2 s": cut_for_a_moment,
    f"the cable is out until noticed ({TIMEOUT_S} s)": cut_until_noticed,
    f"machine 1 is stopped until noticed ({TIMEOUT_S} s)": stop_machine_until_noticed,
    "SIGTERM to one machine; both are started again": end_by_signal_and_start_again,
    "machine 0 is lost, and started again": lose_machine_0,
}


def campaign(folder: Path, data: Path, machines: list[net.Machine], num_faults: int) -> list[dict[str, object]]:
    run, table = Run(folder, data, machines), list[dict[str, object]]()
    try:
        run.wait(lambda: run.step() >= 3)
        for number in range(num_faults):
            name, fault = list(FAULTS.items())[number % len(FAULTS)]
            at, began = run.step(), time.monotonic()
            fault(run)
            lowest = at
            while run.step() <= at + 2:  # what was computed before is computed again from the last checkpoint
                lowest = min(lowest, run.step() or lowest)
                if time.monotonic() - began > 300:
                    raise SystemExit(f"{name}: no more steps; see {folder}")
                time.sleep(0.05)
            row = {"fault": name, "step": at, "seconds": round(time.monotonic() - began, 1), "again": at - lowest}
            table.append(row)
            print(
                f"{number + 1:3} {name:55} at step {at:5}: {row['seconds']:6} s, {row['again']} steps again", flush=True
            )
        run.launchers[0].send_signal(signal.SIGTERM)
        if [launcher.wait() for launcher in run.launchers] != [0, 0]:
            raise SystemExit(f"the run did not end well; see {folder}")
        return table
    finally:
        for launcher in run.launchers:
            launcher.kill()
            launcher.wait()


def compare(folder: Path, data: Path) -> None:
    """With one process that nothing happens to."""
    found = losses(folder / "run")
    last = max(found)
    if sorted(found) != list(range(1, last + 1)):
        raise SystemExit("a step is missing")
    one = [*SETTINGS, f"data.path={data}", f"train.steps={last}", "--out", str(folder / "one")]
    subprocess.run([sys.executable, "-m", "gptworks", "train", *one], check=True, stdout=subprocess.DEVNULL)
    alone = losses(folder / "one")
    largest = max(abs(found[step] - alone[step]) for step in found)
    print(f"{last} steps, each once; largest difference of a loss from one process: {largest:.1e}")
    if largest > TOLERANCE:
        raise SystemExit(f"more than {TOLERANCE:g}; see {folder}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    reason = net.why_not()
    if reason:
        raise SystemExit(f"machines cannot be had here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="gptworks-faults-"))
    words = " ".join(f"word{i % 97} line{i % 13}" for i in range(40000))
    (folder / "text.txt").write_text("\n\n".join(words[i : i + 200] for i in range(0, len(words), 200)))
    prepare = ["prepare", str(folder / "text.txt"), "--train-tokenizer", "400", "--append-eod", "--out"]
    subprocess.run(
        [sys.executable, "-m", "gptworks", *prepare, str(folder / "data")], check=True, stdout=subprocess.DEVNULL
    )
    wires = net.Net(2)
    try:
        table = campaign(folder, folder / "data", wires.machines, args.faults)
    finally:
        wires.close()
    compare(folder, folder / "data")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
