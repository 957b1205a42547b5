"""W-01: Hugging Face folders, in every container, both ways, against transformers itself."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.pretrained import PretrainedGPT

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("container", ["safetensors", "bin", "old bin", "sharded", "sharded bin"])
def test_w_01_hugging_face_folders(container: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=3, n_head=2, initializer_range=0.3, tie_word_embeddings=tied
    )
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="8KB" if "sharded" in container else "1GB")
    if "bin" in container:
        _as_pickles(tmp_path / "hf", old=container == "old bin")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        close = 1e-5 * max(1.0, float(expected.abs().max()))
        ours = PretrainedGPT.from_pretrained(tmp_path / "hf")(TOKENS)
        assert torch.allclose(ours, expected, atol=close, rtol=0)

        convert(tmp_path / "hf", tmp_path / "back", "hf", verify=True)
        back = GPT2LMHeadModel.from_pretrained(tmp_path / "back").eval()
        assert torch.equal(back(TOKENS).logits, expected)


def _as_pickles(folder: Path, *, old: bool) -> None:
    """As folders from before safetensors have it."""
    import json

    import safetensors.torch

    names = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = safetensors.torch.load_file(file)
        name = file.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        torch.save(tensors, folder / name, _use_new_zipfile_serialization=not old)
        names |= dict.fromkeys(tensors, name)
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.unlink()
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
