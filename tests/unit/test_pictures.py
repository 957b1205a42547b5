"""The pictures of docs/explain are what their script draws, and its timelines are in torch's order."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

EXPLAIN = Path(__file__).resolve().parents[2] / "docs" / "explain"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pictures", EXPLAIN / "make_pictures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_pictures"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_pictures_are_not_stale(maker: ModuleType) -> None:
    for name, draw in maker.PICTURES.items():
        written = (EXPLAIN / name).read_text(encoding="utf-8")
        assert written == draw().svg(), f"{name} is stale: run `python docs/explain/make_pictures.py`"
        ElementTree.fromstring(written)


@pytest.mark.parametrize("page", ["parallelism.md", "parallelism.zh.md"])
def test_the_page_shows_all_of_them_and_its_links_lead_somewhere(maker: ModuleType, page: str) -> None:
    text = (EXPLAIN / page).read_text(encoding="utf-8")
    assert set(re.findall(r"!\[[^]]*]\(([^)]+)\)", text)) == set(maker.PICTURES)
    for target in re.findall(r"]\(([^)#]+)", text):
        assert (EXPLAIN / target).exists(), target


def test_interleaved_passes_are_in_the_order_of_torch(maker: ModuleType) -> None:
    from torch.distributed.pipelining import schedules

    pp, micro_batches, chunks = 4, 8, 2
    schedule = object.__new__(schedules.ScheduleInterleaved1F1B)  # no processes are needed to ask for its order
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = pp, chunks, micro_batches
    schedule.number_of_rounds, schedule.microbatches_per_round = micro_batches // pp, pp
    for rank in range(pp):
        actions = [action for action in schedule._calculate_single_rank_operations(rank) if action is not None]
        passes = [action for action in actions if action.computation_type.name in {"FORWARD", "FULL_BACKWARD"}]
        theirs = [(a.computation_type.name == "FORWARD", a.microbatch_index, a.stage_index) for a in passes]
        assert [(p.forward, p.micro, p.stage) for p in maker.order_of(rank, pp, micro_batches, chunks)] == theirs


def test_a_timeline_of_1f1b_has_the_known_bubble(maker: ModuleType) -> None:
    """(pp - 1) / (micro-batches + pp - 1) of the time, a backward pass being twice a forward pass."""
    begun = maker.timeline(4, 8, 1)
    assert max(start + (1 if one.forward else 2) for passes in begun for one, start in passes) == 3 * (8 + 3)


def test_the_architecture_is_that_of_the_imports() -> None:
    spec = importlib.util.spec_from_file_location("make_architecture", EXPLAIN / "make_architecture.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    written = (EXPLAIN / "architecture.svg").read_text(encoding="utf-8")
    assert written == maker.svg(), "architecture.svg is stale: run `python docs/explain/make_architecture.py`"
    drawn = {element.text for element in ElementTree.fromstring(written).iter("{http://www.w3.org/2000/svg}text")}
    assert {"cli", "train", "model", "config"} <= drawn
    graph = {"cli": {"train", "model"}, "train": {"model"}, "model": set()}
    assert maker.levels_of(graph) == {"model": 0, "train": 1, "cli": 2}
    assert maker.without_detours(graph) == {"cli": {"train"}, "train": {"model"}, "model": set()}
