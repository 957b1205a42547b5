"""FleetX and PaddleNLP: the logits of the real PaddleNLP from its own files; every split there and back, to the bit."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.formats import pdparams
from gptworks.checkpoint.inspect import inspect
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import HeadsUnknownError, our_shapes
from gptworks.checkpoint.systems import fleetx, paddlenlp, registry
from gptworks.checkpoint.systems.contract import Opened, SplitSpec, Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures/weights/paddle"
HEADS = {"num_heads": 4}
MODEL = ModelConfig(num_layers=4, hidden_size=8, num_heads=4, vocab_size=12, max_positions=6, ffn_size=20)


def ours(model: ModelConfig = MODEL) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in our_shapes(model).items()}


def weights(model: ModelConfig = MODEL, step: int = 0) -> Weights:
    return Weights(model, {name: in_memory(tensor) for name, tensor in ours(model).items()}, step=step)


def state(folder: Path) -> dict[str, np.ndarray]:
    """As paddle.load would give it."""
    loaded: dict[str, np.ndarray] = pickle.loads((folder / "model.pdparams").read_bytes())
    del loaded[pdparams.NAMES]
    return loaded


def save(folder: Path, arrays: dict[str, np.ndarray], **meta: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.pdparams").write_bytes(pickle.dumps(arrays, protocol=4))
    if meta:
        (folder / "meta_state.pdopt").write_bytes(pickle.dumps(meta))
    return folder


def same(opened: Opened, expected: dict[str, Tensor]) -> None:
    found = opened.require_whole().tensors
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name].read(), tensor), name


# Against the real ones


@pytest.mark.parametrize(
    ("folder", "which", "system"),
    [
        ("nlp", "separate", "paddlenlp"),
        ("protocol2", "separate", "paddlenlp"),
        ("fleetx", "fused", "fleetx"),
        ("fleetx/step_20", "fused", "fleetx"),
        ("fleetx/step_20/mp_00_sharding_00_pp_00", "fused", "fleetx"),
        ("fleetx/step_20/mp_00_sharding_00_pp_00/model.pdparams", "fused", "fleetx"),
        ("nlp/model_state.pdparams", "separate", "paddlenlp"),
        ("pipeline", "pipeline", "fleetx"),
        ("interleaved", "interleaved", "fleetx"),
    ],
)
def test_logits_are_those_of_the_real_paddlenlp(folder: str, which: str, system: str) -> None:
    opened = registry.open_any(FIXTURES / folder, HEADS).require_whole()
    assert opened.system == system
    with np.load(FIXTURES / "expected.npz") as expected:
        found = conversion_check.logits(opened.model, opened.tensors, torch.from_numpy(expected["tokens"]))
        needed = torch.from_numpy(expected[which])
    assert (found - needed).abs().max() < 1e-5 * max(1.0, float(needed.abs().max()))


@pytest.mark.parametrize(("change", "value"), [("num_heads", 2), ("gelu", "erf"), ("layernorm_eps", 1e-2)])
def test_another_network_has_other_logits(change: str, value: object) -> None:
    """Heads, GELU and epsilon matter: the comparison above would see each of them."""
    opened = registry.open_any(FIXTURES / "fleetx", HEADS)
    with np.load(FIXTURES / "expected.npz") as expected:
        follow_from_heads = {"head_size", "num_kv_heads"}
        model = ModelConfig(**opened.model.model_dump(exclude=follow_from_heads) | {change: value})
        found = conversion_check.logits(model, opened.tensors, torch.from_numpy(expected["tokens"]))
        assert (found - torch.from_numpy(expected["fused"])).abs().max() > 1e-4


def test_what_is_said_about_the_real_ones() -> None:
    opened = registry.open_any(FIXTURES / "nlp")
    assert opened.model == ModelConfig(
        num_layers=2, hidden_size=16, num_heads=4, vocab_size=32, max_positions=16, ffn_size=24, gelu="tanh",
        layernorm_eps=1e-5, dropout_embed=0.1, dropout_hidden=0.1, dropout_attention=0.1,
    )  # fmt: skip
    assert opened.eod_id == 31
    opened = registry.open_any(FIXTURES / "fleetx", HEADS)
    assert opened.about == {"checkpoint": "step_20", "qkv": "fused, head by head", "step": 20}
    assert {each.dtype for each in opened.tensors.values()} == {torch.float16}
    assert opened.files == [FIXTURES / "fleetx/step_20/mp_00_sharding_00_pp_00/model.pdparams"]


# FleetX's layout, written out by hand


def by_hand(tensors: dict[str, Tensor], layer: int, tp: int, tps: int) -> dict[str, np.ndarray]:
    """A block as rank `tp` has it: columns of QKV head by head, each q then k then v; heads dealt out in blocks."""
    hidden, heads, ffn = MODEL.hidden_size, MODEL.num_heads, MODEL.ffn_size
    size = hidden // heads
    at = f"blocks.{layer}."
    mine = range(tp * heads // tps, (tp + 1) * heads // tps)
    # Ours: row (head, kind, d). Theirs: [in, out], where out is the same order.
    rows = [head * 3 * size + kind * size + d for head in mine for kind in range(3) for d in range(size)]
    inputs = [head * size + d for head in mine for d in range(size)]
    inner = range(tp * ffn // tps, (tp + 1) * ffn // tps)
    found = {
        "self_attn.qkv_proj.weight": [[tensors[at + "attn.qkv.weight"][r][c] for r in rows] for c in range(hidden)],
        "self_attn.qkv_proj.bias": [tensors[at + "attn.qkv.bias"][r] for r in rows],
        "self_attn.out_proj.weight": [[tensors[at + "attn.out.weight"][o][i] for o in range(hidden)] for i in inputs],
        "self_attn.out_proj.bias": tensors[at + "attn.out.bias"].tolist(),
        "linear1.weight": [[tensors[at + "mlp.up.weight"][o][i] for o in inner] for i in range(hidden)],
        "linear1.bias": [tensors[at + "mlp.up.bias"][o] for o in inner],
        "linear2.weight": [[tensors[at + "mlp.down.weight"][o][i] for o in range(hidden)] for i in inner],
        "linear2.bias": tensors[at + "mlp.down.bias"].tolist(),
        "norm1.weight": tensors[at + "ln1.weight"].tolist(),
        "norm1.bias": tensors[at + "ln1.bias"].tolist(),
        "norm2.weight": tensors[at + "ln2.weight"].tolist(),
        "norm2.bias": tensors[at + "ln2.bias"].tolist(),
    }
    return {name: np.array(values, np.float32) for name, values in found.items()}


def expected_state(tp: int, tps: int, pp: int, pps: int, *, norm: str = "norm.") -> dict[str, np.ndarray]:
    tensors, layers = ours(), MODEL.num_layers
    words = tensors["wte.weight"].numpy()
    mine = words[tp * len(words) // tps : (tp + 1) * len(words) // tps]
    embed = {"word_embeddings.weight": mine, "position_embeddings.weight": tensors["wpe.weight"].numpy()}
    last = {kind: tensors[f"ln_f.{kind}"].numpy() for kind in ("weight", "bias")}
    found: dict[str, np.ndarray] = {}
    if pps == 1:
        found |= {f"gpt.embeddings.{name}": array for name, array in embed.items()}
        for layer in range(layers):
            block = by_hand(tensors, layer, tp, tps)
            found |= {f"gpt.decoder.layers.{layer}.{name}": array for name, array in block.items()}
        found |= {f"gpt.decoder.norm.{kind}": array for kind, array in last.items()}
        return {f"_layers.{name}": array for name, array in found.items()} if tps > 1 else found
    if pp in (0, pps - 1):
        found |= {f"_layers.shared_layers.embed.{name}": array for name, array in embed.items()}
    for layer in range(pp * layers // pps, (pp + 1) * layers // pps):
        found |= {f"_layers.{1 + layer}.{name}": array for name, array in by_hand(tensors, layer, tp, tps).items()}
    if pp == pps - 1:
        found |= {f"_layers.{layers + 1}.{norm}{kind}": array for kind, array in last.items()}
    return found


SPLITS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)]


@pytest.mark.parametrize(("tps", "pps"), SPLITS)
def test_every_split_is_written_as_by_hand_and_read_back(tps: int, pps: int, tmp_path: Path) -> None:
    files = fleetx.write(tmp_path, weights(step=30), SplitSpec(tps, pps))
    folders = {(tp, pp): tmp_path / f"mp_{tp:02d}_sharding_00_pp_{pp:02d}" for tp in range(tps) for pp in range(pps)}
    if (tps, pps) == (1, 1):
        folders = {(0, 0): tmp_path}
    assert {file for file in files if file.suffix == ".pdparams"} == {f / "model.pdparams" for f in folders.values()}
    for (tp, pp), folder in folders.items():
        found, needed = state(folder), expected_state(tp, tps, pp, pps)
        assert set(found) == set(needed)
        for name, array in needed.items():
            assert np.array_equal(found[name], array), name
    opened = registry.open_any(tmp_path)  # heads from the YAML beside
    assert opened.system == "fleetx"
    assert opened.model == MODEL
    assert opened.about["step"] == 30
    assert opened.about.get("layout") == (f"tensor {tps} x pipeline {pps}" if tps * pps > 1 else None)
    same(opened, ours())
    (tmp_path / "model.yaml").unlink()
    with pytest.raises(HeadsUnknownError, match=r"-o model\.num_heads=N"):
        registry.open_any(tmp_path)


@pytest.mark.parametrize("prefix", ["", "_layers."])
@pytest.mark.parametrize("norm", ["", "norm."])
@pytest.mark.parametrize("tps", [1, 2])
def test_names_of_the_years(tps: int, norm: str, prefix: str, tmp_path: Path) -> None:
    """Before 2023 the final norm had no name of its own; saved without the wrapper there is no `_layers.`."""
    for tp in range(tps):
        for pp in range(2):
            arrays = expected_state(tp, tps, pp, 2, norm=norm)
            if pp == 1:  # the last stage has positions of its own, which are never trained
                name = "_layers.shared_layers.embed.position_embeddings.weight"
                arrays[name] = np.zeros_like(arrays[name])
            arrays = {prefix + name.removeprefix("_layers."): array for name, array in arrays.items()}
            save(tmp_path / f"mp_{tp:02d}_sharding_00_pp_{pp:02d}", arrays)
    same(fleetx.open(tmp_path, HEADS), ours())


def test_interleaved_stages(tmp_path: Path) -> None:
    """Two chunks a stage: layers are numbered inside a chunk, which is called after its first layer."""
    tensors = ours()
    chunks = {0: [0, 1], 2: [2], 3: [3], 4: [4, 5, 6]}  # pipeline layers: embeddings, 4 blocks, norm, head
    for pp, starts in enumerate(([0, 3], [2, 4])):
        arrays: dict[str, np.ndarray] = {}
        embed = {
            "word_embeddings.weight": tensors["wte.weight"].numpy(),
            "position_embeddings.weight": tensors["wpe.weight"].numpy() * (pp == 0),
        }
        for start in starts:
            for number in chunks[start]:
                inside = f"_layers.{start}.{number - start}."
                if number == 0:
                    arrays |= {inside + name: array for name, array in embed.items()}
                elif number <= 4:
                    arrays |= {inside + name: array for name, array in by_hand(tensors, number - 1, 0, 1).items()}
                elif number == 5:
                    arrays |= {inside + "norm." + kind: tensors[f"ln_f.{kind}"].numpy() for kind in ("weight", "bias")}
                else:
                    arrays |= {f"_layers.{start}.embed.{name}": array for name, array in embed.items()}
        arrays |= {f"_layers.shared_layers.embed.{name}": array for name, array in embed.items()}
        save(tmp_path / f"mp_00_sharding_00_pp_{pp:02d}", arrays)
    same(fleetx.open(tmp_path, HEADS), tensors)


def separate(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q, k and v apart, of any number of heads."""
    found, size = {}, MODEL.head_size
    for name, array in arrays.items():
        if ".qkv_proj." not in name:
            found[name] = array
            continue
        heads = array.shape[-1] // (3 * size)
        for number, letter in enumerate("qkv"):
            columns = [head * 3 * size + number * size + d for head in range(heads) for d in range(size)]
            found[name.replace("qkv_proj", f"{letter}_proj")] = array[..., columns]
    return found


