"""The launchers of several machines, here as threads: rounds, ranks, who is missing, and the end for all."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gptworks.errors import TrainingError, UsageError
from gptworks.launch import meeting
from gptworks.launch.meeting import JobOver, Meeting, Round
from gptworks.launch.nodes import Nodes, free_port

Start = Callable[..., "Future[Round]"]


@pytest.fixture
def machines() -> Iterator[Callable[..., list[Meeting]]]:
    def make(*nprocs: int, at_least: int | None = None, timeout: float = 20.0) -> list[Meeting]:
        port, count = free_port(), len(nprocs)
        nodes = [Nodes(count, at_least or count, rank, "127.0.0.1", port) for rank in range(count)]
        return [Meeting(n, k, lambda _: None, timeout) for n, k in zip(nodes, nprocs, strict=True)]

    yield make


@pytest.fixture
def start() -> Iterator[Start]:
    with ThreadPoolExecutor(8) as pool:
        yield lambda machine: pool.submit(machine.next, lambda: None)


def wait_until_called(machine: Meeting) -> None:
    while not machine.is_called():
        time.sleep(0.005)


def places(rounds: list[Round]) -> list[tuple[int, int, int, int]]:
    return [(round.number, round.node, round.first_rank, round.world_size) for round in rounds]


def test_a_failure_counts_once_and_a_machine_that_joins_is_none(machines: Any, start: Start) -> None:
    first, second = machines(1, 1)
    for round in (1, 2):
        for future in [start(first), start(second)]:
            future.result()
        assert not first.has_failed()
        if round == 1:
            continue
        assert first.count_failure() == second.count_failure() == 1, "the first round ended without one"
        assert first.has_failed() and second.has_failed()


def test_a_machine_that_was_replaced_has_failed(machines: Any, start: Start) -> None:
    first, second = machines(1, 1)
    for future in [start(first), start(second)]:
        future.result()
    again = Meeting(second.nodes, 1, lambda _: None, 20.0)
    coming = start(again)
    wait_until_called(first)
    assert first.has_failed()
    start(first).result()
    coming.result()


def test_ranks_follow_the_number_of_the_machine_not_the_order_of_coming(machines: Any, start: Start) -> None:
    first, second, third = machines(2, 3, 1)
    coming = [start(third), start(second), start(first)]
    rounds = [future.result() for future in reversed(coming)]
    assert places(rounds) == [(1, 0, 0, 6), (1, 1, 2, 6), (1, 2, 5, 6)]
    assert len({(round.master, round.port) for round in rounds}) == 1
    assert not any(machine.is_called() for machine in (first, second, third))


def test_a_machine_that_needs_a_new_start_calls_the_others(machines: Any, start: Start) -> None:
    first, second = machines(1, 1)
    before = [f.result() for f in [start(first), start(second)]]
    again = start(second)
    wait_until_called(first)
    assert not again.done(), "it waits for the other"
    rounds = [start(first).result(), again.result()]
    assert places(rounds) == [(2, 0, 0, 2), (2, 1, 1, 2)]
    assert rounds[0].port != before[0].port, "ranks of the round before must not be met"


def test_a_machine_that_was_started_anew_joins_the_round_after_the_present_one(machines: Any, start: Start) -> None:
    first, second = machines(1, 1)
    for _ in range(2):
        [f.result() for f in [start(first), start(second)]]
    newcomer = Meeting(second.nodes, 1, lambda _: None)
    coming = start(newcomer)
    wait_until_called(first)
    assert places([start(first).result(), coming.result()]) == [(3, 0, 0, 2), (3, 1, 1, 2)]


def test_with_fewer_machines_than_there_may_be(machines: Any, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LAST_CALL", 0.3)
    first, second = machines(2, 2, at_least=1)
    assert places([start(first).result()]) == [(1, 0, 0, 2)]
    coming = start(second)
    wait_until_called(first)
    assert places([start(first).result(), coming.result()]) == [(2, 0, 0, 4), (2, 1, 2, 4)]


def test_who_does_not_come_is_named(machines: Any, start: Start) -> None:
    first, _ = machines(1, 1, timeout=0.3)
    with pytest.raises(TrainingError, match=r"node 1 of 2 has not come to 127.0.0.1:\d+ within 0.3 s"):
        start(first).result()


def test_two_machines_with_the_same_number(machines: Any, start: Start) -> None:
    first, second = machines(1, 1)
    twin = Meeting(second.nodes, 1, lambda _: None)
    [f.result() for f in [start(first), start(second)]]
    waiting = start(second)
    wait_until_called(first)
    with pytest.raises(UsageError, match="--node-rank: node 1 of 2 has come already"):
        start(twin).result()
    start(first).result()
    waiting.result()


def test_the_end_reaches_all_machines_with_its_reason(machines: Any, start: Start) -> None:
    first, second = machines(1, 1)
    [f.result() for f in [start(first), start(second)]]
    second.end("rank 1 of 2: no data.", 2)
    with pytest.raises(JobOver, match="rank 1 of 2: no data") as over:
        first.is_called()
    assert over.value.exit_code == 2


def test_a_good_end_waits_for_all_machines(machines: Any, start: Start) -> None:
    first, second = machines(1, 1)
    [f.result() for f in [start(first), start(second)]]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(first.all_done, lambda: None)
        assert not done.done()
        assert second.all_done(lambda: None)
        assert done.result()


def test_a_machine_that_is_done_helps_when_another_starts_again(machines: Any, start: Start) -> None:
    first, second = machines(1, 1)
    [f.result() for f in [start(first), start(second)]]
    again = start(second)
    assert not first.all_done(lambda: None)
    assert places([start(first).result(), again.result()]) == [(2, 0, 0, 2), (2, 1, 1, 2)]


def test_an_address_that_is_not_this_machine() -> None:
    with pytest.raises(UsageError, match="node 1 cannot reach node 0 there"):
        Meeting(Nodes(2, 2, 1, "127.0.0.1", free_port()), 1, lambda _: None, timeout=1)
