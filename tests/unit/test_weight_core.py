"""Files of torch.save and of the rules between systems: what is read is what was written, and nothing is called."""

import argparse
import collections
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.checkpoint.formats import torch_file
from gptworks.checkpoint.lazy_tensor import LazyTensor, in_memory
from gptworks.checkpoint.rules import OURS, Rule, Table, block_rules, match, our_shapes, split
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.pickle_values import Bytes, Object
from gptworks.safe_pickle import PickleMachine


def machine(data: bytes) -> Any:
    return PickleMachine(memoryview(data), "x.pkl").load()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


@given(values, st.integers(0, 5))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    found = machine(pickle.dumps(value, protocol=protocol))
    assert found == value
    assert type(found) is type(value)


def test_shared_values_and_cycles() -> None:
    shared = [1]
    found = machine(pickle.dumps([shared, shared]))
    assert found[0] is found[1]
    loop: list[Any] = []
    loop.append(loop)
    found = machine(pickle.dumps(loop))
    assert found[0] is found


def test_settings_are_read_as_dictionaries() -> None:
    args = argparse.Namespace(num_attention_heads=16, lr=1e-4, nested=argparse.Namespace(a=1))
    for protocol in range(6):
        found = machine(pickle.dumps(collections.OrderedDict(args=args), protocol=protocol))
        assert found == {"args": {"num_attention_heads": 16, "lr": 1e-4, "nested": {"a": 1}}}


def test_long_bytes_stay_in_the_file() -> None:
    data = pickle.dumps({"a": b"x" * 5000, "b": b"short"})
    found = machine(data)
    assert isinstance(found["a"], Bytes)
    assert bytes(found["a"].view) == b"x" * 5000
    assert found["b"] == b"short"


