"""Distributed-checkpoint folders: all that is read from them is data, though their metadata is a pickle."""

import enum
import io
import os
import pickle
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta

from gptworks.checkpoint.formats import dcp
from gptworks.errors import CheckpointError
from gptworks.parallel.slices import Slice

TENSORS = {
    "model.a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "model.b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "model.c": torch.tensor(7, dtype=torch.int64),
    "optim.exp_avg.a": torch.linspace(0, 1, 40, dtype=torch.float64),
}


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(tmp_path / "state", TENSORS)
    return tmp_path / "state"


@pytest.fixture(scope="module")
def reused_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "state"
    dcp.save(folder, TENSORS)
    return folder


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder: Path, change: Callable[[Metadata], Any]) -> None:
    metadata = metadata_of(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# What is meant to work


class OfPython3112(pickle.Pickler):
    """Members of enums as Python 3.11.0 to 3.11.3 writes them, Debian 12's own among them."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_of_early_versions_of_python_is_read(folder: Path) -> None:
    with (folder / ".metadata").open("r+b") as file:
        metadata = pickle.load(file)
        file.seek(0)
        OfPython3112(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    found = empty()
    dcp.load_into(folder, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_no_other_attribute_is_looked_up(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(getattr, Metadata, "__init__")))
    with pytest.raises(CheckpointError, match="refused to load attribute __init__"):
        dcp.shapes(folder)


def test_tensors_come_back_bit_by_bit(folder: Path) -> None:
    found = empty()
    dcp.load_into(folder, found)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert dcp.shapes(folder) == {name: tensor.shape for name, tensor in TENSORS.items()}


def test_a_slice_gets_what_lies_there(folder: Path) -> None:
    here = torch.zeros(1, 2)
    dcp.load_into(folder, {"model.a": Slice(here, torch.Size([1, 1]), torch.Size([2, 3]))})
    assert here.tolist() == [[4.0, 5.0]]


def test_torch_itself_reads_what_we_write(folder: Path) -> None:
    found = empty()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.z' \(1 missing of 5\)") as caught:
        dcp.load_into(folder, empty() | {"model.z": torch.zeros(1)})
    assert str(folder) in str(caught.value)


def test_another_shape_is_named_with_both(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'model\.a' has shape \[2, 3\], needed \[3, 2\]"):
        dcp.load_into(folder, {"model.a": torch.zeros(3, 2)})


# Hostile metadata. Each payload makes a file when it is unpickled without restriction.


class Calls:
    """Unpickles by calling `function(*arguments)`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def system(marker: Path) -> bytes:
    return pickle.dumps(Calls(os.system, f"touch {marker}"))


def evaluate(marker: Path) -> bytes:
    return pickle.dumps(Calls(eval, f"open({str(marker)!r}, 'w').close()"))


def execute(marker: Path) -> bytes:
    return pickle.dumps(Calls(exec, f"open({str(marker)!r}, 'w').close()"))


def open_file(marker: Path) -> bytes:
    return pickle.dumps(Calls(io.open, str(marker), "w"))


def oldest_protocol(marker: Path) -> bytes:
    return f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()


def through_an_allowed_module(marker: Path) -> bytes:
    """Protocol 4 lets a name have dots: an allowed module and, inside it, `os`."""
    module, name = b"torch.distributed.checkpoint.filesystem", b"os.system"
    command = f"touch {marker}".encode()
    strings = b"".join(b"\x8c" + bytes([len(s)]) + s for s in (module, name))
    return b"\x80\x04" + strings + b"\x93X" + len(command).to_bytes(4, "little") + command + b"\x85R."


def inside_real_metadata(marker: Path) -> bytes:
    return pickle.dumps(Metadata({}, planner_data=Calls(os.system, f"touch {marker}"), storage_data={}))


def as_the_state_of_an_object(marker: Path) -> bytes:
    return pickle.dumps(StorageMeta(checkpoint_id=Calls(os.system, f"touch {marker}")))  # type: ignore[arg-type]


PAYLOADS = [
    system,
    evaluate,
    execute,
    open_file,
    oldest_protocol,
    through_an_allowed_module,
    inside_real_metadata,
    as_the_state_of_an_object,
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_an_exploit_is_refused_and_not_run(payload: Callable[[Path], bytes], folder: Path, tmp_path: Path) -> None:
    armed, marker = tmp_path / "armed", tmp_path / "marker"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        pickle.loads(payload(armed))
    assert armed.exists(), "the payload does nothing, so refusing it proves nothing"

    (folder / ".metadata").write_bytes(payload(marker))
    with pytest.raises(CheckpointError, match="refused to load") as caught:
        dcp.load_into(folder, empty())
    assert "Do not trust this file" in str(caught.value)
    assert str(folder / ".metadata") in str(caught.value)
    with pytest.raises(CheckpointError, match="refused to load"):
        dcp.shapes(folder)
    assert not marker.exists()


def test_an_object_among_the_tensors_is_refused(tmp_path: Path) -> None:
    """torch would unpickle such an entry with no restriction at all."""
    marker = tmp_path / "marker"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        payload = Calls(os.system, f"touch {marker}")
        torch_dcp.save({"model.a": torch.zeros(2), "extra": payload}, checkpoint_id=tmp_path / "state", no_dist=True)
    for wanted in ({"model.a": torch.zeros(2)}, {"extra": torch.zeros(2)}):
        with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
            dcp.load_into(tmp_path / "state", wanted)
    assert not marker.exists()


def test_an_entry_that_is_no_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, lambda metadata: metadata.state_dict_metadata.update({"extra": StorageMeta()}))
    with pytest.raises(CheckpointError, match="entry 'extra' is not a tensor"):
        dcp.load_into(folder, empty())


@pytest.mark.parametrize(
    ("boxes", "left"),
    [
        ([((1, 0), (2, 3))], 3),  # beside its place
        ([((0, 0), (1, 3)), ((0, 0), (1, 3))], 3),  # twice the same
        ([((0, 0), (2, 2)), ((0, 1), (2, 1))], 2),  # one over the other
        ([((0, 0), (1, 3)), ((1, 0), (1, 2)), ((0, 0), (1, 1))], 1),
    ],
)
def test_a_number_that_no_slice_holds_is_missed_and_nothing_is_filled(boxes: Any, left: int, folder: Path) -> None:
    """The sizes of the slices add up, so only their places tell."""
    chunks = [ChunkStorageMetadata(torch.Size(begin), torch.Size(size)) for begin, size in boxes]
    rewrite(folder, lambda metadata: setattr(metadata.state_dict_metadata["model.a"], "chunks", chunks))
    found = empty()
    with pytest.raises(CheckpointError, match=rf"of 'model.a', {left} of 6 numbers are in no slice") as caught:
        dcp.load_into(folder, found)
    assert "The checkpoint is damaged" in str(caught.value)
    assert all(int(tensor.count_nonzero()) == 0 for tensor in found.values())


@pytest.mark.parametrize("path", ["../stolen", "/etc/hostname", "..", "deeper/file", "./__0_0.distcp"])
def test_a_path_outside_the_folder_is_refused(path: str, folder: Path) -> None:
    shutil.copy(folder / "__0_0.distcp", folder.parent / "stolen")

    def redirect(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    rewrite(folder, redirect)
    with pytest.raises(CheckpointError, match="outside its own folder") as caught:
        dcp.load_into(folder, empty())
    assert f"refers to {path}" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read"),
        (pickle.dumps([1, 2]), "holds a list"),
        (pickle.dumps(None), "holds a NoneType"),
        (pickle.dumps(StorageMeta()), "holds a StorageMeta"),
        (pickle.dumps(Metadata({}))[:-1], "cannot be read"),
        (pickle.dumps(Metadata({"a": None})), "entry 'a' is not a tensor"),  # type: ignore[dict-item]
        (pickle.dumps(Metadata({}, storage_data={1: 2})), "cannot be read"),
    ],
)
def test_metadata_that_is_not_metadata(data: bytes, said: str, folder: Path) -> None:
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as caught:
        dcp.load_into(folder, empty())
    assert str(folder / ".metadata") in str(caught.value)


