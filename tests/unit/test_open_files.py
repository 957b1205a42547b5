"""Descriptors of many ranks: the formula against real groups, and the limits of this process."""

import multiprocessing
import os
import resource
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from gptworks.errors import UsageError
from gptworks.launch import open_files


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(open_files.LAZY_GLOO, "")
    monkeypatch.delenv(open_files.LAZY_GLOO)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_becomes_the_hard_one() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    open_files.raise_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == min(hard, 2**20) if hard != resource.RLIM_INFINITY else soft == 2**20


def test_a_world_that_needs_more_is_refused_with_both_numbers() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    open_files.require(200, 2)
    wanted = open_files.needed(500, 2, is_lazy=False)
    assert wanted > 1024
    with pytest.raises(UsageError, match=rf"may have 1024 \(hard limit {hard}\), and 500 ranks need {wanted}"):
        open_files.require(500, 2)


def test_large_worlds_connect_as_they_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    open_files.set_up_gloo(64)
    assert open_files.LAZY_GLOO not in os.environ
    open_files.set_up_gloo(200)
    assert os.environ.pop(open_files.LAZY_GLOO) == "1", "the limit could not be raised"
    open_files.raise_limit()
    open_files.set_up_gloo(open_files.LARGE)
    assert os.environ[open_files.LAZY_GLOO] == "1"
    monkeypatch.setenv(open_files.LAZY_GLOO, "0")
    open_files.set_up_gloo(10_000)
    assert os.environ[open_files.LAZY_GLOO] == "0", "what the user says counts"


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _member(rank: int, world_size: int, folder: Path, lazy: str, everybody: Any, results: Any) -> None:
    os.environ[open_files.LAZY_GLOO] = lazy
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(folder / f"store-{lazy}"), world_size), rank=rank, world_size=world_size
    )
    everybody.wait(60)
    before = num_open()
    group = distributed.new_group(backend="gloo")
    found: list[Any] = [None] * world_size
    for _ in range(2):  # all that `Ranks` does with a group
        distributed.all_reduce(torch.ones(1), group=group)
        distributed.all_gather_object(found, rank, group=group)
        distributed.broadcast_object_list([rank], src=0, group=group)
    everybody.wait(60)
    results.put(num_open() - before)
    everybody.wait(60)
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
@pytest.mark.parametrize(("world_size", "lazy"), [(8, "0"), (8, "1"), (3, "0")])
def test_the_formula_is_what_a_group_takes(world_size: int, lazy: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    everybody, results = context.Barrier(world_size), context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: none of ours runs here
        members = [
            context.Process(target=_member, args=(rank, world_size, tmp_path, lazy, everybody, results))
            for rank in range(world_size)
        ]
        for member in members:
            member.start()
    results._writer.close()  # so that members that fail are not waited for
    try:
        counted = [results.get() for _ in members]
    finally:
        for member in members:
            member.join(5)
            member.kill()
    is_lazy = lazy == "1"
    formula = open_files.needed(world_size, 3, is_lazy=is_lazy) - open_files.needed(world_size, 2, is_lazy=is_lazy)
    if is_lazy:
        assert max(counted) <= formula
    else:
        assert counted == [formula] * world_size