class Elsewhere:
    """Stands for a class of a package that is not installed."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_an_unknown_class_is_kept_as_a_note() -> None:
    found = machine(pickle.dumps(Elsewhere(3)))
    assert isinstance(found, Object)
    assert found.made_by.name == "Elsewhere"
    assert found.state == {"value": 3}


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def exploits(marker: Path) -> dict[str, bytes]:
    import subprocess

    script = f"open({str(marker)!r}, 'w').close()"
    return {
        "os.system": pickle.dumps(Evil(os.system, f"touch {marker}")),
        "exec": pickle.dumps(Evil(exec, script)),
        "eval": pickle.dumps(Evil(eval, script)),
        "subprocess": pickle.dumps(Evil(subprocess.check_call, ["touch", str(marker)])),
        "getattr": b"cbuiltins\ngetattr\n(cposix\nenviron\nS'get'\ntR.",
        "in a value": pickle.dumps({"weight": [1, Evil(os.system, f"touch {marker}")]}),
        "protocol 0": pickle.dumps(Evil(os.system, f"touch {marker}"), protocol=0),
        # cos\nsystem\n(S'...'\ntR. by hand, INST and OBJ spell the same
        "inst": f"(S'touch {marker}'\nios\nsystem\n.".encode(),
        "obj": f"(cos\nsystem\nS'touch {marker}'\no.".encode(),
        "newobj": b"cos\nsystem\nS'touch " + str(marker).encode() + b"'\n\x85\x81.",
        "call of a result": b"c__builtin__\nset\n)Rc__builtin__\nset\n)R)R.",
        "memo": b"cos\nsystem\nq\x000h\x00S'touch " + str(marker).encode() + b"'\n\x85R.",
    }


@pytest.mark.parametrize("kind", sorted(exploits(Path("marker"))))
def test_nothing_is_ever_called(kind: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = exploits(marker)[kind]
    with pytest.raises(CheckpointError, match="Refused"):
        machine(data)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match="Refused"):
        torch_file.read(tmp_path / "x.pt")
    assert not marker.exists()


# Files of torch.save

CONTENT = {
    "model": {
        "a": torch.arange(12.0).reshape(3, 4),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "half": torch.arange(6).half(),
        "brain": torch.arange(6).bfloat16(),
        "whole": torch.arange(5),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7.5),
        "row": torch.arange(12.0)[4:8],
    },
    "step": 3,
    "args": argparse.Namespace(n_head=4),
    "dtype": torch.float16,
}


def same(found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert isinstance(found[name], LazyTensor)
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].read(), tensor), name


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_writes(zipped: bool, tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert torch_file.is_torch_file(tmp_path / "x.pt")
    found = torch_file.read(tmp_path / "x.pt")
    same(found.content["model"], CONTENT["model"])  # type: ignore[arg-type]
    assert found.content["step"] == 3
    assert found.content["args"] == {"n_head": 4}
    assert found.content["dtype"] == torch.float16
    assert found.unknown == []


def test_parameters_modules_and_unknown_classes(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    torch.save({"state": linear.state_dict(), "p": linear.weight, "other": Elsewhere(3)}, tmp_path / "x.pt")
    found = torch_file.read(tmp_path / "x.pt")
    same(found.content["state"], dict(linear.state_dict()))
    assert torch.equal(found.content["p"].read(), linear.weight)
    assert [name.rpartition(".")[2] for name in found.unknown] == ["Elsewhere"]


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {n: t.contiguous() for n, t in CONTENT["model"].items()}  # type: ignore[attr-defined]
    stored = {name: in_memory(tensor) for name, tensor in tensors.items()}
    torch_file.write(tmp_path / "x.pt", {"model": {**stored, "tied": stored["a"]}, "step": 3, "list": [1, (2, "x")]})
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["step"] == 3
    assert found["list"] == [1, (2, "x")]
    for name, tensor in tensors.items():
        assert torch.equal(found["model"][name], tensor), name
    assert found["model"]["tied"].data_ptr() == found["model"]["a"].data_ptr()
    again = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in again["model"].values() if tensor.numel())
    same(torch_file.read(tmp_path / "x.pt").content["model"], tensors | {"tied": tensors["a"]})


@pytest.mark.parametrize("zipped", [True, False])
@given(data=st.data())
def test_damaged_files_are_refused_or_read_and_never_crash(zipped: bool, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(4, 4), "n": [1, 2]}, buffer, _use_new_zipfile_serialization=zipped)
    good = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    bad = bytes(good[: data.draw(st.integers(1, len(good)))])
    path = Path(os.environ.get("PYTEST_TMP", "/tmp")) / f"gptworks-fuzz-{os.getpid()}.pt"
    path.write_bytes(bad)
    try:
        content = torch_file.read(path).content
        if isinstance(content, dict):
            for each in content.values():
                if isinstance(each, LazyTensor):
                    each.read()
    except CheckpointError:
        pass
    finally:
        path.unlink()


def test_a_tensor_that_lacks_its_strides(tmp_path: Path) -> None:
    program = b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02tR."
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", program)
    with pytest.raises(CheckpointError, match=r"x\.pt: its pickle contradicts itself"):
        torch_file.read(tmp_path / "x.pt")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"hello", struct.pack("<Q", 3)])
def test_what_is_no_torch_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        torch_file.read(tmp_path / "x.pt")


# Rules

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_heads=4, vocab_size=12, max_positions=6, ffn_size=20)


def ours(model: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in our_shapes(model).items()}


def table(order: str = "3ad", *, separate: bool = False, transposed: bool = True) -> Table:
    qkv: Any = ("l.{i}.q", "l.{i}.k", "l.{i}.v") if separate else "l.{i}.qkv"
    modules = {"ln1": "l.{i}.n1", "attn.qkv": qkv, "attn.out": "l.{i}.o", "ln2": "l.{i}.n2"}
    modules |= {"mlp.up": "l.{i}.up", "mlp.down": "l.{i}.down"}
    turned = ("attn.qkv", "attn.out", "mlp.up", "mlp.down") if transposed else ()
    return Table(
        "a system of tests",
        [
            Rule("wte.weight", ("words",)),
            Rule("wpe.weight", ("places",)),
            *block_rules(modules, transposed=turned, order=order),
            Rule("ln_f.weight", ("last.g",)),
            Rule("ln_f.bias", ("last.b",)),
            Rule("head.weight", ("head",)),
        ],
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("order", ["3ad", "a3d", "ad3"])
def test_there_and_back(order: str, separate: bool, ranks: int, tied: bool) -> None:
    model = MODEL.model_copy(update={"tied": tied})
    mine, rules = ours(model), table(order, separate=separate)
    stored = {name: in_memory(tensor) for name, tensor in mine.items()}
    shards = [split(rules, stored, model, rank=rank, ranks=ranks) for rank in range(ranks)]
    for shard in shards:
        for name, each in shard.items():
            assert each.read().shape == each.shape, name
    found = match(rules, shards, model)
    assert (found.missing, found.unexpected, found.misshapen) == ([], [], [])
    assert {name: each.read().tolist() for name, each in found.tensors.items()} == {
        name: tensor.tolist() for name, tensor in mine.items()
    }


def test_orders_of_qkv_are_what_their_letters_say() -> None:
    """Row r of ours is head a, kind k, number d; written out by hand."""
    heads, size = 4, 2
    rows = [(a, k, d) for a in range(heads) for k in range(3) for d in range(size)]
    tensor = torch.arange(len(rows))[:, None].float()
    expected = {
        "3ad": [(a, k, d) for k in range(3) for a in range(heads) for d in range(size)],
        "ad3": [(a, k, d) for a in range(heads) for d in range(size) for k in range(3)],
        OURS: rows,
    }
    for order, listed in expected.items():
        rule = Rule("blocks.0.attn.qkv.weight", ("x",), order=order)
        (found,) = rule.to_theirs(tensor, size)
        assert [rows[int(n)] for n in found.flatten()] == listed, order


def test_what_does_not_fit_is_listed() -> None:
    rules = table()
    theirs = split(rules, {name: in_memory(tensor) for name, tensor in ours().items()}, MODEL)
    del theirs["l.1.up.weight"]
    theirs["l.0.o.bias"] = in_memory(torch.zeros(9))
    theirs["adapter"] = theirs["mask.bias"] = in_memory(torch.zeros(1))
    found = match(rules, [theirs], MODEL, ignored=r"^mask\.")
    assert found.missing == ["l.1.up.weight"]
    assert found.unexpected == ["adapter"]
    assert found.misshapen == ["'l.0.o.bias' has shape [9], needed [8]"]
