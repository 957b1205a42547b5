"""Reading ahead in a thread: the same batches, counted when they are handed out, and errors where they belong."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gptworks
from gptworks.config.derive import BatchPlan
from gptworks.data.loader import Batches, EodPolicy
from gptworks.data.windows import Sample
from gptworks.errors import DataError
from gptworks.train import loop, prefetch
from gptworks.train.prefetch import Prefetch

CPU = torch.device("cpu")
PLAN = BatchPlan(4, 2, 2, 1)


class Samples:
    """Sample i counts up from i. Those from `damaged` on cannot be read."""

    per_epoch = 100
    sources = ()

    def __init__(self, damaged: int = 100) -> None:
        self.damaged = damaged
        self.read_by: list[tuple[int, str]] = []
        self.arrived = threading.Semaphore(0)

    def at(self, first: int, count: int) -> list[Sample]:
        self.read_by.append((first, threading.current_thread().name))
        self.arrived.release()
        if first >= self.damaged:
            raise DataError(f"sample {first} is damaged")
        return [Sample(np.arange(i, i + 9, dtype=np.int64), None) for i in range(first, first + count)]


def batches_of(samples: Samples) -> Batches:
    return Batches(samples, PLAN, EodPolicy(None, False, False, False), vocab_size=200)


@contextmanager
def reading_ahead(samples: Samples) -> Iterator[Prefetch]:
    reader = Prefetch(batches_of(samples), CPU)
    try:
        yield reader
    finally:
        reader.close()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def first_tokens(micro_batches: list[Any]) -> list[int]:
    return [int(batch.tokens[row, 0]) for batch in micro_batches for row in range(len(batch.tokens))]


def test_the_same_batches_and_the_count_is_of_those_handed_out() -> None:
    plain, samples = batches_of(Samples()), Samples()
    with reading_ahead(samples) as reader:
        for step in range(1, 6):
            found, wanted = reader.next_step(), plain.next_step()
            assert first_tokens(found) == first_tokens(wanted) == list(range(4 * (step - 1), 4 * step))
            assert reader.batches.consumed == plain.consumed == 4 * step
            for _ in range(2 if step > 1 else 4):  # two micro-batches of the first step, two of each next
                assert samples.arrived.acquire(timeout=30)
            assert samples.read_by[-1] == (4 * step + 2, "prefetch_0"), "the next step is read before it is asked for"
    assert {name for _, name in samples.read_by} == {"prefetch_0"}


def test_a_step_that_is_done_again_is_read_again() -> None:
    with reading_ahead(Samples()) as reader:
        first = first_tokens(reader.next_step())
        reader.next_step()
        reader.batches.consumed = 0
        assert first_tokens(reader.next_step()) == first
        assert reader.batches.consumed == 4


def test_an_error_is_raised_by_the_step_that_needs_the_batch() -> None:
    samples = Samples(damaged=8)
    with reading_ahead(samples) as reader:
        reader.next_step()
        for _ in range(4):
            assert samples.arrived.acquire(timeout=30)
        reader.next_step()  # the thread has failed by the end of it
        for _ in range(2):
            with pytest.raises(DataError, match="sample 8 is damaged"):
                reader.next_step()
            assert reader.batches.consumed == 8


def test_the_thread_ends() -> None:
    with reading_ahead(Samples()) as reader:
        reader.next_step()
        assert threads() == ["prefetch_0"]
    assert threads() == []


# In a run


@pytest.fixture
def train(small_store: Path, tmp_path: Path) -> Any:
    def run(out: str, *overrides: str) -> list[str]:
        model = ["num_layers=1", "hidden_size=16", "num_heads=2", "vocab_size=512", "max_positions=16"]
        rest = ["data.split=90,10", "data.seq_len=16", "batch.global_size=4", "batch.micro_size=2", "train.steps=6"]
        often = ["train.log_every=1", "evaluate.every=2", "evaluate.batches=1", "checkpoint.every=2"]
        here = [f"data.path={small_store}", f"run.out={tmp_path / out}", "run.device=cpu", "run.threads=1"]
        asynchronous = ["checkpoint.asynchronous=true"]
        settings = [*(f"model.{word}" for word in model), *rest, *often, *here, *asynchronous, *overrides]
        loop.train(gptworks.load_config(overrides=settings), resume_from="auto")
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        return [line.partition('"tokens_per_sec"')[0] for line in lines]

    return run


def test_a_run_reads_ahead_beside_evaluation_and_saving(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers; and one that goes on begins with the sample after the last that was trained on."""
    plain = train("plain")
    read_by: list[str] = []
    read = Batches.read

    def noted(self: Batches, consumed: int) -> Any:
        read_by.append(threading.current_thread().name)
        return read(self, consumed)

    monkeypatch.setattr(Batches, "read", noted)
    monkeypatch.setattr(prefetch, "READ_AHEAD", {"cpu"})
    train("ahead", "train.steps=4", "optim.decay_steps=6")
    assert train("ahead", "optim.decay_steps=6") == plain
    assert set(read_by) == {"prefetch_0"}
    assert threads() == []


def test_a_run_that_fails_leaves_no_thread(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "READ_AHEAD", {"cpu"})
    seen: list[list[str]] = []

    def broken(*_: Any, **__: Any) -> None:
        seen.append(threads())
        raise DataError("nothing goes")

    monkeypatch.setattr(loop, "backward", broken)
    with pytest.raises(DataError, match="nothing goes"):
        train("broken")
    assert seen == [["prefetch_0"]]
    assert threads() == []
