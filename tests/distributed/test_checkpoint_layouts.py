"""Saved on one layout, loaded on another: weights and moments to the bit, and the same training from there on.

A layout is one line in LAYOUTS.
"""

import ctypes
import hashlib
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from steps import LENGTH, VOCAB, micro_batches
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Shard

from gptworks.checkpoint import folder as folders
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint import portable
from gptworks.checkpoint.background import Background
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.checkpoint.formats import dcp, safetensors_file
from gptworks.checkpoint.manifest import Manifest
from gptworks.checkpoint.systems import huggingface
from gptworks.config.derive import Layout
from gptworks.config.schema import InitConfig, ModelConfig, OptimConfig, ScalerConfig
from gptworks.errors import CheckpointError
from gptworks.launch import process_group
from gptworks.launch.ranks import Ranks
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.model.init import seed_of
from gptworks.parallel import build as building
from gptworks.parallel.build import FreshWeights
from gptworks.parallel.parts import Part
from gptworks.parallel.slices import copied_to_cpu, slice_of, to_fill, to_store
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.step import train_step

# 61 and 3 are divided by nothing: slices differ in size, and with fsdp4 some have nothing in them.
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=61, max_positions=3)
LAYOUTS = [
    Layout(),
    Layout(fsdp=2),
    Layout(dp=2, fsdp=2),
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=2, tp=2),
]
RunLayout = Callable[..., list[Any]]


# Parts


def build(world: World, cfg: ModelConfig = MODEL) -> Part:
    return building.build(cfg, world, torch.float32, FreshWeights(InitConfig(), cfg.num_layers, seed=1))


# State: each tensor is a function of its name


def whole(name: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of(0, name))
    return torch.randn(shape, generator=generator)


def expected(name: str, tensor: Tensor) -> Tensor:
    """This rank's slice of it, cut out by its offsets."""
    mine = slice_of(tensor)
    found = whole(name, mine.shape)
    for dim, (begin, size) in enumerate(zip(mine.offsets, mine.here.shape, strict=True)):
        found = found.narrow(dim, begin, size)
    return found


def named_state(part: GPT, optimizer: torch.optim.AdamW) -> list[tuple[str, Tensor]]:
    moments = optim.moments(part, optimizer)
    weights = [(f"model.{name}", parameter.detach()) for name, parameter in part.named_parameters()]
    return weights + [(f"optim.{name}", tensor) for name, tensor in moments.items()]


def state_of(world: World, *, filled: bool) -> tuple[GPT, torch.optim.AdamW, list[tuple[str, Tensor]]]:
    part = build(world)
    optimizer = optim.build(part, OptimConfig())
    state = named_state(part, optimizer)
    for name, tensor in to_fill(state, tied=True):
        slice_of(tensor).here.copy_(expected(name, tensor) if filled else torch.tensor(7.0))
    return part, optimizer, state


def manifest_of(step: int, world: World) -> Manifest:
    return Manifest(step, 4 * step, step, {}, "", ["data"], {}, layout=str(world.layout))


def weights_among(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}


def save_at(step: int, run: Path, world: World, ranks: Ranks, *, with_portable: bool = True) -> Path:
    _, _, state = state_of(world, filled=True)
    tensors = to_store(state, tied=True)
    weights = weights_among(tensors) if with_portable else None
    return CheckpointFolder(run, ranks).save(manifest_of(step, world), tensors, weights, MODEL, None)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def saved(layout: Layout, run_layout: RunLayout, shelf: Path) -> Path:
    """A checkpoint of that layout, made once."""
    run = shelf / str(layout)
    if not run.exists():
        run_layout(layout, lambda world: save_at(1, run, world, Ranks(world)))
    return run / "checkpoints" / "step-00000001"