@pytest.mark.parametrize(("tps", "pps"), SPLITS)
def test_separate_qkv_in_every_split(tps: int, pps: int, tmp_path: Path) -> None:
    for tp in range(tps):
        for pp in range(pps):
            save(tmp_path / f"mp_{tp:02d}_sharding_00_pp_{pp:02d}", separate(expected_state(tp, tps, pp, pps)))
    opened = fleetx.open(tmp_path, HEADS)
    same(opened, ours())
    assert opened.about["qkv"] == "q, k and v apart"


# Folders of a run


def test_the_last_step_of_an_output_folder(tmp_path: Path) -> None:
    whole = expected_state(0, 1, 0, 1)
    zeros = {name: np.zeros_like(array) for name, array in whole.items()}
    save(tmp_path / "step_900", zeros, global_step=900)
    save(tmp_path / "step_1000" / "mp_00_sharding_00_pp_00", whole, global_step=1000)
    (tmp_path / "step_2000").mkdir()  # nothing was saved there
    assert fleetx.recognise(tmp_path)
    opened = fleetx.open(tmp_path, HEADS)
    same(opened, ours())
    assert opened.about["checkpoint"] == "step_1000, the last of 2"
    assert opened.about["step"] == 1000


def test_epochs_and_steps_of_later_years(tmp_path: Path) -> None:
    whole = expected_state(0, 1, 0, 1)
    zeros = {name: np.zeros_like(array) for name, array in whole.items()}
    save(tmp_path / "epoch_0_step_5000", zeros)
    save(tmp_path / "epoch_1_step_20", whole, epoch=1, step=20, cuda_rng_state=None)
    opened = fleetx.open(tmp_path, HEADS)
    same(opened, ours())
    assert (opened.about["epoch"], opened.about["step"]) == (1, 21)


