"""W-02. Megatron's checkpoints: what the real one wrote, every split, every order of QKV, old spellings, damage."""

import argparse
import io
import random
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.inspect import inspect
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import HeadsUnknownError, our_shapes
from gptworks.checkpoint.systems import huggingface, megatron, megatron_core, registry
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "weights" / "megatron"
MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_heads=4, ffn_size=40, vocab_size=48, max_positions=12, layernorm_eps=1e-3
)
SYSTEMS = {"megatron": megatron, "megatron-core": megatron_core}
TOKENS = torch.arange(20).view(2, 10) * 11 % 48


def ours(model: ModelConfig = MODEL) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) * 0.4 for name, shape in our_shapes(model).items()}


def weights(model: ModelConfig = MODEL, step: int = 5) -> Weights:
    return Weights(model, {name: in_memory(tensor) for name, tensor in ours(model).items()}, step=step)


def written(folder: Path, name: str = "megatron", cut: SplitSpec = SplitSpec(), model: ModelConfig = MODEL) -> Path:  # noqa: B008
    folder.mkdir()
    SYSTEMS[name].write(folder, weights(model), cut)
    return folder


def require_ours(opened: Opened, model: ModelConfig = MODEL) -> None:
    opened.require_whole()
    assert opened.model == model
    for name, tensor in ours(model).items():
        assert torch.equal(opened.tensors[name].read(), tensor), name


def edit(file: Path, change: Any) -> None:
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


