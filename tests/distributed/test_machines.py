"""Several machines with real processes: torchrun on each, and what happens when ranks, machines and cables go.

A machine is a network namespace with an address of its own; where these cannot be made, an address of loopback. The
ranks run launched_rank.py, which adds numbers over all ranks and saves them as training would.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import net
import pytest
from test_launch import children, expected, finish, is_gone, log, values, wait_for

from gptworks.launch import rank_table
from gptworks.launch.nodes import PORT

SCRIPT = Path(__file__).with_name("launched_rank.py")
LAUNCHER = """
import json, sys, time, types
from pathlib import Path
from gptworks.errors import GPTWorksError
from gptworks.launch import membership, nodes, supervise, torchrun
torchrun.LAST_CALL_S, torchrun.KEEP_ALIVE_S, torchrun.KEEP_ALIVE_TRIES = 2, 1, 6
settings, folder, *rest = sys.argv[1:]
settings = json.loads(settings)
ahead, membership.BEAT_S = settings["clock"], settings["beat"]
membership.time = types.SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic, sleep=time.sleep)
torchrun.JOIN_TIMEOUT_S = settings["join"]
tell_and_hear = membership.Membership._tell_and_hear
def beat(self):
    tell_and_hear(self)
    (Path(folder) / f"beat-{{self.nodes.rank}}").write_text(str(self._beats))
membership.Membership._tell_and_hear = beat
found = nodes.solve(**settings["nodes"])
logs, stopped = Path(folder) / "logs", settings["stopped"]
job = supervise.Job(
    ({script!r}, folder, *rest), settings["nproc"], logs, found, settings["restarts"], stopped_code=stopped
)
try:
    sys.exit(supervise.run(job))
except GPTWorksError as error:  # as the command line does
    print(f"error: {{error}}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Cluster:
    """Machines, and the launchers that run on them."""

    def __init__(self, folder: Path, machines: list[net.Machine], port: int) -> None:
        self.folder, self.machines = folder, machines
        self.where = f"{machines[0].address}:{port}"
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        machine: int,
        *args: str | int,
        nnodes: str = "2",
        nproc: int = 1,
        restarts: int = 0,
        clock: float = 0.0,
        beat: float = 1.0,
        join: int = 120,
        number: int | None = None,
        nodes: dict[str, Any] | None = None,
        stopped: int = 0,
    ) -> subprocess.Popen[str]:
        usual = {"nnodes": nnodes, "node_rank": machine if number is None else number, "master": self.where}
        settings = {"nodes": nodes or usual, "nproc": nproc, "restarts": restarts, "clock": clock, "join": join}
        settings["beat"] = beat
        settings["stopped"] = stopped
        command = [sys.executable, "-c", LAUNCHER.format(script=str(SCRIPT)), json.dumps(settings), str(self.folder)]
        return self.run(machine, [*command, *(str(arg) for arg in args)])

    def run(self, machine: int, command: list[str], **environment: str) -> subprocess.Popen[str]:
        self.started.append(
            subprocess.Popen(
                self.machines[machine].command(command),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | environment,
            )
        )
        return self.started[-1]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


WHY_NOT = net.why_not()


@pytest.fixture
def cluster(tmp_path: Path, held_port: Callable[[], int]) -> Iterator[Cluster]:
    """Of two machines, both of which see tmp_path: a disk that they share."""
    if WHY_NOT:
        found = Cluster(tmp_path, [net.Machine("127.0.0.1"), net.Machine("127.0.0.2")], held_port())
        yield found
        found.close()
        return
    wires = net.Net(2)
    found = Cluster(tmp_path, wires.machines, PORT)
    try:
        yield found
    finally:
        found.close()
        wires.close()


needs_cables = pytest.mark.skipif(bool(WHY_NOT), reason=f"no machines with cables of their own: {WHY_NOT}")
LONG = (100000, "--pause", "0.1")


def family(pid: int) -> list[int]:
    """The process and all that have come from it."""
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        if Path(f"/proc/{found[-1]}").exists():
            left += children(found[-1])
    return found


def computed(folder: Path) -> list[int]:
    return [json.loads(line)[0] for line in (folder / "values.jsonl").read_text().splitlines()]


def saved_step(folder: Path) -> int:
    path = folder / "saved.json"
    return int(json.loads(path.read_text())[0]) if path.exists() else 0