def test_heads_from_a_config_beside(tmp_path: Path) -> None:
    save(tmp_path / "step_5" / "mp_00_sharding_00_pp_00", expected_state(0, 1, 0, 1))
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "gpt.yaml").write_text(
        "Model:\n  num_attention_heads: 4\n  hidden_dropout_prob: 0.1\n", encoding="utf-8"
    )
    for path in (tmp_path, tmp_path / "step_5", tmp_path / "step_5/mp_00_sharding_00_pp_00"):
        opened = fleetx.open(path, {})
        assert (opened.model.num_heads, opened.model.dropout_hidden) == (4, 0.1)
        assert opened.about["heads"] == "from gpt.yaml"
    assert fleetx.open(tmp_path, {"num_heads": 2}).model.num_heads == 2
    (tmp_path / "other.yaml").write_text("Model: {num_attention_heads: 8}\n", encoding="utf-8")
    with pytest.raises(HeadsUnknownError):
        fleetx.open(tmp_path, {})


def test_a_config_of_another_model(tmp_path: Path) -> None:
    save(tmp_path, expected_state(0, 1, 0, 1))
    (tmp_path / "gpt.yaml").write_text("Model: {num_attention_heads: 4, hidden_size: 1024}\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"gpt\.yaml: hidden_size is 1024, and the weights beside it have 8"):
        fleetx.open(tmp_path, {})
    assert "heads" not in fleetx.open(tmp_path, HEADS).about


def test_inspection_needs_no_heads() -> None:
    report = inspect(FIXTURES / "fleetx")
    assert not report.heads_known
    assert report.as_dict()["model"]["num_heads"] is None


def test_sharding_ranks_hold_copies(tmp_path: Path) -> None:
    whole = expected_state(0, 1, 0, 1)
    for rank in range(2):
        save(tmp_path / f"mp_00_sharding_{rank:02d}_pp_00", whole)
    opened = fleetx.open(tmp_path, HEADS)
    same(opened, ours())
    assert opened.remarks == ["2 sharding ranks, each with all parameters: those of rank 0 are used"]
    same(fleetx.open(tmp_path / "mp_00_sharding_01_pp_00", HEADS), ours())
    name = "gpt.decoder.norm.bias"
    save(tmp_path / "mp_00_sharding_01_pp_00", whole | {name: whole[name] + 1})
    with pytest.raises(CheckpointError, match=f"'{name}' is not as in mp_00_sharding_00_pp_00.*different steps"):
        fleetx.open(tmp_path, HEADS)
    del whole[name]
    save(tmp_path / "mp_00_sharding_01_pp_00", whole)
    with pytest.raises(CheckpointError, match="different steps"):
        fleetx.open(tmp_path, HEADS)


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    fleetx.write(tmp_path / "a", weights(), SplitSpec(2, 2))
    first, last = (tmp_path / "a" / f"mp_01_sharding_00_pp_{pp:02d}" for pp in range(2))
    with pytest.raises(CheckpointError, match="one of 4 parts of a model"):
        registry.open_any(first, HEADS)
    with pytest.raises(CheckpointError, match="one of 4 parts of a model"):
        registry.open_any(first / "model.pdparams", HEADS)
    arrays = state(last)
    words = "_layers.shared_layers.embed.word_embeddings.weight"
    save(last, arrays | {words: arrays[words] + 1})
    with pytest.raises(CheckpointError, match="not the word embedding of the first stage"):
        registry.open_any(tmp_path / "a", HEADS)
    save(last, state(first))
    with pytest.raises(CheckpointError, match="is in two places"):
        registry.open_any(tmp_path / "a", HEADS)
    shutil.rmtree(last)
    with pytest.raises(CheckpointError, match="mp_01_sharding_00_pp_01 is missing"):
        registry.open_any(tmp_path / "a", HEADS)


def test_what_is_missing_or_left_over_is_listed(tmp_path: Path) -> None:
    arrays = expected_state(0, 1, 0, 1)
    del arrays["gpt.decoder.layers.3.linear1.bias"]
    save(tmp_path, arrays | {"gpt.extra": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"1 missing: 'gpt.decoder.layers.3.linear1.bias'(.|\n)*'gpt.extra'"):
        fleetx.open(tmp_path, HEADS).require_whole()


def test_a_damaged_step_is_a_remark_and_damaged_weights_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, expected_state(0, 1, 0, 1))
    (tmp_path / "meta_state.pdopt").write_bytes(b"\x80\x04}")
    opened = fleetx.open(tmp_path, HEADS)
    assert "step" not in opened.about
    assert "The step is not known." in opened.remarks[0]
    data = (tmp_path / "model.pdparams").read_bytes()
    (tmp_path / "model.pdparams").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="Copy it again"):
        fleetx.open(tmp_path, HEADS)


