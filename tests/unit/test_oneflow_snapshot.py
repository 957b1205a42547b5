"""OneFlow snapshot folders: variables with their descriptions, the newest of a run, and nothing bad crashes.

tests/fixtures/weights/oneflow/make_oneflow.py made the fixture: protobuf printed the descriptions, numpy the logits.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.formats import oneflow_snapshot
from gptworks.checkpoint.inspect import inspect
from gptworks.checkpoint.lazy_tensor import LazyTensor, in_memory
from gptworks.checkpoint.rules import HeadsUnknownError, our_shapes
from gptworks.checkpoint.systems import oneflow, registry
from gptworks.checkpoint.systems.contract import Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

RUN = Path(__file__).parents[1] / "fixtures" / "weights" / "oneflow"
SNAPSHOT = RUN / "iter20_snapshot"
HEADS = {"num_heads": 4}
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=48, max_positions=12, gelu="erf")


def ours(dtype: torch.dtype = torch.float32) -> dict[str, LazyTensor]:
    torch.manual_seed(0)
    return {name: in_memory(torch.randn(shape).to(dtype)) for name, shape in our_shapes(MODEL).items()}


def same(found: dict[str, LazyTensor], expected: dict[str, LazyTensor]) -> None:
    assert list(found) == list(expected)
    for name, each in expected.items():
        got, tensor = found[name].read(), each.read()
        assert (got.dtype, got.shape) == (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got, tensor), name


def variable(folder: Path, meta: str | bytes, data: bytes, name: str = "x") -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "out").write_bytes(data)
    (folder / name / "meta").write_bytes(meta if isinstance(meta, bytes) else meta.encode())
    return folder


def test_logits_are_those_of_oneflows_computation() -> None:
    opened = registry.open_any(RUN, HEADS).require_whole()
    assert (opened.system, opened.path, opened.model) == ("oneflow", SNAPSHOT, MODEL)
    assert opened.about["step"] == 20 and opened.about["gelu"].startswith("erf")
    assert opened.remarks == ["left out, as they belong to training: 3 variables, such as System-Train-TrainStep-train"]
    with np.load(RUN / "logits.npz") as expected:
        tokens, logits = torch.from_numpy(expected["tokens"]), torch.from_numpy(expected["logits"])
    assert (conversion_check.logits(opened.model, opened.tensors, tokens) - logits).abs().max() < 5e-6
    for wrong in ({"num_heads": 2}, {"num_heads": 4, "gelu": "tanh"}):
        other = oneflow.open(SNAPSHOT, wrong)
        assert (conversion_check.logits(other.model, other.tensors, tokens) - logits).abs().max() > 1e-4, wrong


@pytest.mark.parametrize(
    ("meta", "shape", "dtype"),
    [
        ("shape {\n  dim: 2\n  dim: 3\n}\ndata_type: kFloat\n", (2, 3), torch.float32),
        ("data_type:kFloat shape{dim:2 dim:3}", (2, 3), torch.float32),
        ("shape: < dim: 2, dim : 3 >\r\ndata_type: 2", (2, 3), torch.float32),
        ("shape { dim: [2, 3] }\ndata_type: kInt32", (2, 3), torch.int32),
        ("shape {\n  dim: 12\n}\ndata_type: kBFloat16\n", (12,), torch.bfloat16),
        ("shape {\n  dim: 12\n}\ndata_type: 9\n", (12,), torch.float16),
        ("shape {\n  dim: 3\n}\ndata_type: kInt64\n", (3,), torch.int64),
        ("shape {\n  dim: 24\n}\ndata_type: kUInt8", (24,), torch.uint8),
    ],
)
def test_descriptions_in_any_spacing(meta: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    found = oneflow_snapshot.read(variable(tmp_path, meta, bytes(range(24))))["x"]
    assert (found.shape, found.dtype) == (shape, dtype)
    assert bytes(found.read().view(-1).view(torch.uint8).tolist()) == bytes(range(24))


def test_a_number_and_nothing(tmp_path: Path) -> None:
    variable(tmp_path, "shape {\n}\ndata_type: kInt64", (7).to_bytes(8, "little"), "number")
    variable(tmp_path, "shape { dim: 0 dim: 4 } data_type: kFloat", b"", "nothing")
    found = oneflow_snapshot.read(tmp_path)
    assert found["number"].read().item() == 7 and found["number"].shape == ()
    assert found["nothing"].read().shape == (0, 4)


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ("shape { dim: 2 dim: 4 } data_type: kFloat", "has 24 bytes"),
        ("shape { dim: -2 dim: -3 } data_type: kFloat", "is not a shape"),
        ("shape { dim: 99999999999999999999 dim: 0 } data_type: kFloat", "is not a shape"),
        ("shape { dim: 2 width: 3 } data_type: kFloat", "is not a shape"),
        ("shape { dim: [2, -] } data_type: kFloat", "is not a shape"),
        ("shape { dim: 2 dim: 3 } data_type: kOFRecord", "kOFRecord"),
        ("shape { dim: 2 dim: 3 } data_type: 8", "data_type 8"),
        ("shape { dim: 2 dim: 3 }", "needed a shape and a data_type"),
        ("", "needed a shape and a data_type"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_is_no_variable(meta: str | bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        oneflow_snapshot.read(variable(tmp_path, meta, bytes(24)))
    assert str(tmp_path / "x") in str(caught.value)


def test_a_snapshot_from_before_descriptions(tmp_path: Path) -> None:
    variable(tmp_path, "", bytes(8))
    (tmp_path / "x" / "meta").unlink()
    (tmp_path / "snapshot_done").touch()
    with pytest.raises(CheckpointError, match=r"meta: missing\. Snapshots of OneFlow before"):
        oneflow.open(tmp_path, HEADS)


@given(st.data())
def test_damaged_descriptions_are_refused_or_read_and_never_crash(data: st.DataObject) -> None:
    text = bytearray(b"shape {\n  dim: 2\n  dim: 3\n}\ndata_type: kFloat\n")
    for _ in range(data.draw(st.integers(0, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(text)) | st.just(len(text)))
    with tempfile.TemporaryDirectory() as folder:
        place = variable(Path(folder), bytes(text[:cut]), bytes(data.draw(st.sampled_from([24, 23, 0]))))
        try:
            found = oneflow_snapshot.read(place)["x"]
            assert found.num_bytes <= 24
            found.read()
            oneflow.open(place, HEADS)
        except CheckpointError:
            pass


def test_a_file_that_changed_after_it_was_opened(tmp_path: Path) -> None:
    found = oneflow_snapshot.read(variable(tmp_path, "shape { dim: 6 } data_type: kFloat", bytes(24)))["x"]
    (tmp_path / "x" / "out").write_bytes(bytes(20))
    with pytest.raises(CheckpointError, match="4 bytes too early"):
        found.read()
    (tmp_path / "x" / "out").unlink()
    with pytest.raises(CheckpointError, match="went away while it was used"):
        found.read()


# The system


def test_the_snapshot_with_the_largest_number(tmp_path: Path) -> None:
    for number in (9, 100, 20):
        shutil.copytree(SNAPSHOT, tmp_path / f"iter{number}_snapshot")
    (tmp_path / "iter100_snapshot" / "System-Train-TrainStep-train" / "out").unlink()
    opened = registry.open_any(tmp_path, HEADS)
    assert opened.path.name == "iter100_snapshot" and opened.about["step"] == 100
    (tmp_path / "iter100_snapshot" / "snapshot_done").unlink()
    assert "snapshot_done is missing" in oneflow.open(tmp_path, HEADS).remarks[-1]


def test_heads_are_asked_for_and_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadsUnknownError, match=r"-o model\.num_heads=N"):
        oneflow.open(SNAPSHOT, {})
    assert not inspect(RUN).heads_known
    folder = Path(shutil.copytree(SNAPSHOT, tmp_path / "x"))
    shutil.rmtree(folder / "model-h1-mlp-c_fc-bias")
    with pytest.raises(CheckpointError, match="1 missing: 'model-h1-mlp-c_fc-bias'"):
        oneflow.open(folder, HEADS).require_whole()


def test_what_is_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "iterx_snapshot").mkdir()
    (tmp_path / "out").touch()
    assert not oneflow.recognise(tmp_path) and not oneflow.recognise(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no snapshot"):
        oneflow.open(tmp_path, HEADS)
    with pytest.raises(CheckpointError, match="no such folder"):
        oneflow.open(tmp_path / "absent", HEADS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ours_to_theirs_and_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    files = oneflow.write(tmp_path, Weights(MODEL, ours(dtype)))
    assert len(files) == 28 * 3 * 2 + 1 and files[-1] == tmp_path / "snapshot_done"
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == set(files)
    same(oneflow.open(tmp_path, HEADS).require_whole().tensors, ours(dtype))
    found = oneflow_snapshot.read(tmp_path)
    qkv, mine = found["model-h1-attn-c_attn-weight"].read(), ours(dtype)["blocks.1.attn.qkv.weight"].read()
    assert torch.equal(qkv.view(16, 4, 3, 4)[:, 2, 1], mine.view(4, 3, 4, 16)[2, 1].T)  # k of head 2
    for name, each in found.items():
        if name.endswith(("-m", "-v")):
            assert (each.shape, each.dtype) == (found[name[:-2]].shape, dtype)
            assert torch.equal(each.read(), torch.full(each.shape, float(name.endswith("-v")), dtype=dtype))


def test_written_as_protobuf_prints_it(tmp_path: Path) -> None:
    done = convert(SNAPSHOT, tmp_path / "x", "oneflow", overrides=HEADS, verify=True)
    assert done.certificate is not None and done.certificate["tensors"] == {"equal_to_the_bit": 28, "different": 0}
    for file in SNAPSHOT.rglob("*"):
        if file.is_file() and "System-Train" not in str(file):
            assert (tmp_path / "x" / file.relative_to(SNAPSHOT)).read_bytes() == file.read_bytes(), file


def test_a_large_variable_is_filled_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oneflow_snapshot, "_PIECE", 40)
    like = in_memory(torch.zeros(7, 5, dtype=torch.float16))
    writer = oneflow_snapshot.Writer(tmp_path)
    writer.fill("v", like, 1.0)
    assert torch.equal(oneflow_snapshot.read(tmp_path)["v"].read(), torch.ones(7, 5, dtype=torch.float16))


def test_to_hugging_face_and_back(tmp_path: Path) -> None:
    convert(RUN, tmp_path / "hf", "hf", overrides=HEADS, verify=True)
    convert(tmp_path / "hf", tmp_path / "back", "oneflow", verify=True)
    assert oneflow.recognise(tmp_path / "back")
    same(oneflow.open(tmp_path / "back", HEADS).tensors, oneflow.open(SNAPSHOT, HEADS).tensors)