# Any layout to any other


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_loads_what_any_other_saved(layout: Layout, run_layout: RunLayout, shelf: Path) -> None:
    sources = [saved(source, run_layout, shelf) for source in LAYOUTS]

    def load(world: World) -> tuple[int, list[str]]:
        ranks = Ranks(world)
        wrong, num_compared = [], 0
        _, _, state = state_of(world, filled=False)
        wanted = list(to_fill(state, tied=True))
        for source in sources:
            for _, tensor in wanted:
                slice_of(tensor).here.fill_(7.0)
            dcp.load_into(source / folders.STATE, wanted, ranks)
            for name, tensor in wanted:
                num_compared += slice_of(tensor).here.numel()
                if not torch.equal(slice_of(tensor).here, expected(name, tensor)):
                    wrong.append(f"{name} of {source}")
        return num_compared, wrong

    results = run_layout(layout, load)
    assert [wrong for _, wrong in results] == [[]] * layout.world_size
    num_parameters = sum(p.numel() for p in GPT(MODEL).parameters())
    assert sum(compared for compared, _ in results) >= len(LAYOUTS) * 3 * num_parameters, "nothing was left out"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_number_is_stored_once_and_by_several_ranks(layout: Layout, run_layout: RunLayout, shelf: Path) -> None:
    step = saved(layout, run_layout, shelf)
    manifest = manifests.read(step)
    manifests.verify(step, manifest)
    assert manifest.layout == str(layout)
    found = dcp._Reader(step / folders.STATE).read_metadata().state_dict_metadata
    names = {name for name, _ in GPT(MODEL).named_parameters()}
    assert found.keys() == {f"{kind}{n}" for n in names for kind in ("model.", "optim.exp_avg.", "optim.exp_avg_sq.")}
    for name, entry in found.items():
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), name
    files = [entry["bytes"] for name, entry in manifest.files.items() if name.endswith(".distcp")]
    assert len(files) == layout.world_size
    assert max(files) < 1.3 * sum(files) / len(files) + 8000, "the ranks share the work"


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_the_portable_folder_is_that_of_one_process(layout: Layout, run_layout: RunLayout, shelf: Path) -> None:
    one, many = (saved(each, run_layout, shelf) / folders.PORTABLE for each in (Layout(), layout))
    assert {path.name for path in many.iterdir()} == {"model.safetensors", "config.json"}
    for path in one.iterdir():
        assert (many / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_large_portable_folder_is_spread_over_files_of_several_writers(run_layout: RunLayout, tmp_path: Path) -> None:
    def write(world: World) -> list[str]:
        _, _, state = state_of(world, filled=True)
        weights = weights_among(to_store(state, tied=True))
        written = portable.write(tmp_path / "hf", MODEL, weights, Ranks(world), eod_id=None, file_bytes=6000)
        return [path.name for path in written]

    first, second = run_layout(Layout(fsdp=2), write)
    assert "model.safetensors.index.json" in first
    assert sum(name.startswith("model-0") for name in first) >= 2
    assert sum(name.startswith("model-0") for name in second) >= 2
    weights = huggingface.open(tmp_path / "hf", {}).require_whole()
    for name, parameter in GPT(MODEL).named_parameters():
        assert torch.equal(weights.tensor(name, parameter.shape), whole(f"model.{name}", parameter.shape)), name


def test_an_older_manifest_has_no_layout(tmp_path: Path) -> None:
    manifest_of(1, World(torch.device("cpu"))).write(tmp_path)
    values = json.loads((tmp_path / manifests.NAME).read_text())
    older = {name: value for name, value in values.items() if name not in {"layout", "checksum"}}
    (tmp_path / manifests.NAME).write_text(json.dumps(older | {"version": 1}))
    assert manifests.read(tmp_path).layout == "1"


# No rank holds the model


def peak_growth(function: Callable[[], object]) -> int:
    """Bytes by which the memory of this process exceeded at its highest what it was before."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far

    def field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    before = field("VmRSS")
    function()
    return field("VmHWM") - before


@pytest.mark.parametrize("layout", [Layout(fsdp=2), Layout(pp=2)], ids=str)
def test_beside_its_part_no_rank_holds_more_than_one_tensor(layout, run_layout: RunLayout, tmp_path: Path) -> None:
    cfg = ModelConfig(num_layers=2, hidden_size=1024, num_heads=4, vocab_size=512, max_positions=8)
    largest = 4 * 4 * cfg.hidden_size**2
    whole_model = 4 * sum(p.numel() for p in GPT(cfg).parameters())
    assert whole_model > 5 * largest

    small = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=512, max_positions=8)

    def write(world: World) -> int:
        # What is freed is given back at once (M_MMAP_THRESHOLD), so that what is resident is what is held.
        ctypes.CDLL(None).mallopt(-3, 64 * 1024)
        part = build(world, cfg)
        weights = to_store(part.named_parameters(), tied=True)
        ranks = Ranks(world)
        # A rank is a fork: code that it has not run yet is not in its memory, and is not what is measured.
        little = to_store(build(world, small).named_parameters(), tied=True)
        portable.write(tmp_path / "warm", small, little, ranks, eod_id=None)
        return peak_growth(lambda: portable.write(tmp_path / "hf", cfg, weights, ranks, eod_id=None))

    slack = 4 * portable._PIECE_BYTES
    for growth in run_layout(layout, write):
        assert growth < largest + slack, f"{growth / 1e6:.1f} MB, the largest tensor has {largest / 1e6:.1f} MB"
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > whole_model


# Training goes on


TRAINED = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_positions=LENGTH)


def train(part: Part, optimizer: torch.optim.AdamW, world: World, steps: range) -> list[float]:
    scaler = LossScaler(ScalerConfig(), enabled=False)
    return [
        train_step(part, optimizer, micro_batches(world, step, 2), world, scaler, clip=1.0, seed=1, step=step).loss
        for step in steps
    ]


def start(world: World) -> tuple[Part, torch.optim.AdamW]:
    part = build(world, TRAINED)
    for name, tensor in to_fill(part.named_parameters(), tied=True):
        slice_of(tensor).here.copy_(0.05 * expected(name, tensor))
    return part, optim.build(part, OptimConfig(lr=0.01))


def save_in_between(world: World, state: Path) -> list[float]:
    part, optimizer = start(world)
    train(part, optimizer, world, range(3))
    dcp.save(state, to_store(named_state(part, optimizer), tied=True), Ranks(world))
    return train(part, optimizer, world, range(3, 6))


def go_on(world: World, state: Path, updates: int = 3) -> list[float]:
    part, optimizer = start(world)
    moments = optim.moments(part, optimizer)
    wanted = [(f"model.{n}", p.detach()) for n, p in part.named_parameters()]
    wanted += [(f"optim.{n}", t) for n, t in moments.items()]
    dcp.load_into(state, to_fill(wanted, tied=True), Ranks(world))
    optim.set_moments(part, optimizer, moments, updates)
    return train(part, optimizer, world, range(3, 6))


def test_training_goes_on_as_if_nothing_had_happened(run_layout: RunLayout, tmp_path: Path) -> None:
    """On the same layout, from shards to cut matrices, and from stages of cut matrices to shards."""
    sharded, piped = tmp_path / "fsdp2", tmp_path / "pp2.tp2"
    truth = run_layout(Layout(fsdp=2), lambda world: save_in_between(world, sharded))[0]
    same = run_layout(Layout(pp=2, tp=2), lambda world: save_in_between(world, piped))
    assert all(found == pytest.approx(truth, abs=5e-6) for found in same)
    for again, from_pipeline, forgetful in run_layout(
        Layout(fsdp=2), lambda world: [go_on(world, sharded), go_on(world, piped), go_on(world, sharded, updates=0)]
    ):
        assert again == truth, "to the bit on the same layout"
        assert from_pipeline == pytest.approx(truth, abs=5e-6)
        assert max(abs(a - b) for a, b in zip(forgetful, truth, strict=True)) > 2e-4, "without moments it is seen"
    for found in run_layout(Layout(tp=2), lambda world: go_on(world, sharded)):
        assert found == pytest.approx(truth, abs=5e-6)


def test_after_an_evaluation_the_shards_are_stored_not_what_was_gathered(run_layout: RunLayout) -> None:
    def evaluate(world: World) -> tuple[int, int, bool]:
        part, optimizer = start(world)
        train(part, optimizer, world, range(1))
        with torch.no_grad():
            part(torch.zeros(1, 4, dtype=torch.long))
        gathered = dict(part.named_parameters())["wte.weight"]
        part.reshard_all()
        shard = dict(part.named_parameters())["wte.weight"]
        knows = all(parameter in optimizer.state for _, parameter in part.named_parameters())
        return slice_of(gathered).here.numel(), slice_of(shard).here.numel(), knows

    assert run_layout(Layout(fsdp=2), evaluate) == [(97 * 16, 49 * 16, True), (97 * 16, 48 * 16, True)]


# One rank fails


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return "no error"


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "rank"),
    [
        (torch_dcp.FileSystemWriter, "write_data", 1),
        (torch_dcp.FileSystemWriter, "finish", 0),
        (safetensors_file.Writer, "write", 0),
        (CheckpointFolder, "_publish", 0),
    ],
    ids=["state", "metadata", "portable", "publishing"],
)
def test_a_rank_that_cannot_write_fails_all(owner, method, rank, run_layout: RunLayout, tmp_path: Path) -> None:
    def save_twice(world: World) -> tuple[str, str]:
        ranks = Ranks(world)
        save_at(1, tmp_path, world, ranks)
        whole_one = getattr(owner, method)
        if world.rank == rank:
            setattr(owner, method, full_disk)
        failed = message_of(lambda: save_at(2, tmp_path, world, ranks))
        setattr(owner, method, whole_one)
        return failed, message_of(lambda: save_at(3, tmp_path, world, ranks))

    for failed, after in run_layout(Layout(fsdp=2), save_twice):
        assert "step-00000002: could not be saved" in failed
        assert "No space left on device" in failed
        assert after == "no error"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000001", "step-00000003"}


def test_no_message_is_lost_when_a_writer_of_the_portable_folder_fails_at_once(run_layout, tmp_path: Path) -> None:
    """It cannot even open its file, while the other ranks are sending."""

    def save(world: World) -> str:
        if world.rank == 0:
            safetensors_file.Writer.__enter__ = full_disk  # type: ignore[assignment]
        return message_of(lambda: save_at(1, tmp_path, world, Ranks(world)))

    for message in run_layout(Layout(fsdp=2), save):
        assert "step-00000001: could not be saved" in message
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_folder_of_its_own_for_one_rank_is_noticed(run_layout: RunLayout, tmp_path: Path) -> None:
    runs = [tmp_path / "shared", tmp_path / "private"]

    def save(world: World) -> str:
        return message_of(lambda: save_at(1, runs[world.rank], world, Ranks(world)))

    for message in run_layout(Layout(fsdp=2), save):
        assert "__1_0.distcp: written by another rank, but not visible here" in message
    assert not list((tmp_path / "shared" / "checkpoints").iterdir())


def test_a_rank_that_is_killed_while_saving_fails_the_others(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        store = distributed.FileStore(str(tmp_path / "meeting"), 2)
        world = process_group.join(Layout(fsdp=2), number, torch.device("cpu"), store=store)
        ranks = Ranks(world)
        save_at(1, tmp_path, world, ranks)
        if number == 1:
            torch_dcp.FileSystemWriter.write_data = lambda *_: os._exit(9)  # type: ignore[method-assign]
        (tmp_path / "said").write_text(message_of(lambda: save_at(2, tmp_path, world, ranks)))

    processes = []
    for number in range(2):
        processes.append(os.fork())
        if processes[-1] == 0:
            try:
                rank(number)
            finally:
                os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    assert codes == [0, 9]
    assert "step-00000002: could not be saved" in (tmp_path / "said").read_text()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def remove(path: Path) -> None:
    path.unlink()


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.slow
@pytest.mark.parametrize("damage", [remove, cut_off])
def test_a_damaged_shard_fails_all_ranks(damage, run_layout: RunLayout, tmp_path: Path) -> None:
    run_layout(Layout(fsdp=2), lambda world: save_at(1, tmp_path, world, Ranks(world), with_portable=False))
    step = tmp_path / "checkpoints" / "step-00000001"
    damage(step / folders.STATE / "__1_0.distcp")

    def load(world: World) -> tuple[str, str]:
        ranks = Ranks(world)
        share = {"share": world.rank, "shares": ranks.size}
        found = message_of(lambda: ranks.on_all(lambda: manifests.verify(step, manifests.read(step), **share)))
        _, _, state = state_of(world, filled=False)
        return found, message_of(lambda: dcp.load_into(step / folders.STATE, to_fill(state, tied=True), ranks))

    results = run_layout(Layout(fsdp=2), load)
    for verified, loaded in results:
        assert "__1_0.distcp" in verified
        assert "cannot be read" in loaded
        assert "The checkpoint is damaged" in loaded


def test_a_tensor_that_only_one_rank_misses_fails_all(run_layout: RunLayout, tmp_path: Path) -> None:
    def load(world: World) -> str:
        ranks = Ranks(world)
        dcp.save(tmp_path / "state", {"a": torch.zeros(2)}, ranks)
        wanted = {"a": torch.empty(2), **({"b": torch.empty(2)} if world.rank == 1 else {})}
        return message_of(lambda: dcp.load_into(tmp_path / "state", wanted, ranks))

    for message in run_layout(Layout(dp=2), load):
        assert "has no tensor 'b' (1 missing of 2)" in message
        assert message.endswith("(rank 1 of 2)")


def test_slices_that_do_not_make_up_a_tensor_are_refused(run_layout: RunLayout, tmp_path: Path) -> None:
    """The ranks disagree about where they sit: nothing is written that could be loaded as if it were whole."""

    def save(world: World) -> str:
        tensor = DTensor.from_local(torch.ones(2), world.axis("fsdp"), [Shard(0)])
        mine = {"blocks.0.ln1.bias": slice_of(tensor)} if world.rank == 0 else {}
        checkpoints = CheckpointFolder(tmp_path, Ranks(world))
        return message_of(lambda: checkpoints.save(manifest_of(1, world), mine, mine, MODEL, None))

    for message in run_layout(Layout(fsdp=2), save):
        assert "could not be saved" in message
    assert not list((tmp_path / "checkpoints").iterdir())


def test_metadata_that_lost_a_slice_is_refused(run_layout: RunLayout, tmp_path: Path) -> None:
    """torch would leave that part of the tensor as it was."""
    run_layout(Layout(fsdp=2), lambda world: save_at(1, tmp_path, world, Ranks(world), with_portable=False))
    state = tmp_path / "checkpoints" / "step-00000001" / folders.STATE
    metadata = pickle.loads((state / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.wte.weight"].chunks.pop()
    (state / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"the slices of 'model\.wte\.weight' do not cover it exactly"):
        dcp.load_into(state, {"model.wpe.weight": torch.empty(3, 16)})


# Saving beside training


@pytest.mark.parametrize("layout", [Layout(), Layout(fsdp=2)], ids=str)
def test_what_happens_after_the_copy_does_not_reach_the_file(layout, run_layout: RunLayout, tmp_path: Path) -> None:
    def save_and_go_on(world: World) -> tuple[bool, bool]:
        _, _, state = state_of(world, filled=True)
        copies = copied_to_cpu(to_store(state, tied=True))
        checkpoints = CheckpointFolder(tmp_path, Ranks(world))
        may_write = threading.Event()

        def work() -> None:
            assert may_write.wait(30)
            checkpoints.save(manifest_of(1, world), copies, weights_among(copies), MODEL, None)

        background = Background()
        background.start(work)
        absent = checkpoints.latest() is None  # training goes on meanwhile
        for _, tensor in state:
            slice_of(tensor).here.zero_()
        distributed.barrier()
        may_write.set()
        background.wait()
        wanted = list(to_fill(state, tied=True))
        dcp.load_into(tmp_path / "checkpoints" / "step-00000001" / folders.STATE, wanted, Ranks(world))
        return absent, all(torch.equal(slice_of(t).here, expected(name, t)) for name, t in wanted)

    assert run_layout(layout, save_and_go_on) == [(True, True)] * layout.world_size


def test_a_failure_in_the_background_comes_up_at_the_next_save_on_all_ranks(run_layout, tmp_path: Path) -> None:
    def save(world: World) -> list[str]:
        ranks = Ranks(world)
        background = Background()
        finish = torch_dcp.FileSystemWriter.write_data
        if world.rank == 1:
            torch_dcp.FileSystemWriter.write_data = full_disk  # type: ignore[assignment, method-assign]
        background.start(lambda: save_at(1, tmp_path, world, ranks))
        said = [message_of(lambda: background.start(lambda: None))]
        torch_dcp.FileSystemWriter.write_data = finish  # type: ignore[method-assign]
        background.start(lambda: save_at(2, tmp_path, world, ranks))
        return [*said, message_of(background.wait)]

    for first, second in run_layout(Layout(fsdp=2), save):
        assert "step-00000001: could not be saved" in first
        assert second == "no error"


def test_death_in_the_middle_of_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    world = World(torch.device("cpu"))
    process = os.fork()
    if process == 0:
        started = threading.Event()

        def stuck(*_: object) -> None:
            started.set()
            threading.Event().wait()

        save_at(1, tmp_path, world, Ranks())
        CheckpointFolder._publish = stuck  # type: ignore[method-assign, assignment]
        background = Background()
        background.start(lambda: save_at(2, tmp_path, world, Ranks()))
        started.wait(30)
        os._exit(0)
    os.waitpid(process, 0)
    checkpoints = CheckpointFolder(tmp_path)
    assert (tmp_path / "checkpoints" / ".writing-step-00000002" / folders.STATE / ".metadata").is_file()
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.name == "step-00000001"
    manifests.verify(latest, manifests.read(latest))
    checkpoints.remove_leftovers()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_streamed_file_is_the_file_of_safetensors(tmp_path: Path) -> None:
    import safetensors.torch

    tensors = {name: whole(name, torch.Size(shape)) for name, shape in {"b": (3, 5), "a.é": (7,), "c": (2, 0)}.items()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    with safetensors_file.Writer(tmp_path / "ours", shapes) as file:
        for name in sorted(tensors):
            file.write(tensors[name])
    ours, theirs = (hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("ours", "theirs"))
    assert ours == theirs
