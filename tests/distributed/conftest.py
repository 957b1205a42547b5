"""run_layout(Layout(tp=2), function): the function on every rank of the layout, each a process forked from this one."""

import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.config.derive import Layout
from gptworks.parallel import launch
from gptworks.parallel.launch import World

Function = Callable[[World], Any]


def _rank(function: Function, layout: Layout, rank: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        from torch import distributed

        store = distributed.FileStore(meeting, layout.world_size)
        world = launch.join(layout, rank, torch.device("cpu"), store=store)
        results.put((rank, function(world), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


@pytest.fixture
def run_layout(tmp_path: Path) -> Callable[..., list[Any]]:
    """The results of all ranks. At the first failure the others, which would wait for ever, are killed."""

    def run(layout: Layout, function: Function, *, timeout: float = 120) -> list[Any]:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        meeting = str(tmp_path / f"meeting-{time.monotonic_ns()}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: none of ours runs here
            processes = [
                context.Process(target=_rank, args=(function, layout, rank, meeting, results), daemon=True)
                for rank in range(layout.world_size)
            ]
            for process in processes:
                process.start()
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(found) < layout.world_size:
                rank, value, failure = results.get(timeout=max(0.1, deadline - time.monotonic()))
                if failure:
                    pytest.fail(f"rank {rank} of {layout}:\n{failure}")
                found[rank] = value
        finally:
            for process in processes:
                process.join(5 if len(found) == layout.world_size else 0)
                process.kill()
        return [found[rank] for rank in range(layout.world_size)]

    return run


@pytest.fixture(scope="session")
def compiler() -> None:
    """Imported once, which takes seconds, and not by every rank."""
    torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()
    torch.compiler.reset()
