"""MindSpore .ckpt files: what the real one wrote is read, what is written is what it writes, and nothing bad crashes.

tests/fixtures/weights/mindspore/make_mindspore.py made the fixtures with MindSpore 2.10.
"""

import contextlib
import stat
import tempfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.formats import mindspore_ckpt
from gptworks.checkpoint.inspect import inspect
from gptworks.checkpoint.lazy_tensor import LazyTensor, in_memory
from gptworks.checkpoint.rules import HeadsUnknownError, our_shapes
from gptworks.checkpoint.systems import mindspore, registry
from gptworks.checkpoint.systems.contract import Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "weights" / "mindspore"
TRAINED = FIXTURES / "rank_0" / "gpt2_rank_0-1_2.ckpt"
HEADS = {"num_heads": 4}
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=48, max_positions=12)


def ours(model: ModelConfig = MODEL, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in our_shapes(model).items()}


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    return {name: in_memory(tensor) for name, tensor in tensors.items()}


def same(found: dict[str, LazyTensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        got = found[name].read()
        assert (got.dtype, got.shape) == (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got, tensor), name


def renamed(file: Path, names: dict[str, str], to: Path, *, leave: Iterable[str] = ()) -> Path:
    """Their tensors under other names: parts of a name -> what to write instead."""
    found = {}
    for name, each in mindspore_ckpt.read(file).tensors.items():
        if any(name.startswith(part) for part in leave):
            continue
        for part, instead in names.items():
            name = name.replace(part, instead)
        found[name] = each
    to.parent.mkdir(parents=True, exist_ok=True)
    mindspore_ckpt.write(to, found)
    return to


# What the real MindSpore wrote


def test_every_type_number_and_text_of_the_real_one() -> None:
    file = mindspore_ckpt.read(FIXTURES / "types.ckpt")
    assert file.has_checksum and file.skipped == {}
    assert file.texts == {"where": "gpt2 中文"}
    with np.load(FIXTURES / "types.npz") as expected:
        for name in expected.files:
            found = file.tensors[name]
            kind = str(found.dtype).removeprefix("torch.")
            assert name == "number" or kind == name.lower(), name
            assert np.array_equal(found.read().to(torch.float64).numpy(), expected[name]), name
    assert len(file.tensors) == 13 + 1 + 2
    assert [file.tensors[name].read().item() for name in ("number", "step_num", "is_last")] == [3.5, 7, True]
    assert file.tensors["number"].shape == ()


def test_chunks_of_the_real_one_are_joined() -> None:
    file = mindspore_ckpt.read(FIXTURES / "chunks.ckpt")
    values = torch.arange(700.0).view(70, 10)
    same(file.tensors, {"small": values[:2], "large": values, "number": torch.tensor(2.5, dtype=torch.float16)})


@pytest.mark.parametrize(("name", "chunk"), [("chunks.ckpt", 1024), ("rank_0/gpt2_rank_0-1_2.ckpt", None)])
def test_written_is_what_the_real_one_writes_to_the_byte(name: str, chunk: int | None, tmp_path: Path) -> None:
    file = mindspore_ckpt.read(FIXTURES / name)
    path = tmp_path / "x.ckpt"
    more = {"chunk_bytes": chunk} if chunk else {}
    mindspore_ckpt.write(path, file.tensors, checksum=file.has_checksum, **more)
    assert path.read_bytes() == (FIXTURES / name).read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o400


def test_logits_are_those_mindspore_computed() -> None:
    """Orientation of every matrix, order of q, k, v, and the activation: proved by another implementation."""
    opened = mindspore.open(TRAINED, HEADS).require_whole()
    with np.load(FIXTURES / "logits.npz") as expected:
        tokens, logits = torch.from_numpy(expected["tokens"]), torch.from_numpy(expected["logits"])
    assert opened.model == MODEL
    difference = (conversion_check.logits(opened.model, opened.tensors, tokens) - logits).abs().max()
    assert difference < 5e-6
    for wrong in ({"num_heads": 2}, {"num_heads": 4, "gelu": "erf"}, {"num_heads": 4, "gelu": "sigmoid"}):
        other = mindspore.open(TRAINED, wrong)
        assert (conversion_check.logits(other.model, other.tensors, tokens) - logits).abs().max() > 1e-4, wrong


# The container


@pytest.mark.parametrize("chunk", [8, 1000, mindspore_ckpt.CHUNK_BYTES])
def test_there_and_back_in_chunks_of_any_size(chunk: int, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(7, 5, 3),
        "é": torch.randn(300).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "n": torch.tensor(7),
        "turned": torch.randn(6, 4).T,
    }
    mindspore_ckpt.write(tmp_path / "x.ckpt", stored(tensors), checksum=True, chunk_bytes=chunk)
    same(mindspore_ckpt.read(tmp_path / "x.ckpt").tensors, tensors)


def field(number: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def value(tag: bytes, dims: bytes, kind: bytes, data: bytes) -> bytes:
    return field(1, field(1, tag) + field(2, dims + field(2, kind) + field(3, data)))


def test_what_other_versions_write(tmp_path: Path) -> None:
    """A number with dims [0], as before MindSpore 2; dims in one field; fields nobody knows; a map tensor; an int4."""
    data = value(b"old", b"\x08\x00", b"Float32", np.float32(1.5).tobytes())
    data += value(b"packed", field(1, b"\x02\x03"), b"Int8", bytes(range(6)))
    data += field(
        1, b"\x28\x07" + field(9, b"?") + b"\x3d....\x41........" + value(b"new", b"\x08\x01", b"UInt8", b"\x05")[2:]
    )
    data += field(1, field(1, b"map") + field(3, field(1, b"\x08\x01")))
    data += value(b"four", b"\x08\x02", b"Int4", b"\x21")
    data += value(b"none", b"\x08\x00", b"Float32", b"")
    (tmp_path / "x.ckpt").write_bytes(data)
    file = mindspore_ckpt.read(tmp_path / "x.ckpt")
    expected = {
        "old": torch.tensor(1.5),
        "packed": torch.arange(6, dtype=torch.int8).view(2, 3),
        "new": torch.tensor([5], dtype=torch.uint8),
        "none": torch.empty(0),
    }
    same(file.tensors, expected)
    assert list(file.skipped) == ["map", "four"]


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.randn(2**20) for n in range(4)}
    mindspore_ckpt.write(tmp_path / "x.ckpt", stored(tensors))
    tracemalloc.start()
    file = mindspore_ckpt.read(tmp_path / "x.ckpt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 and sum(each.num_bytes for each in file.tensors.values()) == 16 * 2**20
    (tmp_path / "x.ckpt").unlink()
    with pytest.raises(CheckpointError, match="went away while it was used"):
        file.tensors["t1"].read()


# What is damaged


def refused(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ckpt"
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            mindspore_ckpt.read(path)
        assert str(path) in str(caught.value)
        return str(caught.value)


GOOD = value(b"a", b"\x08\x02", b"Float32", b"........")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "cannot be read"),
        (b"hello", "not a MindSpore checkpoint"),
        (b"PK\x03\x04", "not a MindSpore checkpoint"),
        (GOOD[:-1], "fewer follow"),
        (GOOD + b"\x0a", "cut off"),
        (b"\x0a" + b"\xff" * 20, "no number"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\x7f" + GOOD, "announced"),
        (value(b"a", b"\x08\x03", b"Float32", b"........"), "'a' has 8 bytes"),
        (value(b"a", b"\x08" + b"\xff" * 8 + b"\x7f" + b"\x08\x00", b"Float32", b""), "'a' has 0 bytes"),
        (value(b"a", b"\x08" + b"\xff" * 9 + b"\x01", b"Float32", b"...."), "'a' has 4 bytes"),  # -1
        (GOOD + value(b"b", b"\x08\x02", b"Float32", b"........") + GOOD, "'a' is in it twice"),
        (GOOD + GOOD, "'a' has 16 bytes"),
        (GOOD + value(b"a", b"\x08\x02", b"Int32", b"........"), "the parts of 'a'"),
        (value(b"\xff", b"\x08\x02", b"Float32", b"........"), "no name"),
        (field(1, field(1, b"a")), "without a name or a tensor"),
        (field(1, field(2, field(2, b"Int8") + field(3, b"1"))), "without a name or a tensor"),
        (field(1, field(1, b"a") + field(2, field(2, b"Int8"))), "no tensor"),
        (GOOD + b"crc_num" + bytes(10), "checksum"),
        (b"\x0d..", "cut off"),
        (b"\x0b\x0c", "no field"),
    ],
)
def test_what_is_no_checkpoint(data: bytes, why: str) -> None:
    assert why in refused(data)


def test_a_flipped_bit_is_seen_by_the_checksum() -> None:
    data = bytearray((FIXTURES / "chunks.ckpt").read_bytes())
    data[1500] ^= 1
    assert "checksum" in refused(bytes(data))


@given(st.data())
def test_damaged_bytes_are_refused_or_read_and_never_crash(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from(["types.ckpt", "chunks.ckpt"]))
    content = bytearray((FIXTURES / source).read_bytes())
    if data.draw(st.booleans()):
        content = content[: -len(b"crc_num") - 10]  # past the checksum
    for _ in range(data.draw(st.integers(0, 6))):
        content[data.draw(st.integers(0, min(len(content) - 1, 700)))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ckpt"
        path.write_bytes(content)
        mindspore_ckpt.is_mindspore_file(path)
        try:
            for each in mindspore_ckpt.read(path).tensors.values():
                assert each.num_bytes <= len(content)  # no room is made for what the file does not hold
                each.read()
            mindspore.open(path, HEADS)
        except CheckpointError:
            pass


@given(st.binary(max_size=60))
def test_any_bytes(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ckpt"
        path.write_bytes(b"\n" + content)
        mindspore_ckpt.is_mindspore_file(path)
        with contextlib.suppress(CheckpointError):
            mindspore_ckpt.read(path)


# The system


@pytest.mark.parametrize(
    "names",
    [
        {"backbone.": "backbone."},
        {"backbone.": ""},
        {"backbone.": "network.backbone."},
        # the seed's converter: three prefixes in one file
        {
            "backbone.blocks.": "gpt2.backbone.transformer.encoder.blocks.",
            "backbone.layernorm.": "gpt2.backbone.layernorm.",
        },
    ],
    ids=["later", "bare", "wrapped", "seed"],
)
def test_names_of_all_times(names: dict[str, str], tmp_path: Path) -> None:
    path = renamed(TRAINED, names, tmp_path / "x.ckpt", leave=("adam", "global", "learning", "epoch", "step", "loss"))
    opened = registry.open_any(path, HEADS).require_whole()
    assert opened.system == "mindspore" and opened.remarks == []
    expected = mindspore.open(TRAINED, HEADS)
    same(opened.tensors, {name: each.read() for name, each in expected.tensors.items()})


def test_what_belongs_to_training_is_left_out_and_said() -> None:
    opened = mindspore.open(TRAINED, HEADS).require_whole()
    kinds = "global_step, learning_rate, adam_m.*, adam_v.*, epoch_num, step_num, loss_scale"
    assert opened.remarks == [f"left out, as they belong to training: 77 of {kinds}"]
    assert opened.about["step"] == 2 and opened.about["gelu"].startswith("tanh")


def test_masks_and_caches_are_left_out_and_other_tensors_are_not(tmp_path: Path) -> None:
    tensors = mindspore_ckpt.read(TRAINED).tensors
    more = {
        "backbone.blocks.0.attention.beta": torch.ones(1, 1, 12, 12),
        "backbone.blocks.1.key_past": torch.ones(2, 3),
    }
    mindspore_ckpt.write(tmp_path / "x.ckpt", {**tensors, **stored(more)})
    mindspore.open(tmp_path / "x.ckpt", HEADS).require_whole()
    lora = {"backbone.blocks.0.attention.dense1.mindpet_delta_lora_a": torch.ones(2, 16)}
    mindspore_ckpt.write(tmp_path / "x.ckpt", {**tensors, **stored(lora)})
    with pytest.raises(CheckpointError, match="mindpet_delta_lora_a"):
        mindspore.open(tmp_path / "x.ckpt", HEADS).require_whole()


@pytest.mark.parametrize("name", ["embedding.word_embedding.embedding_table", "blocks.0.output.mapping.weight"])
def test_a_matrix_that_is_none(name: str, tmp_path: Path) -> None:
    tensors = mindspore_ckpt.read(TRAINED).tensors
    flat = in_memory(tensors[f"backbone.{name}"].read().view(-1))
    mindspore_ckpt.write(tmp_path / "x.ckpt", {**tensors, f"backbone.{name}": flat})
    with pytest.raises(CheckpointError, match="needed a matrix"):
        mindspore.open(tmp_path / "x.ckpt", HEADS)


def test_the_same_weight_under_two_prefixes(tmp_path: Path) -> None:
    tensors = mindspore_ckpt.read(TRAINED).tensors
    again = {"copy.backbone.layernorm.gamma": tensors["backbone.layernorm.gamma"]}
    mindspore_ckpt.write(tmp_path / "x.ckpt", {**tensors, **again})
    with pytest.raises(CheckpointError, match=r"'backbone\.layernorm\.gamma' and 'copy\.backbone\.layernorm\.gamma'"):
        mindspore.open(tmp_path / "x.ckpt", HEADS)


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("gpt_rank_0-1_250.ckpt", {"step": 250}),
        ("gpt_1-2_rank_3-4_250.ckpt", {"epoch": 4, "step_of_the_epoch": 250}),
        ("gpt2.ckpt", {}),
    ],
)
def test_the_step_is_in_the_name(name: str, about: dict[str, int], tmp_path: Path) -> None:
    path = renamed(TRAINED, {}, tmp_path / name, leave=("global_step", "step_num"))
    found = mindspore.open(path, HEADS).about
    found.pop("gelu")
    assert found == about


def test_the_newest_file_of_a_run(tmp_path: Path) -> None:
    for name in ("gpt_rank_0-2_9.ckpt", "gpt_rank_0-10_3.ckpt", "gpt_rank_0-2_100.ckpt", "first.ckpt"):
        renamed(TRAINED, {}, tmp_path / "rank_0" / name, leave=("global_step", "step_num"))
    (tmp_path / "rank_1").mkdir()
    for folder in (tmp_path, tmp_path / "rank_0"):
        assert mindspore.recognise(folder)
        opened = registry.open_any(folder, HEADS)
        assert opened.path == tmp_path / "rank_0" / "gpt_rank_0-10_3.ckpt"
        assert opened.about["epoch"] == 10
        assert any("rank_1 beside it not read" in remark for remark in opened.remarks)


def test_what_is_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "lightning.ckpt").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "text.ckpt").write_text("\nhello\n")
    for path in [*tmp_path.iterdir(), tmp_path, tmp_path / "absent.ckpt", FIXTURES / "logits.npz"]:
        assert not mindspore.recognise(path), path
    with pytest.raises(CheckpointError, match=r"no \.ckpt file"):
        (tmp_path / "none").mkdir()
        mindspore.open(tmp_path / "none", HEADS)
    with pytest.raises(CheckpointError, match="no such file"):
        mindspore.open(tmp_path / "absent.ckpt", HEADS)


