"""convert, inspect and the proof between systems: nothing half-written, nothing silently wrong."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint import convert as conversion
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.inspect import inspect
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import huggingface, registry
from gptworks.checkpoint.systems.contract import SplitSpec
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.errors import CheckpointError, VerificationError
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt

CFG = ModelConfig(num_layers=3, hidden_size=24, num_heads=4, vocab_size=48, max_positions=16)


def fresh(cfg: ModelConfig = CFG) -> GPT:
    weights = FreshWeights(InitConfig(std=0.3), cfg.num_layers, seed=5)
    return build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).eval()


def stored(model: GPT) -> dict[str, Any]:
    return {name: in_memory(each.detach()) for name, each in model.named_parameters()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = fresh()
    huggingface.save(tmp_path / "hf", model.cfg, dict(model.named_parameters()), eod_id=47)
    return tmp_path / "hf"


@pytest.mark.parametrize("tied", [True, False])
def test_logits_block_by_block_are_those_of_the_model(tied: bool) -> None:
    model = fresh(CFG.model_copy(update={"tied": tied, "gelu": "erf"}))
    tokens = conversion_check.sample_tokens(model.cfg)
    with torch.no_grad():
        expected = model(tokens)
    found = conversion_check.logits(model.cfg, stored(model), tokens)
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()))
    assert {int(t) for t in tokens.flatten()} <= set(range(48))


def test_shapes_are_those_of_the_model() -> None:
    for tied in (True, False):
        cfg = CFG.model_copy(update={"tied": tied, "ffn_size": 20})
        assert our_shapes(cfg) == {name: each.shape for name, each in fresh(cfg).named_parameters()}


def test_a_folder_and_its_certificate(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out", "hf", verify=True)
    assert done.source.system == "hf"
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate == done.certificate
    assert certificate["tensors"] == {"equal_to_the_bit": 3 * 12 + 4, "different": 0}
    assert certificate["logits"]["difference"] == 0.0
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert certificate["source"]["sha256"] == {"model.safetensors": digest}
    assert certificate["result"]["sha256"]["model.safetensors"] == digest
    assert sorted(tmp_path.iterdir()) == [source, tmp_path / "out"]


def test_types_are_kept_unless_asked(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "half", "hf", dtype=torch.float16, verify=True)
    convert(tmp_path / "half", tmp_path / "again", "hf")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "half" / "model.safetensors"
    ).read_bytes()
    for folder in ("half", "again"):
        assert {each.dtype for each in huggingface.open(tmp_path / folder, {}).tensors.values()} == {torch.float16}
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == "float16"


def test_the_vocabulary_is_padded_and_cut(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "wide", "hf", overrides={"vocab_size": 64}, verify=True)
    assert done.notes == ["vocabulary: 48 -> 64 rows, 16 added, copies of the last one"]
    wide = PretrainedGPT.from_pretrained(tmp_path / "wide")
    assert wide.cfg.vocab_size == 64
    assert torch.equal(wide.wte.weight[:48], fresh().wte.weight)
    assert torch.equal(wide.wte.weight[48:], fresh().wte.weight[47:].expand(16, -1))
    back = convert(tmp_path / "wide", tmp_path / "back", "hf", overrides={"vocab_size": 48})
    assert "16 left out" in back.notes[0]
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    for wrong in (0, -3, "many"):
        with pytest.raises(CheckpointError, match=f"model.vocab_size: got {wrong!r}"):
            convert(source, tmp_path / "x", "hf", overrides={"vocab_size": wrong})


def test_a_run_is_a_source(tmp_path: Path, source: Path, small_tokenizer: Any) -> None:
    small_tokenizer.save(source)
    convert(source, tmp_path / "out", "gptworks", verify=True)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_result_that_computes_something_else_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that reads q, k and v in another order than it writes: loads everywhere, and is caught here."""
    wrong = [
        rule if not rule.is_qkv else rule.__class__(**{**vars(rule), "order": "ad3"})
        for rule in huggingface.TABLE.rules
    ]
    write = huggingface.write

    def write_wrongly(*args: Any) -> list[Path]:
        with monkeypatch.context() as patch:
            patch.setattr(huggingface.TABLE, "rules", wrong)
            return write(*args)

    monkeypatch.setattr(huggingface, "write", write_wrongly)
    with pytest.raises(VerificationError, match=r"its logits differ by .*Nothing was written"):
        convert(source, tmp_path / "out", "hf", verify=True)
    assert sorted(tmp_path.iterdir()) == [source]