@pytest.mark.parametrize(
    ("changes", "cut", "message"),
    [
        ({"gelu": "erf"}, SplitSpec(), "model.gelu is erf.*-o model.gelu=tanh"),
        ({"layernorm_eps": 1e-6}, SplitSpec(), "model.layernorm_eps"),
        ({"tied": False}, SplitSpec(), "model.tied"),
        ({}, SplitSpec(8, 1), "--tp 8: heads 4"),
        ({}, SplitSpec(1, 3), "--pp 3"),
    ],
)
def test_what_fleetx_cannot_hold(changes: dict[str, Any], cut: SplitSpec, message: str, tmp_path: Path) -> None:
    model = MODEL.model_copy(update=changes)
    with pytest.raises(CheckpointError, match=message):
        fleetx.write(tmp_path, weights(model), cut)
    assert not list(tmp_path.iterdir())
    if "tp" not in message and "pp" not in message:
        with pytest.raises(CheckpointError, match=message):
            paddlenlp.write(tmp_path, weights(model))


# PaddleNLP


def nlp_state(folder: Path) -> dict[str, np.ndarray]:
    loaded: dict[str, np.ndarray] = pickle.loads((folder / "model_state.pdparams").read_bytes())
    del loaded[pdparams.NAMES]
    return loaded


