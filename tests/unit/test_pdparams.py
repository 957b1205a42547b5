"""Files of paddle.save: what the real Paddle wrote is read, nothing is called, damage is a CheckpointError."""

import os
import pickle
import pickletools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.checkpoint.formats import pdparams
from gptworks.checkpoint.lazy_tensor import LazyTensor, in_memory
from gptworks.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures/weights/paddle"
NUMBERS = torch.tensor([[1.5, -2.0, 3.25], [0.0, 100.0, -0.125]])
KINDS = {
    "float32": NUMBERS,
    "float64": NUMBERS.double(),
    "float16": NUMBERS.half(),
    "bfloat16": NUMBERS.bfloat16(),
    "int64": NUMBERS.long(),
    "int32": NUMBERS.int(),
    "scalar": torch.tensor(2.5),
    "transposed": NUMBERS.T,
}


def same(found: dict[str, LazyTensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].read().dtype == tensor.dtype
        assert torch.equal(found[name].read(), tensor), name


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_the_real_paddle_wrote(protocol: int) -> None:
    found = pdparams.read(FIXTURES / "kinds" / f"protocol{protocol}.pdparams")
    same(found.tensors, KINDS)
    assert set(found.values) == {pdparams.NAMES}
    assert found.unknown == []


def test_tensors_outside_a_state_are_pairs_of_name_and_array() -> None:
    found = pdparams.read(FIXTURES / "kinds" / "tuples.pdparams")
    same(found.tensors, {"outside": NUMBERS})
    assert found.values["n"] == 3


def arrays(**more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {
        "long": rng.normal(size=(40, 60)).astype(np.float32),
        "fortran": np.asfortranarray(rng.normal(size=(3, 5, 7))),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3, np.int64),
        "number": np.float32(0.5),
        "flags": np.array([True, False]),
        "bytes": np.arange(256, dtype=np.uint8),
        "small": np.arange(4, dtype=np.int8),
        "half": rng.normal(size=9).astype(np.float16),
    }
    return found | more


@pytest.mark.parametrize("module", ["numpy.core", "numpy._core"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_numpy(protocol: int, module: str, tmp_path: Path) -> None:
    """The numpy here writes one of the two names of its module; put in by hand is the other."""
    content = arrays(text="hello", step=7)
    data = pickle.dumps(content, protocol=protocol)
    ours, other = (b"numpy.core.", b"numpy._core.") if b"numpy.core." in data else (b"numpy._core.", b"numpy.core.")
    if module.encode() + b"." != ours:
        if protocol >= 4:  # names have their length before them, frames theirs
            data = _unframed(content, protocol)
            for tail in (b"multiarray", b"numeric"):
                old, new = ours + tail, other + tail
                data = data.replace(b"\x8c" + bytes([len(old)]) + old, b"\x8c" + bytes([len(new)]) + new)
        else:
            data = data.replace(ours, other)
        assert other in data and ours not in data
    (tmp_path / "x.pdparams").write_bytes(data)
    found = pdparams.read(tmp_path / "x.pdparams")
    expected = {name: torch.from_numpy(np.asarray(value).copy()) for name, value in arrays().items()}
    same(found.tensors, expected)
    assert found.values == {"text": "hello", "step": 7}


def _unframed(content: Any, protocol: int) -> bytes:
    """Without the frames, whose lengths a change would make wrong."""
    data, out, at = pickle.dumps(content, protocol=protocol), b"", 0
    places = [(position, code.name) for code, _, position in pickletools.genops(data)]
    for (start, name), (end, _) in zip(places, [*places[1:], (len(data), "")], strict=True):
        assert start >= at
        out += b"" if name == "FRAME" else data[start:end]
        at = end
    return out


def test_fortran_arrays_of_an_old_pickle_keep_their_order(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4))
    (tmp_path / "x.pdparams").write_bytes(pickle.dumps({"a": array}, protocol=2))
    assert pdparams.read(tmp_path / "x.pdparams").tensors["a"].read().tolist() == array.tolist()


def sliced(tmp_path: Path, protocol: int, **changes: Any) -> Path:
    """As protocols 2 and 3 keep arrays of more than a gigabyte."""
    array = np.arange(10, dtype=np.float32)
    content: dict[str, Any] = {
        "w@@.0": array[:4],
        "w@@.1": array[4:8],
        "w@@.2": array[8:],
        "bias": array[:2],
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (5, 2), "slices": ["w@@.0", "w@@.1", "w@@.2"]} | changes},
    }
    (tmp_path / "x.pdparams").write_bytes(pickle.dumps(content, protocol=protocol))
    return tmp_path / "x.pdparams"


@pytest.mark.parametrize("protocol", [2, 3])
def test_arrays_that_were_cut_are_joined(protocol: int, tmp_path: Path) -> None:
    found = pdparams.read(sliced(tmp_path, protocol)).tensors
    same(found, {"bias": torch.arange(2.0), "w": torch.arange(10.0).view(5, 2)})


@pytest.mark.parametrize(
    "changes",
    [
        {"slices": ["w@@.0"]},
        {"slices": ["w@@.0", "w@@.9"]},
        {"slices": None},
        {"OriginShape": (5, 3)},
        {"OriginShape": 5},
    ],
)
def test_slices_that_do_not_fit(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="slices of 'w'"):
        pdparams.read(sliced(tmp_path, 2, **changes))


