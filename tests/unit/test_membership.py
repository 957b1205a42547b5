"""What starts torchrun on each machine, here as threads beside a store: who is there, and who must not be."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from gptworks.errors import UsageError
from gptworks.launch import membership, nodes, store_client, terminal_pipe, torchrun
from gptworks.launch.membership import FAILED, STOPPING, Membership
from gptworks.launch.nodes import Nodes

Start = Callable[..., Membership]


def idle() -> None:
    pass


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, held_port: Callable[[], int]) -> Iterator[Start]:
    """Machines beside the store that machine 0's agent would keep."""
    monkeypatch.setattr(membership, "BEAT_S", 0.05)
    monkeypatch.setattr(membership, "STALE_S", 1.0)  # on a busy machine a beat comes late
    port, found = held_port(), list[Membership]()
    store = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def make(rank: int, *, count: int = 2, at_least: int | None = None) -> Membership:
        member = Membership(Nodes(count, at_least or count, rank, "127.0.0.1", port), lambda _: None)
        found.append(member)
        member.enter(idle, 20.0) if rank else member.host()
        return member

    yield make
    for member in found:
        member.leave()
    del store


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_who_has_come_is_known_to_all_and_who_has_gone(start: Start) -> None:
    first, second = start(0, count=3), start(1, count=3)
    wait_until(lambda: first.missing == second.missing == [2])
    second.leave()
    wait_until(lambda: first.missing == [1, 2])
    assert start(1, count=3).nodes.rank == 1, "it may come again"


def test_a_machine_that_was_killed_may_come_again(start: Start) -> None:
    start(0)
    second = start(1)
    second._stop()  # as a killed one, which takes back nothing
    start(1)


def test_two_machines_with_the_same_number(start: Start) -> None:
    first, second = start(0), start(1)
    with pytest.raises(UsageError, match="--node-rank: node 1 of 2 is taken already, by "):
        start(1)
    wait_until(lambda: "node 1 of 2 is taken already" in first.refused and first.refused == second.refused)


