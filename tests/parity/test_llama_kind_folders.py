"""Folders of Llama, Mistral, Qwen2 and Qwen3: written by transformers and read by us, and the other way round."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import gptworks
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.config import from_dict
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.errors import CheckpointError
from gptworks.launch.world import World
from gptworks.model.inference import StoredMatrix
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.train.loop import train

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 99,
    "eos_token_id": 100,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 500.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, llama3": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama, biases, wide heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral, no window": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


OUR_SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "max_positions": 32}
OUR_LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none"}


def their_model(kind: str) -> Any:
    model_type, more = FAMILIES[kind]
    theirs: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**SHAPE, **more}), attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            middle = 1.0 if "norm" in name else 0.0
            parameter.copy_(middle + 0.25 * torch.randn(parameter.shape, generator=generator))
    return theirs


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            theirs = their_model(kind)
            folder = tmp_path_factory.mktemp("hf")
            theirs.save_pretrained(folder)
            made[kind] = folder, theirs
        return made[kind]

    return make


Folders = Callable[[str], tuple[Path, Any]]


def tokens_of(vocab_size: int = 101) -> Tensor:
    return torch.randint(0, vocab_size, (3, 20), generator=torch.Generator().manual_seed(11))


def assert_same_logits(ours: PretrainedGPT, theirs: Any, tolerance: float = 1e-5) -> None:
    tokens = tokens_of(ours.cfg.vocab_size)
    with torch.no_grad():
        wanted = theirs(tokens).logits
        error = (ours(tokens) - wanted).abs().max().item()
    assert wanted.abs().max() > 1.0
    assert error <= tolerance * wanted.abs().max().item(), f"{error:.2e}"


@pytest.mark.parametrize("kind", FAMILIES)
def test_their_folder_read_by_us(kind: str, folders: Folders) -> None:
    folder, theirs = folders(kind)
    assert_same_logits(PretrainedGPT.from_pretrained(folder), theirs)


@pytest.mark.parametrize("kind", FAMILIES)
def test_our_folder_read_by_them_and_back_to_the_bit(kind: str, folders: Folders, tmp_path: Path) -> None:
    folder, theirs = folders(kind)
    ours = PretrainedGPT.from_pretrained(folder)
    ours.save_pretrained(tmp_path / "back")
    first, second = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(first) == set(second) and len(first) > 20
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    without_window = kind == "mistral, no window"  # which is a Llama
    assert again.config.model_type == ("llama" if without_window else theirs.config.model_type)
    assert_same_logits(ours, again)
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in (
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "max_position_embeddings",
        "eos_token_id",
    ):
        assert said[key] == getattr(theirs.config, key) or key == "eos_token_id", key
    assert huggingface.read_config(tmp_path / "back") == ours.cfg


def test_shards_and_bf16(tmp_path: Path) -> None:
    theirs = their_model("qwen3").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "bf16", max_shard_size="20KB")
    assert len(list((tmp_path / "bf16").glob("model-*.safetensors"))) > 2
    ours = PretrainedGPT.from_pretrained(tmp_path / "bf16")
    wide: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert_same_logits(ours, wide)
    opened = huggingface.open(tmp_path / "bf16", {})
    assert {each.dtype for each in opened.tensors.values()} == {torch.bfloat16}
    part = opened.tensor("blocks.1.attn.qkv.weight", torch.Size([128, 32]), (slice(70, 90), slice(3, 9)))
    assert torch.equal(part.float(), ours.blocks["1"].attn.qkv.weight[70:90, 3:9])


def test_a_file_beside_shards(folders: Folders, tmp_path: Path) -> None:
    """Left there by somebody who saved twice: transformers reads the one file."""
    other = their_model("llama")
    other.model.norm.weight.data += 0.5
    other.save_pretrained(tmp_path, max_shard_size="20KB")
    folder, _ = folders("llama")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_same_logits(PretrainedGPT.from_pretrained(tmp_path), theirs)
    assert_same_logits(PretrainedGPT.from_pretrained(next(tmp_path.glob("model-00001-of-*"))), other)


def test_config_json_of_transformers_4(folders: Folders, tmp_path: Path) -> None:
    """rope_theta and rope_scaling beside the rest, where 5 has rope_parameters."""
    folder, theirs = folders("llama, tied, llama3")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    said = json.loads((folder / "config.json").read_text())
    rope = said.pop("rope_parameters")
    said |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert_same_logits(PretrainedGPT.from_pretrained(tmp_path), theirs)


LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LINEAR},  # beside rope_parameters
        {"rope_scaling": LINEAR, "rope_theta": 77.0},
        {"rope_parameters": YARN, OLD: 8},
        {"rope_parameters": {**LLAMA3, OLD: 32}, OLD: 8},
        {"sliding_window": 6, "layer_types": ["full_attention"] * 3},  # a Mistral with them is a Ministral
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_is_said_twice_or_not_at_all(kind: str, changes: dict[str, Any], folders: Folders, tmp_path: Path) -> None:
    """Whatever transformers takes."""
    folder, _ = folders(kind)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    said = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | changes))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_same_logits(PretrainedGPT.from_pretrained(tmp_path), theirs)


def test_the_old_context_is_that_of_the_folder(folders: Folders, tmp_path: Path) -> None:
    """A shorter context that the user states does not move the borders of YaRN."""
    folder, _ = folders("qwen2")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    said = json.loads((folder / "config.json").read_text())
    del said["rope_parameters"][OLD]
    (tmp_path / "config.json").write_text(json.dumps(said))
    opened = huggingface.open(tmp_path, {"max_positions": 24})
    assert (opened.model.max_positions, opened.model.rope_scaling.original_max_positions) == (24, 64)


def test_a_head_beside_the_one_that_is_tied(folders: Folders, tmp_path: Path) -> None:
    """The same numbers once more are no head of its own; others are, whatever config.json says."""
    folder, theirs = folders("llama")
    weights = load_file(folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    file = tmp_path / "model.safetensors"
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is to be equal to .* with -o model\.tied=false"):
        PretrainedGPT.from_pretrained(tmp_path)
    opened = huggingface.open(tmp_path, {"tied": False}).require_whole()
    assert torch.equal(opened.tensors["head.weight"].read(), theirs.lm_head.weight)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    assert PretrainedGPT.from_pretrained(tmp_path).cfg.tied


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_fresh_weights_in_transformers(kind: str, folders: Folders, tmp_path: Path) -> None:
    cfg = huggingface.read_config(folders(kind)[0])
    ours = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.3), 3, 3)).eval()
    huggingface.save(tmp_path / "out", cfg, dict(ours.named_parameters()), eod_id=100)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert_same_logits(ours, theirs)  # type: ignore[arg-type]


def test_heads_that_do_not_divide_the_width(tmp_path: Path) -> None:
    """transformers loads no such Llama; as a Mistral without a window it does."""
    cfg = ModelConfig.model_validate({**OUR_SHAPE, **OUR_LLAMA, "num_heads": 3, "head_size": 8})
    ours = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.3), 2, 3)).eval()
    huggingface.save(tmp_path / "out", cfg, dict(ours.named_parameters()), eod_id=10)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert theirs.config.model_type == "mistral" and huggingface.read_config(tmp_path / "out") == cfg
    assert_same_logits(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["llama, tied, llama3", "qwen3"])
def test_convert(kind: str, folders: Folders, tmp_path: Path) -> None:
    folder, theirs = folders(kind)
    convert(folder, tmp_path / "ours", to="gptworks")
    convert(tmp_path / "ours", tmp_path / "hf", to="hf")
    back: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    assert_same_logits(PretrainedGPT.from_pretrained(tmp_path / "ours"), theirs)
    assert_same_logits(PretrainedGPT.from_pretrained(folder), back)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_stored_weights(weights: str, folders: Folders) -> None:
    """A model whose matrices were rounded, and one that keeps them so, predict the same."""
    folder, theirs = folders("qwen3")
    stored, rounded = PretrainedGPT.from_pretrained(folder, weights=weights), PretrainedGPT.from_pretrained(folder)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim == 2:
                parameter.copy_(StoredMatrix(parameter, weights).rows(slice(None)))
        wanted, got, exact = rounded(tokens_of()), stored(tokens_of()), theirs(tokens_of()).logits
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert 1e-3 < ((got - exact).abs().max() / exact.abs().max()).item() < 0.2


# Tuning


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama, tied, llama3", "mistral", "qwen2", "qwen3"])
def test_twenty_steps_of_tuning(kind: str, small_store: Path, tmp_path: Path) -> None:
    """`gptworks train` from their folder: the losses are those of transformers and torch alone."""
    model_type, more = FAMILIES[kind]
    theirs: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**SHAPE, **more, "vocab_size": 512}), attn_implementation="eager"
    )
    theirs.save_pretrained(tmp_path / "hf")
    cfg = from_dict(
        {
            "model": huggingface.read_config(tmp_path / "hf").model_dump(),
            "init": {"checkpoint": str(tmp_path / "hf")},
            "data": {"path": str(small_store), "seq_len": 24, "order": "sequential", "split": "1,0,0"},
            "batch": {"global_size": 4, "micro_size": 2},
            "optim": {"lr": 3e-3, "schedule": "constant", "weight_decay": 0.1, "clip": 0.7},
            "train": {"steps": 20, "log_every": 1},
            "run": {"out": str(tmp_path / "run"), "device": "cpu"},
        }
    )
    run = train(cfg).folder
    ours = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens = np.fromfile(small_store.with_suffix(".bin"), dtype=np.uint16)
    named = dict(theirs.named_parameters())
    plain = [name for name in named if name.endswith("bias") or "norm" in name]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n not in plain], "weight_decay": 0.1},
            {"params": [named[n] for n in plain], "weight_decay": 0.0},
        ],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    expected = []
    for step in range(20):
        starts = [24 * (step * 4 + row) for row in range(4)]
        windows = torch.tensor(np.stack([tokens[s : s + 25] for s in starts]).astype(np.int64))
        loss = F.cross_entropy(theirs(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < expected[0] - 0.3
    assert ours == pytest.approx(expected, rel=1e-5)
    portable = run / "checkpoints" / "step-00000020" / "portable"
    tuned: Any = AutoModelForCausalLM.from_pretrained(portable, attn_implementation="eager").eval()
    assert tuned.config.model_type == model_type
    tokens_BT = tokens_of(512)
    with torch.no_grad():
        wanted = theirs.eval()(tokens_BT).logits
        assert (tuned(tokens_BT).logits - wanted).abs().max() <= 1e-3 * wanted.abs().max()
        assert (gptworks.GPT.from_pretrained(run)(tokens_BT) - tuned(tokens_BT).logits).abs().max() <= 1e-5


# Bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gemma2"},
            "is 'gemma2', needed one of 'gpt2', 'llama', 'mistral', 'qwen2', 'qwen3'",
        ),
        ({"model_type": None}, "model_type is None, needed one of"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope', needed one of default, "),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing, which linear needs"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "rope_scaling.mrope_section is not known"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', needed a JSON object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_experts": 8}, "num_experts is 8: a mixture of experts, which is not supported"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512: latent attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}: quantized weights"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', needed 'silu'"),
        ({"attention_bias": True}, "attention_bias is True and mlp_bias is False"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "model.num_kv_heads: 3 does not divide model.num_heads (4)"),
        (
            {"num_key_value_heads": 4},
            "'model.layers.0.self_attn.k_proj.weight' has shape [16, 32], needed [32, 32]",
        ),
        ({"num_attention_heads": 8, "head_dim": None}, "'model.layers.0.self_attn.k_proj.weight' has shape [16, 32]"),
        ({"num_hidden_layers": 4}, "9 missing: 'model.layers.3."),
        ({"num_hidden_layers": 2}, "9 that have no place in the model: 'model.layers.2."),
        ({"tie_word_embeddings": "yes"}, "model.tied: got 'yes'"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window with max_window_layers 1 and layer_types None: needed sliding_attention in all",
        ),
        (
            {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "sliding_window and layer_types ['sliding_attention', 'full_attention', 'sliding_attention']: needed",
        ),
        ({"model_type": "mistral", "layer_types": ["chunked_attention"] * 3}, "layer_types ['chunked_attention', "),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is set"),
        ({"model_type": "qwen2"}, "9 missing: 'model.layers.0.self_attn.q_proj.bias'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str, folders: Folders, tmp_path: Path) -> None:
    folder, _ = folders("llama")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config))
    PretrainedGPT.from_pretrained(tmp_path)  # as it is, it can be read
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError) as refused:
        PretrainedGPT.from_pretrained(tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_heads": 3, "head_size": 8, "bias": "all"}, "model.num_heads: 3 (known: divisors of hidden_size)"),
        ({"positions": "none"}, "Hugging Face Llama folder cannot compute what this model asks for: model.positions"),
        ({"bias": "qkv", "qk_norm": True}, "folder cannot compute what this model asks for: model."),
        (
            {"mlp": "gelu"},
            "Llama folder cannot compute what this model asks for: model.mlp: gelu (known: swiglu",
        ),
    ],
)
def test_a_model_that_no_family_computes(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    cfg = ModelConfig.model_validate({**OUR_SHAPE, **OUR_LLAMA, **changes})
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(), 2, 3))
    with pytest.raises(CheckpointError) as refused:
        huggingface.save(tmp_path / "out", cfg, dict(model.named_parameters()), eod_id=None)
    assert said in str(refused.value)
    assert not list((tmp_path / "out").iterdir())