# What the real megatron-core wrote


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("core", "tp1.pp1"),
        ("core-tp2-untied", "tp2.pp1"),
        ("core-llama", "tp1.pp1"),
        ("core-tp2-qwen3", "tp2.pp1"),
    ],
)
def test_w02_logits_are_those_of_the_real_megatron_core(name: str, layout: str) -> None:
    opened = registry.open_any(FIXTURES / name).require_whole()
    assert opened.system == "megatron-core"
    assert opened.about == {"step": 7, "layout": layout}
    with np.load(FIXTURES / name / "logits.npz") as found:
        tokens, theirs = torch.from_numpy(found["tokens"]), torch.from_numpy(found["logits"])
    mine = conversion_check.logits(opened.model, opened.tensors, tokens)
    assert float((mine - theirs).abs().max()) <= EXACT * max(1.0, float(theirs.abs().max()))
    # A negative control: with another number of heads, or other wavelengths, they are others.
    model = opened.model
    half = {"num_heads": model.num_heads // 2, "num_kv_heads": model.num_kv_heads // 2}
    changed = {"rope_theta": 50.0} if model.qk_norm else {**half, "head_size": 2 * model.head_size}
    other = conversion_check.logits(model.model_copy(update=changed), opened.tensors, tokens)
    assert float((other - theirs).abs().max()) > 0.01


def test_w02_the_names_of_transformer_engine(tmp_path: Path) -> None:
    """The norms inside the matrices after them, and a state besides each: a stream of bytes, or a tensor of them."""
    shutil.copytree(FIXTURES / "core", tmp_path / "te")

    def rename(content: dict[str, Any]) -> None:
        renamed: dict[str, Any] = OrderedDict()
        for name, value in content["model"].items():
            name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
            renamed["module." + name] = io.BytesIO(b"x" * 400) if name.endswith("_extra_state") else value
        renamed["decoder.final_layernorm._extra_state"] = torch.zeros(4, dtype=torch.uint8)
        content["model"] = renamed

    edit(tmp_path / "te" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt", rename)
    plain, te = registry.open_any(FIXTURES / "core"), registry.open_any(tmp_path / "te").require_whole()
    assert te.model == plain.model
    assert all(torch.equal(each.read(), te.tensors[name].read()) for name, each in plain.tensors.items())
    assert te.remarks == ["classes of the pickle that were not used: _io.BytesIO"]


def test_a_bare_dictionary_of_tensors_needs_only_the_heads(tmp_path: Path) -> None:
    content = torch.load(FIXTURES / "core/iter_0000007/mp_rank_00/model_optim_rng.pt", weights_only=False)
    torch.save(content["model"], tmp_path / "state.pt")
    assert megatron_core.recognise(tmp_path / "state.pt")
    assert not megatron.recognise(tmp_path / "state.pt")
    with pytest.raises(HeadsUnknownError, match=r"-o model\.num_heads=N"):
        registry.open_any(tmp_path / "state.pt")
    opened = registry.open_any(tmp_path / "state.pt", {"num_heads": 4, "layernorm_eps": 1e-3}).require_whole()
    assert opened.model == registry.open_any(FIXTURES / "core").model
    assert not inspect(tmp_path / "state.pt").heads_known


# Every split


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", SYSTEMS)
def test_w02_every_split_comes_back_to_the_bit(name: str, tp: int, pp: int, tied: bool, tmp_path: Path) -> None:
    model = MODEL.model_copy(update={"tied": tied, "gelu": "tanh" if tied else "erf", "dropout_attention": 0.25})
    folder = written(tmp_path / "x", name, SplitSpec(tp, pp), model)
    opened = registry.open_any(folder)
    assert opened.system == name
    assert opened.about["layout"] == f"tp{tp}.pp{pp}"
    assert opened.about["step"] == 5
    require_ours(opened, model)
    assert len(opened.files) == tp * pp


@pytest.mark.parametrize("name", SYSTEMS)
def test_w02_converted_and_proved_from_split_to_split(name: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    huggingface.write(tmp_path / "hf", weights())
    done = convert(tmp_path / "hf", tmp_path / "a", name, cut=SplitSpec(2, 2), verify=True)
    assert done.certificate is not None
    assert done.certificate["tensors"]["different"] == 0
    other = next(each for each in SYSTEMS if each != name)
    convert(tmp_path / "a", tmp_path / "b", other, cut=SplitSpec(4, 1), verify=True)
    convert(tmp_path / "b", tmp_path / "c", "hf", verify=True)
    first, last = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("hf", "c"))
    assert first == last


def test_the_folders_are_megatrons(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", cut=SplitSpec(2, 2))
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "5"
    names = sorted(found.name for found in (folder / "iter_0000005").iterdir())
    assert names == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    first, last = (
        torch.load(folder / "iter_0000005" / name / "model_optim_rng.pt", weights_only=False)
        for name in ("mp_rank_01_000", "mp_rank_01_001")
    )
    assert isinstance(first["args"], argparse.Namespace)
    assert (first["args"].num_attention_heads, first["args"].pipeline_model_parallel_size) == (4, 2)
    assert first["checkpoint_version"] == 3.0
    assert sorted(first["model"]["language_model"]) == ["embedding", "encoder"]
    assert first["model"]["language_model"]["embedding"]["word_embeddings"]["weight"].shape == (24, 16)
    assert "layers.1.self_attention.query_key_value.weight" in last["model"]["language_model"]["encoder"]
    assert "layers.2.input_layernorm.weight" not in last["model"]["language_model"]["encoder"]
    assert "final_layernorm.weight" in last["model"]["language_model"]["encoder"]
    assert torch.equal(
        last["model"]["word_embeddings_for_head"]["weight"],
        first["model"]["language_model"]["embedding"]["word_embeddings"]["weight"],
    )


def test_weights_without_a_step_are_a_release(tmp_path: Path) -> None:
    """Megatron takes iteration 0 in its tracker for damage."""
    megatron.write(tmp_path, weights(step=0), SplitSpec())
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "release" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    require_ours(registry.open_any(tmp_path))


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (SplitSpec(3, 1), "heads 4 cannot be cut into 3"),
        (SplitSpec(1, 3), "4 layers cannot be cut into 3"),
        (SplitSpec(1, 8), "no stage may be empty"),
    ],
)
def test_splits_that_cannot_be(cut: SplitSpec, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        megatron.write(tmp_path, weights(), cut)
    assert not list(tmp_path.iterdir())


# Orders of QKV


def megatron_logits(language: dict[str, Any], version: float, tokens: Tensor, heads: int = 4) -> Tensor:
    """A GPT as Megatron of that version computes it, with its weights as they are stored."""
    encoder = {key: value.double() for key, value in language["encoder"].items()}
    words = language["embedding"]["word_embeddings"]["weight"].double()
    x = words[tokens] + language["embedding"]["position_embeddings"]["weight"].double()[: tokens.shape[1]]
    batch, length, hidden = x.shape
    size = hidden // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (hidden,), encoder[f"{name}.weight"], encoder[f"{name}.bias"], 1e-3)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ encoder[f"{name}.weight"].T + encoder[f"{name}.bias"]

    for layer in range(sum(key.endswith("input_layernorm.weight") for key in encoder)):
        at = f"layers.{layer}."
        mixed = linear(norm(x, at + "input_layernorm"), at + "self_attention.query_key_value")
        if version == 0:  # split into three, then into heads
            query, key, value = (each.view(batch, length, heads, size) for each in mixed.split(hidden, dim=-1))
        elif version == 1:  # heads, then the size, q|k|v innermost
            query, key, value = mixed.view(batch, length, heads, size, 3).unbind(-1)
        else:  # heads, each with its q, k and v
            query, key, value = mixed.view(batch, length, heads, 3 * size).split(size, dim=-1)
        scores = torch.einsum("bqad,bkad->baqk", query, key) / size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("baqk,bkad->bqad", scores.softmax(-1), value).reshape(batch, length, hidden)
        x = x + linear(mixed, at + "self_attention.dense")
        inner = linear(norm(x, at + "post_attention_layernorm"), at + "mlp.dense_h_to_4h")
        x = x + linear(F.gelu(inner, approximate="tanh"), at + "mlp.dense_4h_to_h")
    return norm(x, "final_layernorm") @ words.T


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
def test_w02_qkv_of_every_version(version: float | None, tmp_path: Path) -> None:
    """The same numbers in the file mean another model in each version: Megatron's own view of them decides."""
    folder = written(tmp_path / "x")
    file = folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    edit(file, lambda content: content.pop("checkpoint_version"))
    if version is not None:
        edit(file, lambda content: content.update(checkpoint_version=version))
    opened = registry.open_any(folder).require_whole()
    expected = megatron_logits(torch.load(file, weights_only=False)["model"]["language_model"], version or 0, TOKENS)
    found = conversion_check.logits(opened.model, opened.tensors, TOKENS)
    assert float((found - expected).abs().max()) <= EXACT * max(1.0, float(expected.abs().max()))
    rows = opened.tensors["blocks.1.attn.qkv.weight"].read()
    stored = ours()["blocks.1.attn.qkv.weight"]
    for head in range(4):
        for kind in range(3):
            for d in range(4):
                theirs = {0: kind * 16 + head * 4 + d, 1: head * 12 + d * 3 + kind}.get(
                    int(version or 0), head * 12 + kind * 4 + d
                )
                assert torch.equal(rows[head * 12 + kind * 4 + d], stored[theirs])
    said = {0: "q|k|v, head, size", 1: "head, size, q|k|v"}.get(int(version or 0), "head, q|k|v, size")
    assert opened.about["order_of_qkv"] == said
    assert opened.about["checkpoint_version"] == ("not stated, so 0" if version is None else str(version))


@pytest.mark.parametrize("version", [0, 1])
def test_w02_old_orders_are_old_inside_every_rank(version: int, tmp_path: Path) -> None:
    whole, cut = written(tmp_path / "whole"), written(tmp_path / "cut", cut=SplitSpec(2, 1))
    tensors = ours()
    name = "blocks.2.attn.qkv.weight"
    for rank in range(2):  # each rank has its heads in the order of the version
        shard = tensors[name].chunk(2)[rank].view(2, 3, 4, 16)
        old = shard.transpose(0, 1) if version == 0 else shard.transpose(1, 2)

        def change(content: dict[str, Any], old: Tensor = old) -> None:
            content["checkpoint_version"] = version
            encoder = content["model"]["language_model"]["encoder"]
            encoder["layers.2.self_attention.query_key_value.weight"] = old.reshape(24, 16)

        edit(cut / "iter_0000005" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", change)
    assert torch.equal(registry.open_any(whole).tensors[name].read(), registry.open_any(cut).tensors[name].read())


def test_a_version_nobody_knows(tmp_path: Path) -> None:
    folder = written(tmp_path / "x")
    for version in (1.5, "new", -1):
        file = folder / "iter_0000005/mp_rank_00/model_optim_rng.pt"
        edit(file, lambda content, version=version: content.update(checkpoint_version=version))
        with pytest.raises(CheckpointError, match="order of QKV hangs on it"):
            registry.open_any(folder)


# As they were spelled over the years


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return found


def old_names(content: dict[str, Any]) -> None:
    language = content["model"]["language_model"]
    encoder = language.pop("encoder")
    language["transformer"] = {name.replace("self_attention", "attention"): each for name, each in encoder.items()}
    content["model"] = language  # the oldest had no level for the language model


def dotted_names(content: dict[str, Any]) -> None:
    content["model"] = {f"module.{name}": each for name, each in flat(content["model"]).items()}


def as_trained(content: dict[str, Any]) -> None:
    """What else lies in a checkpoint of a training run."""
    content["optimizer"] = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    content["rng_state"] = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}]  # noqa: NPY002
    content["args"].params_dtype = torch.float16
    content["args"].scheduler = Elsewhere()


class Elsewhere:
    """Stands for a class of Megatron's."""


@pytest.mark.parametrize("change", [old_names, dotted_names, as_trained])
def test_spellings_and_company(change: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "x")
    edit(folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt", change)
    opened = registry.open_any(folder)
    require_ours(opened)
    assert any("Elsewhere" in remark for remark in opened.remarks) == (change is as_trained)


def test_interleaved_stages(tmp_path: Path) -> None:
    """Layers 0 and 2 on the first stage, 1 and 3 on the second: model0 and model1 of each."""
    source = written(tmp_path / "four", cut=SplitSpec(1, 4)) / "iter_0000005"
    target = tmp_path / "two" / "iter_0000005"
    parts = [torch.load(source / f"mp_rank_00_{n:03d}" / "model_optim_rng.pt", weights_only=False) for n in range(4)]
    for stage in range(2):
        content = {**parts[0], "model0": parts[stage]["model"], "model1": parts[stage + 2]["model"]}
        del content["model"]
        (target / f"mp_rank_00_{stage:03d}").mkdir(parents=True)
        torch.save(content, target / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt")
    opened = registry.open_any(target)
    assert opened.about["layout"] == "tp1.pp2"
    require_ours(opened)


def test_a_checkpoint_is_named_in_several_ways(tmp_path: Path) -> None:
    folder = written(tmp_path / "x")
    inside = folder / "iter_0000005" / "mp_rank_00"
    tracker = folder / "latest_checkpointed_iteration.txt"
    for path in (folder, tracker, inside.parent, inside, inside / "model_optim_rng.pt"):
        assert megatron.recognise(path), path
        require_ours(registry.open_any(path))
    tracker.write_text("9\n")
    with pytest.raises(CheckpointError, match=r"says '9'.*no folder iter_0000009.*iter_0000005"):
        registry.open_any(folder)


def test_settings_decide(tmp_path: Path) -> None:
    folder = written(tmp_path / "x")
    file = folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"bias_gelu_fusion": False}, "erf"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "tanh"),
        ({"bias_gelu_fusion": True, "openai_gelu": False, "onnx_safe": True}, "erf"),
    ]
    for settings, gelu in cases:
        edit(file, lambda content, settings=settings: vars(content["args"]).update(settings))
        assert registry.open_any(folder).model.gelu == gelu
    assert registry.open_any(folder, {"gelu": "sigmoid"}).conflicts == {"gelu": "erf"}
    edit(file, lambda content: content.pop("args"))
    with pytest.raises(HeadsUnknownError, match=r"-o model\.num_heads=N"):
        registry.open_any(folder)
    require_ours(registry.open_any(folder, {"num_heads": 4, "layernorm_eps": 1e-3}))