def test_two_machines_with_the_same_number_at_the_same_moment(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has seen the other when it looked."""
    monkeypatch.setattr(Membership, "_changed_entry", lambda self, node, *_: None if node else self._entry())
    first, *twins = start(0), start(1), start(1)
    wait_until(lambda: all("node 1 of 2 is taken already" in each.refused for each in (first, *twins)))


def test_a_mistake_of_a_newcomer_is_its_own_once_the_run_has_begun(start: Start) -> None:
    first, _ = start(0), start(1)
    first.begin()
    wait_until(lambda: first._store.check(["begun"]))
    with pytest.raises(UsageError, match="node 1 of 2 is taken already"):
        start(1)
    assert not first._store.check(["refused"]) and first.refused == ""


def test_clocks_that_disagree(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(0)
    wait_until(lambda: first.present == {0})
    now, me = time.time, threading.get_ident()
    monkeypatch.setattr(time, "time", lambda: now() + (7.5 if threading.get_ident() == me else 0.0))
    with pytest.raises(UsageError, match=r"clocks: that of node 1 \(.*\) is 7\.\d s ahead of that of node 0"):
        start(1)
    wait_until(lambda: first.refused.startswith("clocks: that of node 1"))


def test_machines_that_were_told_other_numbers(start: Start) -> None:
    first = start(0, count=2)
    with pytest.raises(UsageError, match=r"--nnodes: 1:3 on node 2 \(.*\), 2:2 on node 0"):
        start(2, count=3, at_least=1)
    wait_until(lambda: first.refused.startswith("--nnodes: 1:3 on node 2"))


def test_the_end_is_for_all_when_all_present_are_done(start: Start) -> None:
    first, second = start(0), start(1)
    wait_until(lambda: not first.missing)
    first.done()
    wait_until(lambda: first._store.check(["done/0"]))
    assert not first.all_done
    second.done()
    wait_until(lambda: first.all_done and second.all_done)
    second.begin()  # another start
    wait_until(lambda: not first.all_done)


def test_what_ends_all_machines_is_known_to_all_before_one_of_them_goes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(0), start(1)
    wait_until(lambda: not first.missing)
    monkeypatch.setattr(membership, "TELL_S", 1e9)
    assert not first.is_known(FAILED)
    first.tell(FAILED, "no such preset")
    wait_until(lambda: first.is_known(FAILED))
    assert second.heard == {FAILED: "no such preset"}
    monkeypatch.setattr(membership, "TELL_S", 0.1)
    second._stop()  # it is gone, and will never hear of it
    first.tell(STOPPING)
    wait_until(lambda: first.is_known(STOPPING))


def test_what_a_machine_said_before_it_was_killed_is_not_what_it_says_now(start: Start) -> None:
    first, second = start(0), start(1)
    first.done()
    second.done()
    wait_until(lambda: first.all_done)
    second._stop()
    wait_until(lambda: first.missing == [1])
    start(1)
    wait_until(lambda: not first.missing and not first.all_done)


def test_another_program_at_the_port(monkeypatch: pytest.MonkeyPatch, held_port: Callable[[], int]) -> None:
    connect = store_client.connect
    monkeypatch.setattr(store_client, "connect", lambda address, port, _: connect(address, port, 0.5))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"what listens at 127.0.0.1:{port} is not node 0 of this run"):
            Membership(Nodes(2, 2, 1, "127.0.0.1", port), print).enter(idle, 20.0)
        with pytest.raises(UsageError, match=f"--master: 127.0.0.1:{port}: port {port} of this machine cannot be used"):
            nodes.require_free("127.0.0.1", port)
    nodes.require_free("127.0.0.1", held_port())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is held is nobody's to listen at")
def test_a_held_port_is_for_the_one_who_is_told_its_number() -> None:
    """Seconds pass until rank 0 listens there, in which other programs are given ports."""
    held = nodes.HeldPort()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", held.number))
    store = distributed.TCPStore("127.0.0.1", held.number, is_master=True, wait_for_workers=False)
    store.set("told", "yes")
    assert store_client.connect("127.0.0.1", held.number, 10.0).get("told") == b"yes"
    held.close()


def test_an_address_that_nobody_knows() -> None:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KNOWN_S", 0.5)
        with pytest.raises(UsageError, match=r"--master: no-such-machine\.invalid: the address is not known here"):
            nodes.wait_until_known("no-such-machine.invalid", said.append, idle)
    assert len(said) == 1 and said[0].startswith(
        "waiting at most 0.5 s until the name no-such-machine.invalid is known"
    )


def test_the_name_of_a_pod_that_is_known_a_while_after_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo
    answers: list[Any] = [socket.gaierror(-2, "Name or service not known")] * 2
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: known("127.0.0.1", None) if not answers else throw(answers))
    said: list[str] = []
    nodes.wait_until_known("run-0.run", said.append, idle)
    assert answers == [] and len(said) == 1


def throw(errors: list[Exception]) -> None:
    raise errors.pop()


def test_an_address_that_does_not_lead_to_machine_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "STALE_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as agents_store:
        port = agents_store.getsockname()[1]
        member = Membership(Nodes(2, 2, 0, "127.0.0.9", port), print)
        member.host()
        wait_until(lambda: bool(member.refused))
        member.leave()
    assert member.refused.startswith(f"--master: 127.0.0.9:{port} does not lead to this machine (")


# The command


def job(**nodes_of: Any) -> Any:
    from gptworks.launch.job import Job

    return Job(("-m", "gptworks", "train", "--master", "a"), 4, Path("logs"), Nodes(**nodes_of), 3)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_torchrun_gets_the_machines_and_its_switch() -> None:
    words = torchrun.command(job(count=3, at_least=2, rank=1, master="10.0.0.1", port=1234))
    assert option(words, "--nnodes") == "2:3" and option(words, "--nproc-per-node") == "4"
    assert option(words, "--rdzv-endpoint") == "10.0.0.1:1234" and option(words, "--max-restarts") == "3"
    assert "is_host=0" in option(words, "--rdzv-conf").split(",")
    assert words[-8:] == ["-m", "gptworks.launch.rank_process", "--", "-m", "gptworks", "train", "--master", "a"]
    assert torchrun.environment(job(count=2))["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    first = torchrun.command(job(count=3, rank=0, master="10.0.0.1"))
    assert option(first, "--local-addr") == "10.0.0.1" and "is_host=1" in option(first, "--rdzv-conf").split(",")


def test_what_is_shown_to_be_started_by_hand_goes_on_after_a_restart() -> None:
    """Our launcher tells its ranks that they are started again; torchrun alone does not."""
    shown, started = job(count=2, master="10.0.0.1"), torchrun.described(job(count=2, master="10.0.0.1"))
    assert torchrun.by_hand(shown) == f"{started} --resume auto"
    assert torchrun.by_hand(replace(shown, max_restarts=0)).endswith("train --master a")
    asked = replace(shown, command=(*shown.command, "--dry-run"))
    assert torchrun.by_hand(asked) == torchrun.by_hand(shown), "else it would train nothing"
    resumed = replace(shown, command=(*shown.command, "--resume=runs/a"))
    assert torchrun.by_hand(resumed) == torchrun.described(resumed)


def test_all_that_rank_0_wrote_to_stderr_is_shown_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def write(text: str) -> int:
        time.sleep(0.05)  # a slow terminal
        shown.append(text)
        return len(text)

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    copied = terminal_pipe.TerminalPipe(tmp_path / "stderr")
    for number in range(2):  # two starts of rank 0
        with copied.path.open("w") as pipe:
            pipe.write(f"{number}" * 200_000)
    copied.close()
    assert "".join(shown) == "0" * 200_000 + "1" * 200_000
    assert not copied._thread.is_alive()


def test_torch_orders_the_machines_as_the_user_numbered_them() -> None:
    """By torch's own class, whatever their addresses are."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

    names = [option(torchrun.command(job(count=12, rank=k, master="10.0.0.1")), "--local-addr") for k in range(12)]
    nodes_there = [_NodeDesc(name, 1000 - k, 0) for k, name in enumerate(names)]
    assert sorted(nodes_there) == nodes_there


def test_torchrun_understands_all_of_it() -> None:
    from torch.distributed import run

    words = torchrun.command(job(count=2, at_least=1, rank=0, master="fe80::1"))[3:]
    config, _, args = run.config_from_args(run.parse_args(words))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 2, 4, 3)
    assert config.rdzv_endpoint == "[fe80::1]:29400" and config.shutdown_timeout == 7200
    assert config.rdzv_configs["is_host"] == "1" and "SIGUSR1" in config.signals_to_handle
    assert args[-5:] == ["-m", "gptworks", "train", "--master", "a"]


def test_what_is_meant_for_another_agent_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert not {"PET_NNODES", "TORCHELASTIC_RUN_ID"} & torchrun.inherited().keys()


def test_the_interface_towards_an_address() -> None:
    assert nodes.interface_towards("127.0.0.1", 1) == "lo"
    assert nodes.interface_towards("no-such-machine.invalid", 1) == ""


def test_a_machine_whose_own_name_means_loopback_is_reached_by_another_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert nodes.interface_towards("node-0", 1) != "lo"
    assert nodes.interface_towards("127.0.1.1", 1) == "lo"
    assert nodes.bracketed("::1") == "[::1]"
