"""run_layout(Layout(tp=2), function): the function on every rank of the layout, each a process forked from this one.

A rank is forked for one call and gone after it, so that what a test breaks in it stays broken for nobody else. That is
cheap: two ranks fork, meet and end in 0.06 s, eight in 0.3 s. What is not cheap is what a rank imports for itself, 2 to
4 s of a core each, so that all of it is imported here, before the first fork.
"""

import faulthandler
import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from time_limit import stacks_file

from gptworks.config.derive import Layout
from gptworks.launch import process_group
from gptworks.launch.world import World

Function = Callable[[World], Any]


@pytest.fixture(scope="session")
def _imported() -> None:
    """What ranks import when they cut a model and make its optimizer."""
    import torch._dynamo
    import torch.distributed.checkpoint  # noqa: F401

    import gptworks.parallel.pipeline
    import gptworks.parallel.shard
    import gptworks.parallel.tensor  # noqa: F401


def _rank(function: Function, layout: Layout, rank: int, rendezvous: str, answer: Any) -> None:
    with stacks_file().open("w") as stacks:
        faulthandler.enable(stacks)
        torch.set_num_threads(1)
        try:
            from torch import distributed

            store = distributed.FileStore(rendezvous, layout.world_size)
            world = process_group.join(layout, rank, torch.device("cpu"), store=store)
            answer.send((function(world), None))
        except BaseException:
            answer.send((None, traceback.format_exc()))


@pytest.fixture
def run_layout(tmp_path: Path, _imported: None) -> Callable[..., list[Any]]:
    """The results of all ranks. At the first failure the others, which would wait for ever, are killed."""
    calls = count()

    def run(layout: Layout, function: Function) -> list[Any]:
        context = multiprocessing.get_context("fork")
        rendezvous = str(tmp_path / f"rendezvous-{next(calls)}")
        answers, processes = {}, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: none of ours runs here
            for rank in range(layout.world_size):
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(function, layout, rank, rendezvous, there), daemon=True)
                process.start()
                there.close()
                answers[here] = rank
                processes.append(process)
        found: dict[int, Any] = {}
        try:
            while len(found) < layout.world_size:
                for answer in wait([here for here, rank in answers.items() if rank not in found]):
                    try:
                        value, failure = answer.recv()
                    except EOFError:
                        value, failure = None, "it ended without a word"
                    if failure:
                        pytest.fail(f"rank {answers[answer]} of {layout}:\n{failure}")
                    found[answers[answer]] = value
            for process in processes:
                process.join(5)
        finally:
            for process in processes:
                process.kill()
                process.join()
                stacks_file(process.pid).unlink(missing_ok=True)
            for answer in answers:
                answer.close()
        return [found[rank] for rank in range(layout.world_size)]

    return run


@pytest.fixture(scope="session")
def compiler() -> None:
    """Imported once, which takes seconds, and not by every rank."""
    torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()
    torch.compiler.reset()