def test_a_model_without_biases_has_biases_of_zero(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", "megatron-core", SplitSpec(2, 1))
    for rank in range(2):

        def change(content: dict[str, Any]) -> None:
            content["args"].add_bias_linear = False
            content["model"] = {n: t for n, t in content["model"].items() if "linear" not in n or "bias" not in n}

        edit(folder / "iter_0000005" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", change)
    opened = registry.open_any(folder).require_whole()
    assert opened.tensors["blocks.3.mlp.up.bias"].read().tolist() == [0.0] * 40
    assert any("biases of zero" in remark for remark in opened.remarks)


# What is refused


_FILES = ("megatron", "megatron-core")


@pytest.mark.parametrize(
    ("names", "setting", "value"),
    [
        (_FILES[:1], "swiglu", True),
        (_FILES[:1], "normalization", "RMSNorm"),
        (_FILES[:1], "position_embedding_type", "rope"),
        (_FILES[1:], "position_embedding_type", "alibi"),
        (_FILES[1:], "normalization", "L2Norm"),
        (_FILES, "num_experts", 8),
        (_FILES, "apply_layernorm_1p", True),
        (_FILES[:1], "kv_channels", 8),
        (_FILES, "squared_relu", True),
        (_FILES, "apply_residual_connection_post_layernorm", True),
        (_FILES, "multi_latent_attention", True),
    ],
)
def test_other_networks_are_refused_by_their_settings(
    names: tuple[str, ...], setting: str, value: object, tmp_path: Path
) -> None:
    for name in names:
        folder = written(tmp_path / name, name)
        file = folder / "iter_0000005/mp_rank_00/model_optim_rng.pt"
        edit(file, lambda content: setattr(content["args"], setting, value))
        with pytest.raises(CheckpointError, match=f"{setting}={value}"):
            registry.open_any(folder)


def test_heads_in_groups_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "x")
    file = folder / "iter_0000005/mp_rank_00/model_optim_rng.pt"
    edit(file, lambda content: vars(content["args"]).update(group_query_attention=True, num_query_groups=4))
    require_ours(registry.open_any(folder))  # as many groups as heads is no grouping
    edit(file, lambda content: vars(content["args"]).update(num_query_groups=2))
    with pytest.raises(CheckpointError, match="heads in groups"):
        registry.open_any(folder)


@pytest.mark.parametrize(
    ("drop", "replace", "message"),
    [
        ("position_embeddings", {}, "no learned positions"),
        ("$", {"decoder.layers.0.self_attention.linear_qkv.weight": (32, 16)}, "heads in groups"),
        ("$", {"decoder.layers.0.mlp.linear_fc1.weight": (80, 16)}, "gated"),
        ("layernorm.bias", {}, "RMSNorm"),
    ],
)
def test_other_networks_are_refused_by_their_shapes(
    drop: str, replace: dict[str, tuple[int, int]], message: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "x", "megatron-core")

    def change(content: dict[str, Any]) -> None:
        kept = {name: each for name, each in content["model"].items() if drop not in name}
        content["model"] = kept | {name: torch.zeros(shape) for name, shape in replace.items()}
        del content["args"]

    edit(folder / "iter_0000005/mp_rank_00/model_optim_rng.pt", change)
    with pytest.raises(CheckpointError, match=message):
        registry.open_any(folder, {"num_heads": 4})


def test_missing_pieces_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", cut=SplitSpec(2, 2)) / "iter_0000005"
    with pytest.raises(CheckpointError, match="mp_rank_01_001 is one rank of several: name the folder above"):
        registry.open_any(folder / "mp_rank_01_001", name="megatron")
    shutil.move(folder / "mp_rank_01_000", tmp_path / "aside")
    with pytest.raises(CheckpointError, match=r"mp_rank_01_000/model_optim_rng\.pt is missing"):
        registry.open_any(folder)
    shutil.rmtree(folder / "mp_rank_01_001")
    with pytest.raises(CheckpointError, match=r"cut for 2 tensor-parallel ranks, and 1 of them is here.*mp_rank_"):
        registry.open_any(folder)
    one = written(tmp_path / "y", cut=SplitSpec(1, 2)) / "iter_0000005"
    with pytest.raises(CheckpointError, match="has 2 layers, and its args say num_layers 4"):
        registry.open_any(one / "mp_rank_00_000")
    shutil.rmtree(one / "mp_rank_00_001")
    with pytest.raises(CheckpointError, match=r"num_layers 4\. Folders mp_rank_\.\.\. are missing"):
        registry.open_any(one)


def test_uneven_ranks_are_told(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", "megatron-core", SplitSpec(2, 1))

    def change(content: dict[str, Any]) -> None:
        content["model"]["decoder.layers.1.mlp.linear_fc1.weight"] = torch.zeros(30, 16)

    edit(folder / "iter_0000005" / "mp_rank_01" / "model_optim_rng.pt", change)
    message = r"linear_fc1\.weight' \(tensor-parallel rank 1\) has shape \[30, 16\], needed \[20, 16\]"
    with pytest.raises(CheckpointError, match=message):
        registry.open_any(folder).require_whole()


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_copy_of_a_tied_head_must_be_one(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "x", name, SplitSpec(1, 2))

    def change(content: dict[str, Any]) -> None:
        model = content["model"]
        copy = model["output_layer.weight"] if name == "megatron-core" else model["word_embeddings_for_head"]["weight"]
        copy[3, 3] += 1

    edit(folder / "iter_0000005" / "mp_rank_00_001" / "model_optim_rng.pt", change)
    with pytest.raises(CheckpointError, match=r"head is tied\), and differs.*-o model\.tied=false"):
        registry.open_any(folder).require_whole()
    (problem,) = inspect(folder).as_dict()["misshapen"]
    assert "head is tied), and differs" in problem
    opened = registry.open_any(folder, {"tied": False}).require_whole()
    difference = opened.tensors["head.weight"].read() - opened.tensors["wte.weight"].read()
    assert difference.nonzero().tolist() == [[3, 3]]


def test_ranks_of_different_saves_are_not_joined(tmp_path: Path) -> None:
    """Their shapes fit: what they say of the save tells them apart."""
    changes: dict[str, Any] = {
        "iteration is 6, and mp_rank_00 has 5": lambda content: content.update(iteration=6),
        "checkpoint_version is 1.0, and mp_rank_00 has 3.0": lambda content: content.update(checkpoint_version=1.0),
        "args.num_attention_heads is 8": lambda content: vars(content["args"]).update(num_attention_heads=8),
    }
    for number, (said, change) in enumerate(changes.items()):
        folder = written(tmp_path / str(number), cut=SplitSpec(2, 1))
        edit(folder / "iter_0000005" / "mp_rank_01" / "model_optim_rng.pt", change)
        with pytest.raises(CheckpointError, match=said):
            registry.open_any(folder)


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_what_every_rank_has_whole_must_be_the_same(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "x", name, SplitSpec(2, 2))
    file = folder / "iter_0000005" / "mp_rank_01_001" / "model_optim_rng.pt"

    def moved(by: float) -> Any:
        def change(content: dict[str, Any]) -> None:
            model = content["model"]
            norm = model["language_model"]["encoder"] if name == "megatron" else model
            norm[("" if name == "megatron" else "decoder.") + "final_layernorm.bias"][2] += by

        return change

    edit(file, moved(1e-5))  # as rounding drives copies apart
    (remark,) = registry.open_any(folder).require_whole().remarks
    assert "differ by up to 1e-05" in remark and "rank 0's are used" in remark
    edit(file, moved(0.1))
    with pytest.raises(CheckpointError, match=r"final_layernorm.bias' of tensor-parallel rank 1 differs by 0\.1"):
        registry.open_any(folder)


def test_tensors_alone_do_not_tell_the_order_of_qkv(tmp_path: Path) -> None:
    folder = written(tmp_path / "x")
    content = torch.load(folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    bare = tmp_path / "bare.pt"
    torch.save(content["model"], bare)
    heads = {"num_heads": 4, "layernorm_eps": 1e-3}
    with pytest.raises(CheckpointError, match=r"tensors alone.*-o qkv_version=0 .*-o qkv_version=3"):
        registry.open_any(bare, heads)
    require_ours(registry.open_any(bare, {**heads, "qkv_version": 3}))
    other = registry.open_any(bare, {**heads, "qkv_version": 1})
    assert other.about["order_of_qkv"] == "head, size, q|k|v"
    with pytest.raises(CheckpointError, match="checkpoint_version is 7"):
        registry.open_any(bare, {**heads, "qkv_version": "7"})
    assert inspect(bare).as_dict()["about"]["order_of_qkv"].startswith("not known (-o qkv_version=N")
    done = convert(bare, tmp_path / "out", "hf", overrides={**heads, "qkv_version": 3}, verify=True)
    assert done.certificate is not None and done.certificate["given"]["qkv_version"] == {"value": 3, "source": None}
    for rank in (folder,):
        with pytest.raises(CheckpointError, match=r"checkpoint_version is 3\.0, and -o qkv_version=1"):
            registry.open_any(rank, {"qkv_version": 1})


def test_a_checkpoint_without_a_version_says_how_it_was_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "x")
    edit(folder / "iter_0000005/mp_rank_00/model_optim_rng.pt", lambda content: content.pop("checkpoint_version"))
    (remark,) = registry.open_any(folder).remarks
    assert "no checkpoint_version is in it: read as version 0 (q|k|v, head, size)" in remark


@pytest.mark.parametrize(("words", "is_gpt2"), [(48, False), (50257, True), (50304, True), (51281, False)])
def test_only_a_vocabulary_of_gpt2s_size_is_called_gpt2s(words: int, is_gpt2: bool, tmp_path: Path) -> None:
    model = ModelConfig(num_layers=1, hidden_size=4, num_heads=1, vocab_size=words, max_positions=4)
    folder = written(tmp_path / "x", model=model)
    file = folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    args = vars(torch.load(file, weights_only=False)["args"])
    assert args.get("tokenizer_type") == ("GPT2BPETokenizer" if is_gpt2 else None)
    edit(file, lambda content: vars(content["args"]).update(tokenizer_type="GPT2BPETokenizer"))
    assert bool(registry.open_any(folder).remarks) == (words == 50304)


def test_a_tokenizer_beside_the_weights_is_found(tmp_path: Path, small_tokenizer: Any) -> None:
    folder = written(tmp_path / "x")
    small_tokenizer.save(folder)
    saved = folder / "iter_0000005"
    for path in (folder, saved, saved / "mp_rank_00", saved / "mp_rank_00" / "model_optim_rng.pt"):
        found = registry.open_any(path).open_tokenizer()
        assert found is not None and found.identity == small_tokenizer.identity


def test_a_distributed_checkpoint_of_ours_is_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ".metadata").write_bytes(b"")
    assert registry.recognise(tmp_path / "state") is None


def test_a_distributed_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="--ckpt-format torch"):
        registry.open_any(tmp_path)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.marker}",)