def test_paddlenlp_there_and_back(tmp_path: Path) -> None:
    paddlenlp.write(tmp_path, Weights(MODEL, weights().tensors, eod_id=11))
    found, needed = nlp_state(tmp_path), separate(expected_state(0, 1, 0, 1))
    assert set(found) == set(needed)
    for name, array in needed.items():
        assert np.array_equal(found[name], array), name
    opened = registry.open_any(tmp_path)
    assert (opened.system, opened.model, opened.eod_id) == ("paddlenlp", MODEL, 11)
    same(opened, ours())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("prefix", ["gpt.", ""])
@pytest.mark.parametrize("head", [None, "lm_head.decoder.weight", "lm_head.weight"])
def test_paddlenlp_names_of_the_years(prefix: str, head: str | None, fused: bool, tmp_path: Path) -> None:
    arrays = expected_state(0, 1, 0, 1)
    arrays = arrays if fused else separate(arrays)
    arrays = {prefix + name.removeprefix("gpt."): array for name, array in arrays.items()}
    if head:
        arrays[head] = arrays[prefix + "embeddings.word_embeddings.weight"]
    (tmp_path / "model_state.pdparams").write_bytes(pickle.dumps(arrays, protocol=2))
    same(paddlenlp.open(tmp_path, HEADS), ours())
    if head:
        arrays[head] = arrays[head] + 1
        (tmp_path / "model_state.pdparams").write_bytes(pickle.dumps(arrays, protocol=2))
        with pytest.raises(CheckpointError, match=f"'{head}' is not the word embedding"):
            paddlenlp.open(tmp_path, HEADS)