def written(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    pdparams.write(tmp_path / "w.pdparams", {name: in_memory(tensor) for name, tensor in tensors.items()})
    return tmp_path / "w.pdparams"


def test_what_is_written_is_a_pickle_of_numpy_arrays(tmp_path: Path) -> None:
    tensors = {**KINDS, "empty": torch.empty(0, 3), "flags": torch.tensor([True, False])}
    path = written(tmp_path, tensors)
    same(pdparams.read(path).tensors, tensors)
    with path.open("rb") as file:
        loaded = pickle.load(file)  # what paddle.load does
    names = loaded.pop(pdparams.NAMES)
    assert list(names) == list(loaded) == list(tensors)
    assert len(set(names.values())) == len(names)
    for name, tensor in tensors.items():
        array = loaded[name]
        assert isinstance(array, np.ndarray)
        assert array.shape == tuple(tensor.shape)
        if tensor.dtype == torch.bfloat16:
            assert array.dtype == np.uint16
            tensor = tensor.contiguous().view(torch.uint16)
        assert array.tobytes() == tensor.contiguous().numpy().tobytes(), name


def test_no_more_than_a_tensor_is_in_memory(tmp_path: Path) -> None:
    """Twelve tensors of 4 MB, in the protocol that spells bytes as text too; torch's own memory is not counted."""
    size = 2**20
    filled = [lambda n=n: torch.full((size,), float(n)) for n in range(12)]
    tensors = {str(n): LazyTensor(torch.Size([size]), torch.float32, read) for n, read in enumerate(filled)}
    tracemalloc.start()
    pdparams.write(tmp_path / "x.pdparams", tensors)
    assert tracemalloc.get_traced_memory()[1] < 3e6
    (tmp_path / "2.pdparams").write_bytes(
        pickle.dumps({str(n): np.full(size, n, np.float32) for n in range(12)}, protocol=2)
    )
    tracemalloc.reset_peak()
    for file in ("x.pdparams", "2.pdparams"):
        for name, stored in pdparams.read(tmp_path / file).tensors.items():
            assert stored.read()[-1] == int(name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 4 * size


# Bad input


class Evil:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def exploits(marker: Path) -> dict[str, Any]:
    script = f"open({str(marker)!r}, 'w').close()"
    array = np.ones(3, np.float32)
    return {
        "a value": {"gpt.weight": array, "x": Evil(os.system, f"touch {marker}")},
        "a name": {"gpt.weight": array, Evil(os.system, f"touch {marker}"): 1},
        "all of it": Evil(exec, script),
        "eval": {"gpt.weight": Evil(eval, script)},
        "in a pair": {"gpt.weight": ("name", Evil(eval, script))},
        "names": {"gpt.weight": array, pdparams.NAMES: Evil(exec, script)},
        "long text": {"gpt.weight": Evil(exec, script + "#" * 5000)},
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", sorted(exploits(Path("m"))))
def test_nothing_is_ever_called(kind: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps(exploits(marker)[kind], protocol=protocol)
    (tmp_path / "model.pdparams").write_bytes(data)
    with pytest.raises(CheckpointError, match="Refused"):
        pdparams.read(tmp_path / "model.pdparams")
    assert not marker.exists()
    pickle.loads(data)  # the payload is a real one
    assert marker.exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
@given(data=st.data())
def test_damaged_files_are_refused_or_read_and_never_crash(protocol: int, data: st.DataObject) -> None:
    content = {"a": np.ones((4, 5), np.float32), "b": np.ones((40, 40), np.float16), pdparams.NAMES: {"a": "x"}}
    good = bytearray(pickle.dumps(content, protocol=protocol))
    for _ in range(data.draw(st.integers(0, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path = Path(os.environ.get("PYTEST_TMP", "/tmp")) / f"gptworks-fuzz-{os.getpid()}.pdparams"
    path.write_bytes(bytes(good[: data.draw(st.integers(0, len(good)))]))
    try:
        for stored in pdparams.read(path).tensors.values():
            assert stored.read().shape == stored.shape
    except CheckpointError:
        pass
    finally:
        path.unlink()


@pytest.mark.slow
def test_every_single_byte_flipped(tmp_path: Path) -> None:
    """All of a small file: the arrays aside, each byte is an instruction or a length."""
    good = (FIXTURES / "kinds" / "protocol4.pdparams").read_bytes()
    path = tmp_path / "x.pdparams"
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        try:
            for stored in pdparams.read(path).tensors.values():
                stored.read()
        except CheckpointError:
            pass
    for size in range(0, len(good), 5):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=r"x\.pdparams"):
            pdparams.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"hello", "not a file of paddle.save"),
        (pickle.dumps([1]), "holds a list"),
        (pickle.dumps({"a": np.ones(2, ">f4")}), "big-endian"),
        (pickle.dumps({"a": np.array(["x", "y"])}), "holds no weights"),
        (pickle.dumps({"a": np.ones(300, np.complex128)}), "holds no weights"),
    ],
)
def test_what_is_no_file_of_weights(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.pdparams").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        pdparams.read(tmp_path / "x.pdparams")


def test_a_class_of_an_unknown_package_is_left_alone(tmp_path: Path) -> None:
    data = b"\x80\x02}(X\x01\x00\x00\x00scnowhere\nThing\n)R" + b"X\x01\x00\x00\x00nK\x05u."
    (tmp_path / "x.pdparams").write_bytes(data)
    found = pdparams.read(tmp_path / "x.pdparams")
    assert found.unknown == ["nowhere.Thing"]
    assert found.values["n"] == 5