@pytest.mark.parametrize("bomb", [b"\x80\x04Nr\xff\xff\xff\x07.", b"Np99999999\n."])
def test_a_memory_bomb_is_refused(bomb: bytes, folder: Path) -> None:
    """Ten bytes that make the unpickler ask for gigabytes."""
    (folder / ".metadata").write_bytes(bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="remembers object number"):
        dcp.load_into(folder, empty())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        dcp.load_into(folder, empty())
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        dcp.load_into(folder, empty())


def test_a_hostile_data_file_is_not_run(folder: Path, tmp_path: Path) -> None:
    """The tensors themselves are pickles too, inside zip archives: torch reads them with weights_only."""
    marker = tmp_path / "marker"
    buffer = io.BytesIO()
    torch.save(Calls(os.system, f"touch {marker}"), buffer)
    (folder / "__0_0.distcp").write_bytes(buffer.getvalue())

    def whole_file(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(buffer.getvalue())

    rewrite(folder, whole_file)
    with pytest.raises(CheckpointError, match="cannot be read"):
        dcp.load_into(folder, empty())
    assert not marker.exists()


# Damage: whatever the bytes, the answer is the tensors or a CheckpointError


def load_damaged(folder: Path, file: str, good: bytes, bad: bytes) -> None:
    (folder / file).write_bytes(bad)
    try:
        dcp.load_into(folder, empty())
    except CheckpointError as error:
        assert str(folder) in str(error)
    finally:
        (folder / file).write_bytes(good)


@pytest.mark.slow
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@settings(max_examples=8 * settings().max_examples)
@given(data=st.data())
def test_damaged_bytes_give_no_other_error(reused_folder: Path, file: str, data: st.DataObject) -> None:
    good = (reused_folder / file).read_bytes()
    start = data.draw(st.integers(0, len(good) - 1), label="start")
    cut = data.draw(st.integers(0, 16), label="cut")
    bad = good[:start] + data.draw(st.binary(max_size=16), label="inserted") + good[start + cut :]
    load_damaged(reused_folder, file, good, bad)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@given(length=st.integers(0, 10_000))
def test_truncated_files_are_refused(reused_folder: Path, file: str, length: int) -> None:
    good = (reused_folder / file).read_bytes()
    (reused_folder / file).write_bytes(good[: length % len(good)])
    try:
        with pytest.raises(CheckpointError, match="cannot be read"):
            dcp.load_into(reused_folder, empty())
    finally:
        (reused_folder / file).write_bytes(good)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_not_metadata(reused_folder: Path, data: bytes) -> None:
    good = (reused_folder / ".metadata").read_bytes()
    (reused_folder / ".metadata").write_bytes(data)
    try:
        with pytest.raises(CheckpointError):
            dcp.load_into(reused_folder, empty())
    finally:
        (reused_folder / ".metadata").write_bytes(good)


# Failing to write


def test_a_write_error_keeps_its_own_name(tmp_path: Path) -> None:
    """torch wraps it in a BaseException, which would pass every `except Exception`."""
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="state"):
        dcp.save(tmp_path / "state", TENSORS)
