"""What a rank says when it fails, and which failure the user is shown."""

import errno
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as distributed

from gptworks import file_errors
from gptworks.errors import CheckpointError, DataError, LostRunError, TrainingError, UsageError
from gptworks.launch import failures, heartbeat, rank_env
from gptworks.launch.failures import Connection, Failure
from gptworks.launch.heartbeat import Heartbeat
from gptworks.launch.reporting import reporting

LOST = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete"


@pytest.fixture
def store() -> distributed.TCPStore:
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ranks(store: distributed.TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Connection]]:
    monkeypatch.setattr(heartbeat, "_where", "step 7")
    found = [Connection(store, rank, 2, timeout=4.0) for rank in range(2)]
    while len(found[0].heartbeat._beats()) < 2:
        time.sleep(0.01)
    yield found
    for rank in found:
        rank.heartbeat.stop()


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_the_first_is_the_earliest_that_no_other_has_caused() -> None:
    consequence = Failure(0, "stopped because rank 2 failed", because_of=2, time=1.0)
    late, early = Failure(1, "late", time=3.0), Failure(2, "early", time=2.0)
    assert failures.first({f.rank: f for f in (consequence, late, early)}) == early
    assert failures.first({0: consequence}) == consequence
    assert failures.first({}) is None


@pytest.mark.parametrize(
    "text", ["Application timeout caused pair closure", "Timed out waiting 15000ms for recv operation to complete"]
)
def test_what_gloo_says_of_a_rank_that_does_not_answer_is_no_fault_of_ours(text: str) -> None:
    assert failures.is_communication(RuntimeError(text))


def test_failures_of_ranks_are_files(tmp_path: Path) -> None:
    one, two = Failure(3, "x", is_fault=True), Failure(4, "y", because_of=3)
    one.write(tmp_path)
    two.write(tmp_path)
    assert failures.read_all(tmp_path) == {3: one, 4: two}