def wait_for_a_step(process: subprocess.Popen[str], folder: Path) -> None:
    """Of all ranks that are there: from then on a signal lets them save."""
    before = len(computed(folder))
    wait_for(process, lambda: len(computed(folder)) > before)


def pid_of(folder: Path, rank: int) -> int:
    newest = max(folder.glob(f"rank-{rank}-*.pid"), key=lambda path: path.stat().st_mtime)
    return int(newest.read_text())


@pytest.mark.slow
def test_a_killed_rank_of_two_machines_with_two_each(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks follow the numbers of the machines, though the second has the lower address."""
    first, second = (cluster.start(k, 14, "--pause", "0.1", nproc=2, restarts=1) for k in range(2))
    wait_for(first, lambda: len(values(tmp_path)) >= 5)
    os.kill(pid_of(tmp_path, 3), signal.SIGKILL)
    out, err = finish(first, code=0)
    there, err_there = finish(second, code=0)
    assert values(tmp_path) == expected(14, world_size=4)
    assert out.count("node 0 of 2: 2 processes, ranks 0 to 1 of 4; logs in") == 2
    assert there.count("node 1 of 2: 2 processes, ranks 2 to 3 of 4; logs in") == 2
    assert "rank 3 of 4: killed by SIGKILL. If nobody did that, memory ran out (dmesg tells)." in err_there
    assert "starting again from the last checkpoint (1 of 1)" in err_there
    assert "stopped because rank 3 failed: killed" in err
    assert "Traceback" not in err + err_there
    again = [line for line in out.splitlines() if "begins after step" in line][1]
    assert int(again.split()[-1]) >= 4
    assert "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --max-restarts 1" in out


@pytest.mark.slow
def test_s1_11_two_machines_one_of_which_is_killed_and_started_again(cluster: Cluster, tmp_path: Path) -> None:
    """The killed one takes its ranks with it; the other waits for it to come back, and says so.

    The first names the machines by their addresses, the second by a rank table and a range of it (S4-03, S4-04).
    """
    addresses = [machine.address for machine in cluster.machines]
    table = rank_table.merge([rank_table.make([0], address) for address in addresses])
    (tmp_path / "table.json").write_text(rank_table.dump(table))
    by_addresses = {"node_ips": ",".join(addresses), "node_rank": 0, "master": cluster.where}
    by_table = {"table": str(tmp_path / "table.json"), "ranks": "[1,2]", "master": cluster.where}
    args = (16, "--pause", "0.1")
    first = cluster.start(0, *args, restarts=2, nodes=by_addresses)
    second = cluster.start(1, *args, restarts=2, nodes=by_table)
    wait_for(first, lambda: len(values(tmp_path)) >= 5)
    there = family(second.pid)
    second.kill()
    second.wait()
    wait_for(first, lambda: all(is_gone(pid) for pid in there))
    third = cluster.start(1, *args, restarts=2, nodes=by_table)
    out, err = finish(first, code=0)
    shown, _ = finish(third, code=0)
    assert values(tmp_path) == expected(16)
    assert "node 0 of 2: 1 process, ranks 0 to 0 of 2" in out
    assert "node 1 of 2: 1 process, ranks 1 to 1 of 2" in shown
    assert "stopped because rank 1 ended without a word" in err
    assert "starting again from the last checkpoint (1 of 2)" in err
    assert out.count("begins after step") == 2


@pytest.mark.slow
def test_a_machine_that_comes_late_lets_the_others_save_and_is_no_restart(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.start(0, *LONG, nnodes="1:2")
    wait_for(first, lambda: (tmp_path / "values.jsonl").exists())
    second = cluster.start(1, *LONG, nnodes="1:2")
    wait_for(first, (tmp_path / "rank-1.threads").exists)  # it has joined
    wait_for_a_step(first, tmp_path)
    first.send_signal(signal.SIGINT)
    out, err = finish(first, code=0)
    finish(second, code=0)
    begun = [line for line in out.splitlines() if "begins after step" in line]
    assert begun[0] == "rank 0 of 1 begins after step 0" and begun[-1].startswith("rank 0 of 2 begins after step ")
    assert "another node joins; so all start again.\n" in err
    assert "starting again from the last checkpoint" not in err
    steps = computed(tmp_path)
    assert steps == list(range(1, len(steps) + 1)), "a step was lost"


@pytest.mark.slow
def test_with_fewer_machines_when_one_is_lost_and_with_all_when_it_is_back(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (cluster.start(k, *LONG, "--timeout", 20, nnodes="1:2", restarts=3) for k in range(2))
    wait_for(first, (tmp_path / "rank-1.threads").exists)
    wait_for(first, lambda: saved_step(tmp_path) >= 4)
    second.kill()
    second.wait()
    before = saved_step(tmp_path)
    wait_for(first, lambda: log(tmp_path, 0).count("rank 0 of 1 begins") >= 1)
    wait_for(first, lambda: saved_step(tmp_path) > before + 2)
    third = cluster.start(1, *LONG, "--timeout", 20, nnodes="1:2", restarts=3)
    wait_for(first, lambda: log(tmp_path, 0).count("rank 0 of 2 begins") >= 2)
    wait_for_a_step(first, tmp_path)
    first.send_signal(signal.SIGTERM)
    out, err = finish(first, code=0)
    finish(third, code=0)
    assert "node 0 of 1: 1 process, ranks 0 to 0 of 1" in out
    assert "stopped because rank 1" in err and "another node joins; so all start again." in err
    values_of_steps = computed(tmp_path)
    assert sorted(set(values_of_steps)) == list(range(1, max(values_of_steps) + 1))


@pytest.mark.slow
def test_a_machine_that_ends_last_of_those_that_were_told_to_stop(cluster: Cluster, tmp_path: Path) -> None:
    """Machine 0 has taken the rendezvous with it by then, which is no failure of this machine. Both have the exit code
    that was asked for, though one alone was told to stop."""
    first, second = (cluster.start(k, *LONG, "--slow-end", 4, restarts=1, stopped=143) for k in range(2))
    wait_for(first, lambda: saved_step(tmp_path) >= 4)
    first.send_signal(signal.SIGTERM)
    finish(first, code=143)
    _, err = finish(second, code=143)
    assert "rank 1 ends after step" in log(tmp_path, 1)
    assert "error:" not in err and "starting" not in err


@pytest.mark.slow
@needs_cables
def test_a_cable_that_is_pulled_and_put_back(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (cluster.start(k, 60, "--pause", "0.1", "--timeout", 6, restarts=3) for k in range(2))
    wait_for(first, lambda: len(values(tmp_path)) >= 5)
    cluster.machines[1].set_link("down")
    wait_for(first, lambda: "error: rank 1 of 2 has not answered for 6 s" in log(tmp_path, 0))
    wait_for(second, lambda: "error:" in log(tmp_path, 1))
    cluster.machines[1].set_link("up")
    _, err = finish(first, code=0)
    _, err_there = finish(second, code=0)
    assert values(tmp_path) == expected(60)
    assert "rank 1 of 2 has not answered for 6 s; last seen in step" in err
    assert "starting again from the last checkpoint" in err
    assert "Traceback" not in err + err_there


@pytest.mark.slow
def test_a_machine_that_is_stopped_is_named_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (cluster.start(k, *LONG, "--timeout", 5) for k in range(2))
    wait_for(first, lambda: len(values(tmp_path)) >= 5)
    here, there = family(first.pid), family(second.pid)
    for pid in there:
        os.kill(pid, signal.SIGSTOP)
    _, err = finish(first, code=75)
    assert "error: rank 1 of 2 has not answered for 5 s; last seen in step " in err
    assert all(is_gone(pid) for pid in here[1:])
    for pid in there:
        os.kill(pid, signal.SIGCONT)
    _, err = finish(second, code=75)
    assert "error: " in err and "Traceback" not in err
    assert all(is_gone(pid) for pid in there[1:])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_one_machine_saves_everywhere_however_slowly(
    number: signal.Signals, cluster: Cluster, tmp_path: Path
) -> None:
    """Longer than the 30 s after which torchrun kills what it has asked to end, unless it is told otherwise."""
    slow = 45 if number == signal.SIGINT else 0
    first, second = (cluster.start(k, *LONG, "--timeout", 300, "--slow-save", slow, restarts=2) for k in range(2))
    wait_for(first, lambda: len(values(tmp_path)) >= 3)
    first.send_signal(number)
    out, err = finish(first, code=0)
    _, err_there = finish(second, code=0)
    step = saved_step(tmp_path)
    assert computed(tmp_path) == list(range(1, step + 1))
    assert out.splitlines()[-1] == f"rank 0 ends after step {step}"
    said = f"{number.name}: the ranks of all machines finish the step, save and end"
    assert [line for line in (err + err_there).splitlines() if not line.startswith("waiting for node")] == [said]


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_machines_that_wait_for_ranks(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (cluster.start(k, *LONG, "--timeout", 600, "--slow-begin", 600, restarts=2) for k in range(2))
    wait_for(second, (tmp_path / "slow").exists)
    second.send_signal(signal.SIGINT)
    for process in (second, first):
        started = family(process.pid)
        _, err = finish(process, code=130)
        assert "SIGINT: stopped before a step was done; there was nothing to save" in err and "error:" not in err
        assert "starting again" not in err
        assert all(is_gone(pid) for pid in started)


@pytest.mark.slow
def test_the_second_ctrl_c_ends_this_machine_at_once(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.start(0, *LONG, "--slow-save", 600)
    second = cluster.start(1, *LONG, "--slow-save", 600, beat=3.0)
    wait_for(first, lambda: len(values(tmp_path)) >= 3)
    here = family(first.pid)
    # Machine 1 has just asked: with its next question, before it counts as gone, it hears of both at once.
    beats = (tmp_path / "beat-1").read_text()
    wait_for(second, lambda: (tmp_path / "beat-1").read_text() not in ("", beats))
    first.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert first.poll() is None, "the first one lets it save"
    first.send_signal(signal.SIGINT)
    finish(first, code=130)
    assert all(is_gone(pid) for pid in here[1:])
    _, err = finish(second, code=75)  # its rank had nothing to save and ended well, but not all have saved
    assert "error: stopped because node 0 was ended at once by a second Ctrl-C; it may not have saved." in err


@pytest.mark.slow
def test_a_mistake_of_the_user_is_not_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (cluster.start(k, 6, "--mishap", "1:3:user", restarts=3) for k in range(2))
    _, err = finish(first, code=2)
    _, err_there = finish(second, code=2)
    assert "error: stopped because rank 1 failed: data/corpus: the store is too small.\n" in err
    assert "error: rank 1 of 2: data/corpus: the store is too small.\n" in err_there
    assert len(list(tmp_path.glob("rank-1-*.pid"))) == 1, "it was started again"
    assert "starting again" not in err + err_there


@pytest.mark.slow
def test_a_mistake_that_a_rank_ends_with_before_it_can_tell_the_others_ends_all_machines(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As where its configuration is wrong: machine 1 knows of a lost connection only, and would wait for machine 0."""
    first, second = (cluster.start(k, 6, "--mishap", "0:3:exit", restarts=3) for k in range(2))
    _, err = finish(first, code=2)
    _, err_there = finish(second, code=2)
    assert f"error: rank 0 of 2: ended with exit code 2. Its log, {tmp_path / 'logs' / 'rank-0.log'}, ends with:" in err
    assert "no such preset: gtp2" in err
    assert "error: stopped because rank 0 failed: ended with exit code 2." in err_there
    assert "torchrun ended on this machine; starting it again" not in err_there, "it would wait for machine 0"
    assert len(list(tmp_path.glob("rank-0-*.pid"))) == 1, "it was started again"


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (cluster.start(k, *LONG, nproc=2) for k in range(2))
    wait_for(first, lambda: len(values(tmp_path)) >= 3)
    here = family(first.pid)
    assert len(here) == 4, "a launcher, an agent, two ranks"
    first.kill()
    first.wait()
    wait_for(second, lambda: all(is_gone(pid) for pid in here))
    _, err = finish(second, code=75)
    assert "error: " in err and "Traceback" not in err


# What is refused on all machines


@pytest.mark.slow
def test_who_does_not_come_is_named(cluster: Cluster) -> None:
    addresses = [machine.address for machine in cluster.machines]
    given = {"node_ips": ",".join(addresses), "node_rank": 0, "master": cluster.where}
    _, err = finish(cluster.start(0, 3, join=30, nodes=given), code=2)
    assert f"waiting for node 1 ({addresses[1]}) at {cluster.where}" in err
    assert f"error: node 1 ({addresses[1]}) of 2 has not reached {cluster.where} within 30 s." in err


@pytest.mark.slow
@needs_cables
def test_an_address_that_is_not_that_of_machine_0(cluster: Cluster) -> None:
    """torch would try for half a minute and end with pages of its own."""
    process = cluster.start(0, 3, nodes={"nnodes": "2", "node_rank": 0, "master": "10.77.0.99"}, restarts=3)
    started = family(process.pid)
    _, err = finish(process, code=2)
    assert "error: --master: 10.77.0.99:29400 does not lead to this machine (" in err and "Traceback" not in err
    assert "starting it again" not in err and all(is_gone(pid) for pid in started)


@pytest.mark.slow
def test_machine_0_that_does_not_come_is_named(cluster: Cluster) -> None:
    _, err = finish(cluster.start(1, 3, join=3), code=2)
    assert f"waiting for node 0 at {cluster.where} (" in err
    assert f"error: {cluster.where}: node 1 cannot reach node 0 there" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"clock": -60.0}, "error: clocks: that of node 1 "),
        ({"nnodes": "3"}, "error: --nnodes: 3:3 on node 1 "),
    ],
)
def test_machines_that_disagree_end_together(mistake: dict[str, Any], message: str, cluster: Cluster) -> None:
    first = cluster.start(0, 3)
    second = cluster.start(1, 3, **mistake)
    for process in (second, first):
        started = family(process.pid)
        _, err = finish(process, code=2)
        assert message in err
        assert all(is_gone(pid) for pid in started)


