"""Every kind of block generates, by torch and by the C++ function: as if read anew, and transformers' tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import gptworks
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.generate import fast_decode
from gptworks.generate.decode_state import DecodeState
from gptworks.generate.engine import continue_tokens, stream_text
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 512, "max_positions": 40}
LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none"}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_kv_heads": 2, "tied": False},
    "mistral": {**LLAMA, "num_kv_heads": 1, "sliding_window": 5},
    "qwen2": {**LLAMA, "bias": "qkv", "num_kv_heads": 2},
    "qwen3": {**LLAMA, "qk_norm": True, "num_kv_heads": 2, "head_size": 12},
    "yarn": {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 10}},
    "no positions": {"positions": "none", "sliding_window": 7},
}
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 4, 6, 7, 2, 11, 300, 12]]


@pytest.fixture(autouse=True, params=["torch", "function"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(fast_decode.Decoder, "of", lambda model: None)
    elif reason := fast_decode.why_not():
        pytest.skip(f"no C++ function: {reason}")
    else:
        assert fast_decode.Decoder.of(model_of("qwen3")) is not None


def model_of(kind: str, model_type: Any = GPT) -> Any:
    cfg = ModelConfig.model_validate({**SHAPE, **KINDS[kind]})
    weights = FreshWeights(InitConfig(std=0.4), cfg.num_layers, seed=3)
    return build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights, model_type=model_type).eval()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_cache_gives_what_reading_anew_gives(kind: str) -> None:
    """Rows of different lengths, prompts longer than the window, several tokens at a time."""
    model = model_of(kind)
    state = DecodeState(model, PROMPTS, 20, 512)
    found = {row: [logits] for row, logits in enumerate(state.read_prompts())}
    drawn = torch.randint(0, 512, (12, 3), generator=torch.Generator().manual_seed(1)).tolist()
    for tokens in drawn:
        for row, logits in state.read(dict(enumerate(tokens))).items():
            found[row].append(logits)
    for row, prompt in enumerate(PROMPTS):
        whole = torch.tensor([prompt + [tokens[row] for tokens in drawn]])
        wanted = model(whole)[0, len(prompt) - 1 :]
        assert wanted.abs().max() > 1
        assert (torch.stack(found[row]) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    cache = model.new_cache(1, 30)
    in_two = torch.cat([model(whole[:, :9], cache=cache), model(whole[:, 9:], cache=cache)], dim=1)
    assert (in_two - model(whole)).abs().max() <= 2e-5 * wanted.abs().max()
    assert cache.keys_LBNSH.shape[2] == model.cfg.num_kv_heads


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "no positions"])
@pytest.mark.parametrize("strategy", ["greedy", "beam"])
def test_tokens_of_transformers(kind: str, strategy: str, tmp_path: Path) -> None:
    model = model_of(kind)
    huggingface.save(tmp_path, model.cfg, dict(model.named_parameters()), eod_id=None)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    beams = {"num_beams": 3} if strategy == "beam" else {}
    settings = GenerateConfig(strategy=strategy, max_new_tokens=20, ignore_eod=True, **beams)  # type: ignore[arg-type]
    found = continue_tokens(model, PROMPTS, settings)
    for prompt, (new,) in zip(PROMPTS, found, strict=True):
        given = torch.tensor([prompt])
        wanted = theirs.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False, pad_token_id=0, **beams
        )
        assert new.tokens == wanted[0, len(prompt) :].tolist()
    assert len({token for (new,) in found for token in new.tokens}) > 8, "it repeats itself: nothing is shown"


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_is_the_text_at_once(kind: str, small_tokenizer: Tokenizer) -> None:
    model = model_of(kind, PretrainedGPT)
    model.tokenizer = small_tokenizer
    settings: dict[str, Any] = {"strategy": "greedy", "max_new_tokens": 12, "ignore_eod": True}
    (wanted,) = gptworks.generate(model, "the cat", return_full_text=False, **settings)
    assert "".join(stream_text(model, "the cat", **settings)) == wanted and wanted