def test_nothing_in_a_checkpoint_is_called(tmp_path: Path) -> None:
    folder, marker = written(tmp_path / "x"), tmp_path / "marker"
    file = folder / "iter_0000005/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["rng_state"] = Evil(marker)
    torch.save(content, file)
    for path in (folder, file):
        assert megatron.recognise(path)
        with pytest.raises(CheckpointError, match="Refused"):
            registry.open_any(path)
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_damage_is_a_checkpoint_error_or_read(name: str, tmp_path: Path) -> None:
    model = MODEL.model_copy(update={"num_layers": 1})
    folder = written(tmp_path / "x", name, model=model)
    file = folder / "iter_0000005/mp_rank_00/model_optim_rng.pt"
    good = file.read_bytes()
    end = good.index(b"PK\x03\x04", 4)  # of the pickle, where damage has a meaning
    draws = random.Random(7)
    refused = 0
    for attempt in range(250):
        bad = bytearray(good)
        for _ in range(draws.randint(1, 3)):
            bad[draws.randrange(end if attempt % 4 else len(bad))] = draws.randrange(256)
        file.write_bytes(bad[: draws.randrange(1, len(bad))] if attempt % 10 == 0 else bad)
        try:
            found = registry.recognise(folder)
            opened = (found or SYSTEMS[name]).open(folder, {}).require_whole()
            conversion_check.logits(opened.model, opened.tensors, TOKENS[:, :1] % opened.model.vocab_size)
        except CheckpointError:
            refused += 1
    assert refused > 100
