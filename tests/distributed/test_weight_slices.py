"""Weights from a checkpoint: a rank reads the bytes of its own slices, and holds what one process would at that place.

A world is imagined rank after rank in this process, with memory: building sends nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.architecture import canonical_name
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.checkpoint.formats import raw_bytes
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.manifest import Manifest
from gptworks.checkpoint.systems import huggingface, ours, registry
from gptworks.checkpoint.systems.contract import Opened, SplitSpec, Weights
from gptworks.config.derive import Layout
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch import process_group
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build
from gptworks.parallel.slices import slice_of

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=122, max_positions=8)
# 3 data ranks divide nothing of this model.
LAYOUTS = [
    Layout(tp=2),
    Layout(fsdp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(dp=2, fsdp=2),
    Layout(fsdp=3, tp=2),
    Layout(pp=2, fsdp=2, tp=2),
]


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[World]:
    with process_group.imagined(layout, rank, nullcontext()) as world:  # type: ignore[arg-type]
        yield world


@pytest.fixture(scope="module")
def one() -> dict[str, torch.Tensor]:
    """The weights of one process."""
    fresh = FreshWeights(InitConfig(std=0.3), MODEL.num_layers, seed=5)
    model = build(MODEL, World(torch.device("cpu")), torch.float32, fresh)
    for name, parameter in model.named_parameters():  # also those that begin as zeros or ones
        parameter.data += torch.arange(parameter.numel()).view(parameter.shape) / 1000 + len(name)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(one: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face's: matrices are transposed, and q, k and v are not ordered as ours."""
    path = tmp_path_factory.mktemp("hf") / "model"
    huggingface.save(path, MODEL, one, eod_id=None)
    return path


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    read = raw_bytes.read_pieces

    def counted(path: Path, places: Any, dtype: torch.dtype) -> torch.Tensor:
        found.append(sum(map(len, places)))
        return read(path, places, dtype)

    monkeypatch.setattr(raw_bytes, "read_pieces", counted)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_holds_what_one_process_holds_there_and_reads_no_more(
    layout: Layout, one: dict[str, torch.Tensor], folder: Path, bytes_read: list[int]
) -> None:
    for rank in range(layout.world_size):
        opened = huggingface.open(folder, {}).require_whole()
        bytes_read.clear()
        with rank_of(layout, rank) as world:
            part = build(MODEL, world, torch.float32, opened)
            held = 0
            for name, parameter in part.named_parameters():
                mine = slice_of(parameter)
                place = tuple(slice(o, o + n) for o, n in zip(mine.offsets, mine.here.shape, strict=True))
                assert torch.equal(mine.here, one[canonical_name(name, tied=True)][place]), (rank, name)
                held += mine.here.numel() * mine.here.element_size()
        assert sum(bytes_read) == held


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(fsdp=2)], ids=str)
def test_two_ranks_read_half_each(
    layout: Layout, one: dict[str, torch.Tensor], folder: Path, bytes_read: list[int]
) -> None:
    everything = sum(4 * tensor.numel() for tensor in one.values())
    for rank in range(2):
        opened = huggingface.open(folder, {})
        bytes_read.clear()
        with rank_of(layout, rank) as world:
            build(MODEL, world, torch.float32, opened)
        assert sum(bytes_read) < 0.55 * everything  # norms, and positions under tp, are on both


REGIONS = [  # of rows, of columns; the third begins and ends inside a head, a shard, and q, k or v
    (slice(0, 16), slice(0, 32)),
    (slice(0, 32), slice(16, 32)),
    (slice(5, 23), slice(3, 4)),
    (slice(31, 32), slice(0, 32)),
    (slice(9, 9), slice(0, 32)),
]


def require_regions(opened: Opened) -> None:
    for name, stored in opened.tensors.items():
        whole = opened.tensor(name, stored.shape)
        for region in REGIONS:
            # The same shares of every tensor, whatever its shape.
            scaled = tuple(
                slice(each.start * size // 32, each.stop * size // 32)
                for each, size in zip(region, stored.shape, strict=False)
            )
            assert torch.equal(opened.tensor(name, stored.shape, scaled), whole[scaled]), (name, scaled)


@pytest.mark.parametrize("system", [name for name in registry.WRITTEN if name != "gptworks"])
def test_regions_of_every_system_are_those_of_the_whole(
    system: str, one: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    writer = registry.system(system)
    path = tmp_path / f"model{writer.SUFFIX}"
    if not writer.SUFFIX:
        path.mkdir()
    cut = SplitSpec(tp=2) if writer.CUTS else SplitSpec()
    writer.write(path, Weights(MODEL, {name: in_memory(tensor) for name, tensor in one.items()}), cut)
    require_regions(writer.open(path, {"num_heads": 4, "gelu": MODEL.gelu, "layernorm_eps": 1e-5}).require_whole())


def test_regions_of_our_own_state_are_those_of_the_whole(one: dict[str, torch.Tensor], tmp_path: Path) -> None:
    manifest = Manifest(1, 4, 1, {"model": MODEL.model_dump(mode="json")}, "", ["data"], {}, layout="one")
    state = {f"model.{name}": tensor for name, tensor in one.items()}
    step = CheckpointFolder(tmp_path).save(manifest, state, None, MODEL, None)
    require_regions(ours.open(step, {}).require_whole())