def test_a_rank_whose_cable_is_out_speaks_all_the_same(
    ranks: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question to the store has no end then; it is asked once, for a while."""
    asked: list[object] = []
    plugged = threading.Event()

    def ask(*question: object) -> None:
        asked.append(question)
        plugged.wait()
        raise RuntimeError("Connection reset by peer")

    class CutOff:
        def __getattr__(self, _: str) -> Callable[..., None]:
            return ask

    monkeypatch.setattr(failures, "ANSWER", 0.1)
    ranks[1].store = CutOff()
    failure = failures.explain(raised(RuntimeError(TIMED_OUT)), 1, ranks[1])
    ranks[1].tell(failure)
    assert failure.message.startswith("rank 0 of 2 has not answered for 4 s. Rank 1 waited for it in step 7")
    assert len(asked) == 1
    plugged.set()


def test_a_users_mistake_and_a_fault_of_ours() -> None:
    mistake = failures.explain(DataError("no data"), 0, None)
    assert (mistake.message, mistake.exit_code, mistake.can_restart) == ("no data", 2, False)
    fault = failures.explain(raised(KeyError("x")), 0, None)
    assert fault.exit_code == 1
    assert fault.message.startswith("Traceback")
    assert fault.message.endswith("KeyError: 'x'")


@pytest.mark.parametrize(("number", "passes"), [(errno.EACCES, False), (errno.ENOSPC, False), (errno.EIO, True)])
def test_what_the_system_refuses_is_no_fault_of_ours(number: int, passes: bool, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / "nowhere"))
    failure = failures.explain(raised(error), 1, None)
    assert (failure.message, failure.exit_code, failure.can_restart) == (
        file_errors.explain(error),
        75 if passes else 2,
        passes,
    )
    assert str(tmp_path / "nowhere") in failure.message
    of_ours = failures.explain(raised(OSError(errno.EINVAL, "Invalid argument")), 1, None)
    assert of_ours.is_fault and of_ours.message.startswith("Traceback")


def test_a_lost_connection_is_explained_by_the_rank_that_failed(ranks: list[Connection]) -> None:
    ranks[1].tell(Failure(1, "data/x: missing.\nmore", can_restart=False))
    found = failures.explain(raised(RuntimeError(LOST)), 0, ranks[0])
    assert found.message == "stopped because rank 1 failed: data/x: missing."
    assert (found.because_of, found.can_restart, found.exit_code) == (1, False, 2)


def test_also_where_other_code_has_wrapped_it(ranks: list[Connection]) -> None:
    ranks[1].tell(Failure(1, "Traceback ...\nKeyError: 'x'", is_fault=True))
    wrapped = ValueError("could not save")
    wrapped.__cause__ = raised(RuntimeError(LOST))
    found = failures.explain(wrapped, 0, ranks[0])
    assert (found.message, found.exit_code) == ("stopped because rank 1 failed: KeyError: 'x'", 1)


def test_also_where_it_was_lost_while_saving(ranks: list[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has nothing to fix: a run that lost a rank goes on from the checkpoint before."""
    monkeypatch.setattr(failures, "PATIENCE", 0.0)
    wrapped = CheckpointError("step-00000016: could not be saved. Free some space.")
    wrapped.__cause__ = raised(RuntimeError(LOST))
    found = failures.explain(wrapped, 0, ranks[0])
    assert found.can_restart
    assert found.because_of is not None
    assert "ended without a word" in found.message


def test_a_rank_that_ended_without_a_word(ranks: list[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "PATIENCE", 0.2)
    ranks[1].heartbeat.stop()
    found = failures.explain(raised(RuntimeError(LOST)), 0, ranks[0])
    assert found.message.startswith("stopped because rank 1 ended without a word")
    assert (found.because_of, found.can_restart) == (1, True)


def test_a_timeout_names_the_rank_that_does_not_beat(ranks: list[Connection]) -> None:
    ranks[1].heartbeat.stop()
    found = failures.explain(raised(RuntimeError(TIMED_OUT)), 0, ranks[0])
    assert found.message.startswith("rank 1 of 2 has not answered for 4 s; last seen in step 7")
    assert "Rank 0 waited for it in step 7" in found.message
    assert found.can_restart


def test_a_timeout_of_a_rank_that_is_busy_elsewhere(ranks: list[Connection]) -> None:
    found = failures.explain(raised(RuntimeError(TIMED_OUT)), 0, ranks[0])
    assert found.message.startswith("rank 1 of 2 did not come to step 7")
    assert "It is alive, in step 7" in found.message


def test_a_timeout_of_all(ranks: list[Connection]) -> None:
    ranks[1].store.set("gave-up/1", "step 7, all_gather in save")
    found = failures.explain(raised(RuntimeError(TIMED_OUT)), 0, ranks[0])
    assert found.message.startswith("all ranks waited for each other for 4 s: rank 0 in step 7")
    assert "rank 1 in step 7, all_gather in save" in found.message


def test_the_collective_and_our_function_are_read_from_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_where", "")
    heartbeat.note("step 3")
    seen: list[str] = []
    space = {
        "__name__": "torch.distributed.distributed_c10d",
        "look": lambda frame: seen.append(heartbeat.describe(frame)),
    }
    exec("import sys\ndef all_reduce():\n    look(sys._getframe())\ndef wrapper():\n    all_reduce()", space)

    def sum_gradients() -> None:
        space["wrapper"]()  # type: ignore[operator]

    sum_gradients()
    assert seen == ["step 3, all_reduce in sum_gradients"]


PIPELINING, FSDP = "torch.distributed.pipelining.schedules", "torch.distributed.fsdp._fully_shard"


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (
            [(PIPELINING, "_wait_batch_p2p"), (PIPELINING, "_step_microbatches"), (PIPELINING, "step")],
            "send/receive between stages in ours",
        ),
        (
            [
                *(("torch.distributed.distributed_c10d", "all_gather_into_tensor"), (FSDP, "wrapper")),
                *((FSDP, "foreach_all_gather"), (FSDP, "pre_forward"), (FSDP, "_pre_forward")),
            ],
            "all_gather_into_tensor in ours",
        ),
        (
            [(FSDP, "foreach_all_gather_copy_out"), (FSDP, "wait_for_unshard"), (FSDP, "pre_forward")],
            "all_gather in ours",
        ),
        ([], "ours"),
    ],
    ids=["pp", "fsdp begins", "fsdp waits", "no collective"],
)
def test_the_collective_is_named_not_what_torch_does_around_it(
    inside: list[tuple[str, str]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_where", "")
    around = [
        ("torch.nn.modules.module", "_call_impl"),
        ("gptworks.model.gpt", "ours"),
        ("torch.distributed.run", "main"),
    ]
    assert heartbeat._place_in([*inside, *around]) == said


# A hang that nothing but the heartbeat notices


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def inside(modules: Sequence[str], look: Callable[[FrameType], None]) -> None:
    """Call it in the innermost of functions that call each other, one for each module, with that one's frame."""
    inner: Any = lambda: look(sys._getframe().f_back)  # type: ignore[arg-type]  # noqa: E731
    for module in reversed(modules):
        space = {"__name__": module, "inner": inner}
        exec("def call():\n    inner()", space)
        inner = space["call"]
    inner()


STEP = "gptworks.train.step"


@pytest.mark.parametrize(
    ("modules", "is_wait"),
    [
        (("gptworks.train.loop", STEP), True),
        (("gptworks.train.loop", STEP, "torch.distributed.fsdp._fully_shard"), True),
        (("gptworks.train.loop", STEP, "torch._dynamo.eval_frame"), True),
        (("gptworks.train.loop", STEP, "torch._dynamo.eval_frame", "torch._dynamo.convert_frame"), False),
        (("gptworks.train.loop", "gptworks.data.loader"), False),
        (("gptworks.train.loop", "gptworks.train.run", "gptworks.checkpoint.folder"), False),
        (("gptworks.train.loop", "gptworks.train.run", "gptworks.evaluate.heldout"), False),
    ],
)
def test_only_standing_still_in_a_step_is_waiting(
    modules: tuple[str, ...], is_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(heartbeat.time, "monotonic", clock)
    standing = heartbeat._Standing()

    def look(frame: FrameType) -> None:
        standing.seconds(frame, most=10)
        clock.now = 8.0
        assert standing.seconds(frame, most=10) == (8.0 if is_wait else 0.0)

    inside(modules, look)


def test_whatever_moves_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(heartbeat.time, "monotonic", clock)
    standing = heartbeat._Standing()
    seconds: list[float] = []

    def look_after(*pauses: float) -> Callable[[FrameType], None]:
        def look(frame: FrameType) -> None:
            for pause in pauses:
                clock.now += pause
                seconds.append(standing.seconds(frame, most=10))

        return look

    def another_micro_batch(frame: FrameType) -> None:
        look_after(4, 4, 4)(frame)
        heartbeat.moved()  # it happens to be at the same instruction
        look_after(4, 4)(frame)

    inside([STEP], another_micro_batch)
    assert seconds == [0, 4, 8, 0, 4]
    inside([STEP, "torch.nn"], look_after(4, 4, 3600))
    assert seconds[5:] == [0, 4, 14], "an hour in which the process itself was suspended is not an hour of waiting"


def test_one_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", rank_env.FAILURES):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ZeroDivisionError), reporting():
        raise ZeroDivisionError


def test_a_supervised_rank_leaves_its_error_for_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(rank_env.FAILURES, str(tmp_path))
    with pytest.raises(SystemExit) as end, reporting():
        raise TrainingError("not finite")
    assert end.value.code == 2
    assert failures.read_all(tmp_path)[0].message == "not finite"
    assert capsys.readouterr().err == "error: not finite\n"


def test_beats_stop_when_asked(store: distributed.TCPStore) -> None:
    heart = Heartbeat(store, 0, 1, timeout=4.0)
    heart.start()
    heart.stop()
    assert not any(thread.is_alive() for thread in heart._threads)


@pytest.mark.slow
def test_a_rank_that_is_silent_or_has_failed_is_noticed_whatever_the_others_do(store: distributed.TCPStore) -> None:
    """But not one that has said goodbye, nor one that others have not heard of because they were suspended."""
    hearts = [Heartbeat(store, rank, 3, timeout=1.0) for rank in range(3)]
    for heart in hearts:
        heart.start()
    while set(hearts[0]._others) != {1, 2} or 0 not in hearts[2]._others:
        time.sleep(0.01)
    hearts[2].stop()
    hearts[2].say_goodbye()
    found: queue.Queue[tuple[int | None, str]] = queue.Queue()
    hearts[0].watch(lambda *said: found.put(said), None)
    time.sleep(3)  # of rank 2, whose goodbye it was
    assert found.empty()
    hearts[1].stop()
    assert found.get()[0] == 1
    hearts[0].stop()
    again = Heartbeat(store, 0, 3, timeout=60.0)
    again.start()
    again.watch(lambda *said: found.put(said), None)
    store.set("failed", "{}")
    assert found.get()[0] is None
    again.stop()
    silence = heartbeat._Silence()
    silence.look({1: heartbeat.Beat(1, "")}, 2.0, has_failed=False)
    silence._looked -= 1000  # this process was suspended
    silence.look({1: heartbeat.Beat(1, "")}, 2.0, has_failed=False)
    assert silence.longer_than(1.9) == 1 and silence.longer_than(2.1) is None


@pytest.mark.slow
def test_what_can_go_on_when_it_is_started_again_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also under srun or torchrun, where the command itself ends with it."""
    assert Failure(0, "x").exit_code == LostRunError("x").exit_code == 75
    assert Failure(0, "x", can_restart=False).exit_code == UsageError("x").exit_code == 2
    assert Failure(0, "x", is_fault=True).exit_code == 1
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(rank_env.FAILURES, raising=False)
    with pytest.raises(LostRunError, match="rank 0 could not connect to the other ranks"), reporting():
        raise RuntimeError(LOST)