def test_heads_are_asked_for() -> None:
    with pytest.raises(HeadsUnknownError, match=r"-o model\.num_heads=N"):
        mindspore.open(TRAINED, {})
    report = inspect(TRAINED)
    assert not report.heads_known and report.as_dict()["missing"] == []


YAML = """
# of MindFormers
model:
  model_config:
    type: GPT2Config
    {hidden}: 16
    num_heads: 4
    hidden_act: {act}
    eos_token_id: 47
  arch:
    type: GPT2LMHeadModel
"""


@pytest.mark.parametrize("hidden", ["hidden_size", "embedding_size"])
@pytest.mark.parametrize(("act", "gelu"), [("gelu", "tanh"), ('"fast_gelu"', "sigmoid")])
def test_settings_of_the_run_that_lie_beside(hidden: str, act: str, gelu: str, tmp_path: Path) -> None:
    path = renamed(TRAINED, {}, tmp_path / "rank_0" / "gpt.ckpt")
    (tmp_path / "a.yaml").write_text("model: [1")
    (tmp_path / "b.yaml").write_text(YAML.format(hidden=hidden, act=act).replace("16", "32").replace("4", "2"))
    (tmp_path / "c.yaml").write_text(YAML.format(hidden=hidden, act=act))
    opened = mindspore.open(path, {})
    assert (opened.model.num_heads, opened.model.gelu, opened.eod_id) == (4, gelu, 47)
    assert opened.about["settings"] == "c.yaml" and "gelu" not in opened.about
    assert mindspore.open(path, {"num_heads": 2, "gelu": "erf"}).model.num_heads == 2