def test_nothing_is_overwritten_or_left_behind(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="hf: exists and is not empty"):
        convert(source, source, "hf")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file: exists"):
        convert(source, tmp_path / "file", "hf")
    assert (tmp_path / "file").read_text() == "mine"

    def fails(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "_copy_tokenizer", fails)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "out", "hf")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "hf"]


def test_what_lies_beside_is_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "keep.part").mkdir()
    (tmp_path / "keep.part" / "precious").write_text("x")
    convert(source, tmp_path / "keep", "hf")
    assert (tmp_path / "keep.part" / "precious").read_text() == "x"
    old = tmp_path / "x.ckpt.certificate.json"
    old.write_text("mine")
    with pytest.raises(CheckpointError, match=r"x\.ckpt\.certificate\.json: exists, and belongs to another file"):
        convert(source, tmp_path / "x.ckpt", "mindspore", verify=True)
    assert old.read_text() == "mine" and not (tmp_path / "x.ckpt").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hf", "keep", "keep.part", old.name]


def test_a_file_and_its_certificate_appear_together(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = convert(source, tmp_path / "x.ckpt", "mindspore", verify=True)
    assert done.files == [tmp_path / "x.ckpt", tmp_path / "x.ckpt.certificate.json"]
    assert done.certificate is not None
    assert json.loads(done.files[1].read_text()) == done.certificate
    digest = hashlib.sha256((tmp_path / "x.ckpt").read_bytes()).hexdigest()
    assert done.certificate["result"]["sha256"] == {"x.ckpt": digest}

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dumps", fails)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "y.ckpt", "mindspore", verify=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hf", "x.ckpt", "x.ckpt.certificate.json"]


def test_into_the_current_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = convert(source, ".", "hf", verify=True)
    there = sorted(Path().iterdir())
    assert there == sorted(done.files) == [Path("certificate.json"), Path("config.json"), Path("model.safetensors")]


@pytest.mark.parametrize(("to", "suffix"), [("gguf", ".gguf"), ("llmc", ".bin"), ("nanogpt", ".pt")])
def test_one_file_has_its_suffix(to: str, suffix: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"out: --to {to} writes one file.*Call it out\{suffix}\."):
        convert(source, tmp_path / "out", to)
    (tmp_path / f"out{suffix}").mkdir()
    with pytest.raises(CheckpointError, match="is a folder, but the result is one file"):
        convert(source, tmp_path / f"out{suffix}", to)


def test_a_cut_vocabulary_leaves_nothing_that_points_beyond_it(
    source: Path, tmp_path: Path, small_tokenizer: Any
) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": 47}')
    done = convert(source, tmp_path / "cut", "hf", overrides={"vocab_size": 3}, verify=True)
    assert done.notes[0] == "the end of a document was token 47, which has no row any more: it is left out"
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["eos_token_id"] is None
    assert not (tmp_path / "cut" / "generation_config.json").exists()
    model = fresh(CFG.model_copy(update={"vocab_size": 600}))
    huggingface.save(tmp_path / "wide", model.cfg, dict(model.named_parameters()), eod_id=511)
    small_tokenizer.save(tmp_path / "wide")
    convert(tmp_path / "wide", tmp_path / "fits", "hf", overrides={"vocab_size": 512})
    with pytest.raises(CheckpointError, match=r"model\.vocab_size: got 511; .*a tokenizer of 512 tokens"):
        convert(tmp_path / "wide", tmp_path / "x", "hf", overrides={"vocab_size": 511})


