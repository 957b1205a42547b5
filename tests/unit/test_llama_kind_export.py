"""Every kind of block as an ONNX graph and as a torch program: the logits and the text of our model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gptworks
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.cli.main import main
from gptworks.config.schema import ModelConfig
from gptworks.export import folder as folders
from gptworks.export import onnx_graph, torch_program
from gptworks.export.contract import Source
from gptworks.export.folder import export
from gptworks.model import GPT
from gptworks.tokenizer import Tokenizer

# Eight rows more than the tokenizer has tokens.
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 520, "max_positions": 64}
LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "num_kv_heads": 2}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_positions": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "tied": False, "layernorm_eps": 1e-3},
    "llama, llama3": {**LLAMA, "rope_scaling": LLAMA3, "rope_theta": 500.0},
    "llama, linear, biases, wide heads": {
        **LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}, "bias": "all", "head_size": 12, "num_kv_heads": 4
    },
    "mistral": {**LLAMA, "num_kv_heads": 1, "sliding_window": 5},
    "llama, yarn": {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 10}},
    "qwen2": {**LLAMA, "bias": "qkv"},
    "qwen3": {**LLAMA, "qk_norm": True, "head_size": 12},
}  # fmt: skip
NO_FAMILY = {"positions": "none", "sliding_window": 7, "bias": "none", "num_kv_heads": 2}
PROMPTS = ["The sea was calm", "x", "On Friday morning the old man said that he had paid"]
GREEDY: dict[str, Any] = {"strategy": "greedy", "max_new_tokens": 12}
Run = Callable[..., tuple[Tensor, Any]]


def parameters_of(cfg: ModelConfig) -> dict[str, Tensor]:
    """Far from 0, gains from 1, biases from neither."""
    seeded = torch.Generator().manual_seed(5)
    return {
        name: (1.0 if "ln" in name or "norm" in name else 0.0) + 0.25 * torch.randn(each.shape, generator=seeded)
        for name, each in GPT(cfg).named_parameters()
    }


@pytest.fixture(scope="module")
def folder_of(small_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            cfg = ModelConfig.model_validate({**SHAPE, **KINDS[kind]})
            made[kind] = tmp_path_factory.mktemp("source")
            huggingface.save(made[kind], cfg, parameters_of(cfg), eod_id=small_tokenizer.eod_id)
            small_tokenizer.save(made[kind])
        return made[kind]

    return make


def graph_of(folder: Path, cfg: ModelConfig) -> Run:
    """(tokens [B, T], padding on the left of each row, past or None) -> logits, present"""
    session = pytest.importorskip("onnxruntime").InferenceSession(str(folder / "model.onnx"))

    def run(tokens: Tensor, padding: list[int], past: Any = None) -> tuple[Tensor, Any]:
        empty = np.zeros((len(tokens), cfg.num_kv_heads, 0, cfg.head_size), np.float32)
        past = past or [empty] * (2 * cfg.num_layers)
        at = np.arange(past[0].shape[2] + tokens.shape[1])[None] - np.array(padding)[:, None]
        given = [tokens.numpy(), (at >= 0).astype(np.int64), at.clip(0)[:, -tokens.shape[1] :], *past]
        names = [each.name for each in session.get_inputs()]
        logits, *present = session.run(None, dict(zip(names, given, strict=True)))
        return torch.from_numpy(logits), present

    return run


def program_of(program: Any, cfg: ModelConfig) -> Run:
    def run(tokens: Tensor, padding: list[int], past: Any = None) -> tuple[Tensor, Any]:
        empty = torch.zeros(cfg.num_layers, 2, len(tokens), cfg.num_kv_heads, 0, cfg.head_size)
        return program(tokens, torch.tensor(padding), empty if past is None else past)

    return run


@torch.no_grad()
def expect_our_logits(run: Run, model: GPT) -> None:
    """Rows of 19, 11 and 1 tokens, padded on the left: read as a whole, one by one, and in pieces with a cache."""
    lengths = [19, 11, 1]
    padding = [19 - length for length in lengths]
    tokens = torch.randint(0, 512, (3, 19), generator=torch.Generator().manual_seed(2))
    alone = [model(row[None, -length:])[0, :, :512] for row, length in zip(tokens, lengths, strict=True)]
    assert alone[0].abs().max() > 1
    for pieces in ([19], [8, 1, 10], [1] * 19):
        past, found = None, []
        for piece in tokens.split(pieces, dim=1):
            logits, past = run(piece, padding, past)
            found.append(logits)
        whole = torch.cat(found, dim=1)
        assert whole.shape == (3, 19, 512) and whole.isfinite().all()
        for row, length, wanted in zip(whole, lengths, alone, strict=True):
            assert (row[-length:] - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def text_of_infer(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    found = []
    for prompt in PROMPTS:
        assert main(["infer", str(folder), "--prompt", prompt, "--max-new-tokens", "12"]) == 0
        found.append(capsys.readouterr().out.rstrip("\n"))
    return found


def our_text(model: PretrainedGPT) -> list[str]:
    return [text.rstrip("\n") for text in gptworks.generate(model, PROMPTS, return_full_text=True, **GREEDY)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_onnx_graph(
    kind: str, folder_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    export(folder_of(kind), "onnx", tmp_path / "out")
    model = PretrainedGPT.from_pretrained(folder_of(kind))
    expect_our_logits(graph_of(tmp_path / "out", model.cfg), model)
    assert text_of_infer(tmp_path / "out", capsys) == our_text(model)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_onnx_graph_in_int8(kind: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    model = PretrainedGPT.from_pretrained(folder_of(kind))
    runs = {}
    for weights in ("fp32", "int8"):
        export(folder_of(kind), "onnx", tmp_path / weights, weights=weights)
        runs[weights] = graph_of(tmp_path / weights, model.cfg)
    tokens = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(3))
    exact, near = (runs[weights](tokens, [0, 0])[0] for weights in ("fp32", "int8"))
    spread = float((exact - exact.mean(-1, keepdim=True)).pow(2).mean().sqrt())
    assert 0 < float((near - exact).pow(2).mean().sqrt()) < 0.06 * spread
    sizes = [(tmp_path / weights / "model.onnx.data").stat().st_size for weights in ("int8", "fp32")]
    assert sizes[0] < 0.45 * sizes[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_torch_program_computes(kind: str, folder_of: Callable[[str], Path]) -> None:
    """Before it is traced, which takes seconds."""
    opened = huggingface.open(folder_of(kind), {}).require_whole()
    source = folders._source(opened, Tokenizer.from_pretrained(folder_of(kind)), "fp32")
    model = PretrainedGPT.from_pretrained(folder_of(kind))
    expect_our_logits(program_of(torch_program._Program(source), model.cfg), model)


@pytest.mark.parametrize(
    "kind", [kind if kind == "qwen3" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_torch_program(
    kind: str, folder_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(folder_of(kind), "torch", tmp_path / "out")
    model = PretrainedGPT.from_pretrained(folder_of(kind))
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    expect_our_logits(program_of(program, model.cfg), model)
    assert text_of_infer(tmp_path / "out", capsys) == our_text(model)


def test_a_model_of_no_family(tmp_path: Path, small_tokenizer: Tokenizer) -> None:
    pytest.importorskip("onnx")
    cfg = ModelConfig.model_validate({**SHAPE, **NO_FAMILY, "vocab_size": 512})
    model, parameters = GPT(cfg).eval(), parameters_of(cfg)
    model.load_state_dict(parameters, strict=False)
    source = Source(cfg, {name: in_memory(each) for name, each in parameters.items()}, small_tokenizer)
    onnx_graph.write(tmp_path, "model", source, "fp32")
    expect_our_logits(graph_of(tmp_path, cfg), model)
    expect_our_logits(program_of(torch_program._Program(source), cfg), model)


def test_rows_of_shared_heads_are_sorted_by_what_they_are() -> None:
    cfg = ModelConfig(hidden_size=8, num_heads=4, num_kv_heads=2, head_size=1)
    rows = np.array(["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"])
    assert onnx_graph.by_kind(rows, cfg).tolist() == ["q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("weights", "near"), [("fp32", 1e-5), ("fp16", 1e-2), ("int8", 0.2)])
def test_a_gguf_file(kind: str, weights: str, near: float, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """As we read it; llama.cpp's text is compared in tests/interop."""
    model = PretrainedGPT.from_pretrained(folder_of(kind))
    export(folder_of(kind), "gguf", tmp_path / "out", weights=weights)
    tokens = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model(tokens)[..., :512]
        found = PretrainedGPT.from_pretrained(tmp_path / "out" / "model.gguf")(tokens)
    assert (found - wanted).abs().max() <= near * wanted.abs().max()


def test_a_gguf_file_of_a_scaling_that_only_its_frequencies_tell(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    done = export(folder_of("llama, llama3"), "gguf", tmp_path / "out")
    assert "rope_freqs.weight" in {each["name"] for each in done.info["parameters"]}
