"""Hugging Face GPT-2 models with weights that matter: far from zero, biases and norms included."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

# Models this small lose far more than they gain from a second thread.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., GPT2LMHeadModel]:
    """hf_model(n_inner=40): a tiny model in evaluation mode. Its attention is written out, not fused."""

    def make(*, seed: int = 0, **changes: object) -> GPT2LMHeadModel:
        shape = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 101, "n_positions": 48}
        dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 100, "eos_token_id": 100}
        cfg = GPT2Config(**{**shape, **dropout, **ends, "attn_implementation": "eager", **changes})
        model = GPT2LMHeadModel(cfg)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                middle = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
                parameter.copy_(middle + 0.25 * torch.randn(parameter.shape, generator=generator))
        return model.eval()

    return make


@pytest.fixture(scope="session")
def hf_folder(
    tmp_path_factory: pytest.TempPathFactory, hf_model: Callable[..., GPT2LMHeadModel]
) -> Callable[..., tuple[Path, GPT2LMHeadModel]]:
    """The same, saved by transformers: (folder, model)."""

    def make(**changes: object) -> tuple[Path, GPT2LMHeadModel]:
        model = hf_model(**changes)
        folder = tmp_path_factory.mktemp("hf")
        model.save_pretrained(folder)
        return folder, model

    return make