@pytest.mark.parametrize("name", ["model_config.json", "config.json"])
@pytest.mark.parametrize("form", ["nested", "flat", "hugging face"])
def test_paddlenlp_settings_of_the_years(form: str, name: str, tmp_path: Path) -> None:
    paddlenlp.write(tmp_path, weights())
    nested = json.loads((tmp_path / "model_config.json").read_text(encoding="utf-8"))
    assert nested["init_class"] == "GPTForPretraining"
    flat = {key: value for key, value in nested["init_args"][0].items() if key != "init_class"}
    if form == "hugging face":
        flat["n_head"] = flat.pop("num_attention_heads")
    (tmp_path / "model_config.json").unlink()
    (tmp_path / name).write_text(json.dumps(nested if form == "nested" else flat), encoding="utf-8")
    assert registry.open_any(tmp_path).model == MODEL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"hidden_act": "relu"}', "activation is 'relu'"),
        ('{"normalize_before": false}', "changes the computation"),
        ('{"scale_qk_coeff": 2.0}', "changes the computation"),
        ("[1]", "holds a list"),
        ("{", "not JSON"),
        ('{"num_attention_heads": 3}', "num_heads"),
        ("{}", r"-o model\.num_heads=N"),
    ],
)
def test_paddlenlp_settings_that_are_refused(settings: str, message: str, tmp_path: Path) -> None:
    paddlenlp.write(tmp_path, weights())
    (tmp_path / "model_config.json").write_text(settings, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        registry.open_any(tmp_path)


def test_the_last_model_of_a_paddlenlp_run(tmp_path: Path) -> None:
    for step in (500, 1000, 90):
        (tmp_path / f"model_{step}").mkdir()
        paddlenlp.write(tmp_path / f"model_{step}", weights())
    opened = registry.open_any(tmp_path)
    assert opened.system == "paddlenlp"
    assert opened.about["checkpoint"] == "model_1000, the last of 3"
    assert opened.files[0] == tmp_path / "model_1000" / "model_state.pdparams"


# From one to the other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hugging_face_to_both_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    source = FIXTURES / "nlp"
    convert(source, tmp_path / "hf", "hf", dtype=dtype, verify=True)
    convert(tmp_path / "hf", tmp_path / "fleetx", "fleetx", cut=SplitSpec(2, 2), verify=True)
    convert(tmp_path / "fleetx", tmp_path / "nlp", "paddlenlp", verify=True)
    back = convert(tmp_path / "nlp", tmp_path / "back", "hf", verify=True)
    assert back.certificate is not None
    assert back.certificate["tensors"]["different"] == 0
    one, two = (tmp_path / folder / "model.safetensors" for folder in ("hf", "back"))
    assert one.read_bytes() == two.read_bytes()