def test_bad_requests(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'nonsense' is not a format of checkpoints. Known: .*hf"):
        convert(source, tmp_path / "out", "nonsense")
    with pytest.raises(CheckpointError, match="keeps a model in one piece; --tp and --pp are for megatron, "):
        convert(source, tmp_path / "out", "hf", cut=SplitSpec(tp=2))
    with pytest.raises(CheckpointError, match="not a checkpoint of any known system"):
        convert(tmp_path / "nowhere", tmp_path / "out", "hf")
    with pytest.raises(CheckpointError, match=r"4 heads, and -o model.num_heads=5 says otherwise"):
        convert(source, tmp_path / "out", "hf", overrides={"num_heads": 5})
    assert sorted(tmp_path.iterdir()) == [source]


def test_the_loss_of_english_is_a_figure_and_no_verdict(tmp_path: Path, small_tokenizer: Any) -> None:
    """A real model in real files: the loss is that of the model in memory, and nothing is said about heads or QKV."""
    cfg = CFG.model_copy(update={"vocab_size": small_tokenizer.vocab_size, "max_positions": 64})
    model = fresh(cfg)
    huggingface.save(tmp_path / "hf", cfg, dict(model.named_parameters()), eod_id=None)
    small_tokenizer.save(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "out", "hf", verify=True)
    ids = torch.tensor([small_tokenizer.encode(conversion_check.ENGLISH)[:64]])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
    assert done.certificate is not None
    assert done.certificate["english"]["loss"] == pytest.approx(float(expected), abs=1e-3)
    assert done.certificate["english"]["chance"] == pytest.approx(math.log(cfg.vocab_size), abs=1e-3)
    assert done.notes == []


def test_heads_that_the_source_states_are_not_overruled(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"says that there are 4 heads, and -o model.num_heads=2 says otherwise"):
        convert(source, tmp_path / "out", "hf", overrides={"num_heads": 2}, verify=True)
    assert not (tmp_path / "out").exists()
    done = convert(source, tmp_path / "out", "hf", overrides={"num_heads": 4}, verify=True)
    assert done.notes == []


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron-core", "paddlenlp", "nanogpt", "llmc", "gguf"])
def test_every_format_that_carries_heads_refuses_others(source: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / f"out{registry.system(to).SUFFIX}"
    convert(source, out, to)
    with pytest.raises(CheckpointError, match=r"4 heads, and -o model.num_heads=2"):
        registry.open_any(out, {"num_heads": 2})


def test_what_is_stated_against_the_source_is_noted_and_certified(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out", "hf", overrides={"gelu": "erf", "dropout_hidden": 0.1}, verify=True)
    assert "model.gelu is erf as stated with -o, and the checkpoint says tanh" in done.notes
    assert done.certificate is not None
    assert done.certificate["given"]["gelu"] == {"value": "erf", "source": "tanh"}
    assert inspect(source, {"gelu": "erf"}).as_dict()["remarks"] == [done.notes[0]]


def test_a_report_tells_what_a_checkpoint_is(source: Path) -> None:
    report = inspect(source)
    found = report.as_dict()
    assert found["system"] == "hf"
    assert found["parameters"] == sum(each.numel() for each in fresh().parameters())
    assert found["dtype"] == ["float32"]
    assert found["tensors"]["blocks.2.attn.qkv.weight"] == {"shape": [72, 24], "dtype": "float32"}
    assert ("blocks.{0..2}.attn.qkv.weight", "[72, 24]", "float32") in report.rows()
    assert (found["missing"], found["unexpected"], found["misshapen"]) == ([], [], [])


def test_a_report_lists_what_is_missing(source: Path) -> None:
    import safetensors.torch

    tensors = safetensors.torch.load_file(source / "model.safetensors")
    del tensors["transformer.h.1.ln_1.bias"]
    tensors["adapter"] = torch.ones(1)
    tensors["transformer.ln_f.bias"] = torch.ones(2)
    safetensors.torch.save_file(tensors, source / "model.safetensors")
    found = inspect(source).as_dict()
    assert found["missing"] == ["transformer.h.1.ln_1.bias"]
    assert found["unexpected"] == ["adapter"]
    assert found["misshapen"] == ["'transformer.ln_f.bias' has shape [2], needed [24]"]
    rows = [name for name, *_ in inspect(source).rows()]
    assert "blocks.{0,2}.ln1.bias" in rows


def test_every_registered_system_keeps_the_contract() -> None:
    for name in registry.NAMES:
        each = registry.system(name)
        assert name == each.NAME
        assert each.TITLE and isinstance(each.CUTS, bool) and isinstance(each.SUFFIX, str) and each.TOLERANCE > 0
        assert not each.recognise(Path("/nowhere/at/all"))