@pytest.mark.parametrize(
    ("line", "why"), [("hidden_act: relu", "relu"), ("post_layernorm_residual: True", "post_layern")]
)
def test_settings_that_change_the_computation(line: str, why: str, tmp_path: Path) -> None:
    path = renamed(TRAINED, {}, tmp_path / "gpt.ckpt")
    text = YAML.format(hidden="hidden_size", act="gelu").replace("    hidden_act: gelu", f"    {line}")
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=why):
        mindspore.open(path, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ours_to_theirs_and_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = ours(dtype=dtype)
    path = tmp_path / "x.ckpt"
    assert mindspore.write(path, Weights(MODEL, stored(tensors))) == [path]
    same(mindspore.open(path, HEADS).require_whole().tensors, tensors)
    theirs = mindspore_ckpt.read(path).tensors
    assert theirs["backbone.blocks.1.attention.dense2.weight"].shape == (16, 16)
    assert theirs["backbone.blocks.1.output.mapping.weight"].shape == (16, 64)
    # k of head 2: rows 8 to 11 of dense2, and rows (2, k, :) of ours
    key = theirs["backbone.blocks.1.attention.dense2.weight"].read()[8:12]
    assert torch.equal(key, tensors["blocks.1.attn.qkv.weight"].view(4, 3, 4, 16)[2, 1])
    up = theirs["backbone.blocks.1.output.mapping.weight"].read()
    assert torch.equal(up, tensors["blocks.1.mlp.up.weight"].T)


def test_what_has_no_place_and_what_would_not_load(tmp_path: Path) -> None:
    untied = MODEL.model_copy(update={"tied": False})
    with pytest.raises(CheckpointError, match="head of its own"):
        mindspore.write(tmp_path / "x.ckpt", Weights(untied, stored(ours(untied))))
    with pytest.raises(CheckpointError, match=r"gpt2\.bin: --to mindspore writes one file, whose name ends in \.ckpt"):
        convert(TRAINED, tmp_path / "gpt2.bin", "mindspore", overrides=HEADS)
    assert list(tmp_path.iterdir()) == []


def test_convert_proves_itself_and_leaves_nothing_else(tmp_path: Path) -> None:
    done = convert(TRAINED, tmp_path / "hf", "hf", overrides=HEADS, verify=True)
    again = convert(tmp_path / "hf", tmp_path / "x.ckpt", "mindspore", verify=True)
    for each in (done, again):
        assert each.certificate is not None and not any("does not keep" in note for note in each.notes)
        assert each.certificate["tensors"] == {"equal_to_the_bit": 28, "different": 0}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "x.ckpt", "x.ckpt.certificate.json"]
    assert stat.S_IMODE((tmp_path / "x.ckpt").stat().st_mode) == 0o400
    theirs, first = mindspore_ckpt.read(tmp_path / "x.ckpt").tensors, mindspore_ckpt.read(TRAINED).tensors
    for name, each in theirs.items():
        assert torch.equal(each.read(), first[name].read()), name
    with pytest.raises(CheckpointError, match="exists"):
        convert(tmp_path / "hf", tmp_path / "x.ckpt", "mindspore")


def test_what_the_format_does_not_keep_is_said(tmp_path: Path) -> None:
    given = {**HEADS, "gelu": "erf", "layernorm_eps": 1e-6}
    done = convert(TRAINED, tmp_path / "x.ckpt", "mindspore", overrides=given)
    gelu, eps = done.notes[-2:]
    assert gelu.startswith("mindspore does not keep model.gelu: it computes with tanh") and "model.gelu=erf" in gelu
    assert "model.layernorm_eps=1e-06" in eps