OTHER_VERSION = "import gptworks\ngptworks.__version__ = '0.0.1'\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("configuration", "optim.lr: 0.003 there, 0.002 here. Needed: the same versions and the same configuration"),
        ("version", "there, 0.0.1 here. Needed: the same versions and the same configuration on all machines"),
    ],
    ids=["configuration", "version"],
)
def test_machines_with_another_configuration_or_version(
    other: str, message: str, cluster: Cluster, small_store: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(OTHER_VERSION)
    shape = "model.num_layers=2 model.hidden_size=16 model.num_heads=2 model.vocab_size=512 model.max_positions=16"
    rest = "data.seq_len=16 batch.global_size=4 train.steps=4 parallel.dp=2 run.device=cpu run.threads=1"
    settings = [*shape.split(), *rest.split(), f"data.path={small_store}", "--out", str(tmp_path / "run")]
    train = [sys.executable, "-m", "gptworks", "train", *settings, "--nproc", "1", "--max-restarts", "3"]
    first, second = (
        cluster.run(
            machine,
            [*train, f"optim.lr={lr}", "--nnodes", "2", "--node-rank", str(machine), "--master", cluster.where],
            **({"PYTHONPATH": str(tmp_path / "other")} if machine and other == "version" else {}),
        )
        for machine, lr in enumerate(["0.003", "0.002" if other == "configuration" else "0.003"])
    )
    for process in (first, second):
        started = family(process.pid)
        _, err = finish(process, code=2)
        assert "rank 1 (process " in err and "was started with other settings than rank 0 (" in err
        assert message in err and "starting again" not in err
        assert all(is_gone(pid) for pid in started)
    assert not (tmp_path / "run" / "checkpoints").exists(), "nothing was trained"


@pytest.mark.slow
def test_two_machines_with_the_same_number(cluster: Cluster) -> None:
    first = cluster.start(0, 3, nnodes="3")
    second = cluster.start(1, 3, nnodes="3", beat=2.0)  # it hears later than machine 0, which keeps the store
    third = cluster.start(1, 3, nnodes="3", beat=2.0)
    for process in (first, second, third):
        _, err = finish(process, code=2)
        assert "error: --node-rank: node 1 of 3 is taken already, by " in err


@pytest.mark.slow
def test_a_port_that_is_in_use(cluster: Cluster) -> None:
    code = "import socket, sys, time; s = socket.create_server(('', int(sys.argv[1]))); print('open', flush=True)"
    code += "; time.sleep(600)"
    command = cluster.machines[0].command([sys.executable, "-c", code, cluster.where.rpartition(":")[2]])
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        _, err = finish(cluster.start(0, 3), code=2)
        _, err_there = finish(cluster.start(1, 3), code=2)
    finally:
        holder.kill()
        holder.communicate()
    assert f"error: --master: {cluster.where}: port " in err and "cannot be used" in err
    assert f"error: --master: what listens at {cluster.where} is not node 0 of this run" in err_there
