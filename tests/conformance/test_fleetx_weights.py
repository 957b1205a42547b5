"""FleetX checkpoint folders, as the real Paddle writes them, in our words: opened wherever weights are taken from."""

import shutil
from pathlib import Path

import pytest
import torch

from gptworks.checkpoint.rules import HeadsUnknownError
from gptworks.checkpoint.systems import registry
from gptworks.cli.main import main
from gptworks.model import GPT

FLEETX = Path(__file__).parents[1] / "fixtures/weights/paddle/fleetx"
RANK = "mp_00_sharding_00_pp_00"


@pytest.fixture(params=["with the mp level", "without it"])
def step(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A step of a run: in a folder for each rank, as distributed runs save it, or not."""
    folder = tmp_path / "output" / "step_20"
    source = FLEETX / "step_20" / RANK
    shutil.copytree(source, folder / RANK if request.param == "with the mp level" else folder)
    return folder


def test_s0_16_a_fleetx_folder_is_recognised_and_computed_in_fp32(step: Path) -> None:
    for path in (step, step.parent):  # ckpt_dir, or the folder all steps are in
        opened = registry.open_any(path, {"num_heads": 4}).require_whole()
        assert opened.system == "fleetx"
        assert opened.about["step"] == 20
        assert {each.dtype for each in opened.tensors.values()} == {torch.float16}
    model = GPT(opened.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(opened.tensor(name, parameter.shape))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.isfinite(model(torch.arange(8)[None])).all()


def test_s0_16_heads_come_from_the_config_or_from_the_user(step: Path) -> None:
    with pytest.raises(HeadsUnknownError, match=r"-o model\.num_heads=N"):
        registry.open_any(step)
    (step / "configs_345m_single_card.yaml").write_text("Model:\n  num_attention_heads: 4\n", encoding="utf-8")
    assert registry.open_any(step).model.num_heads == 4


def test_w_03_from_the_command_line_and_back(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = ["-o", "model.num_heads=4"]
    first, second = tmp_path / "nlp", tmp_path / "again"
    assert main(["convert", str(step), str(first), "--to", "paddlenlp", "--verify", *heads]) == 0
    assert main(["convert", str(first), str(second), "--to", "fleetx", "--tp", "2", "--pp", "2", "--verify"]) == 0
    assert capsys.readouterr().out.count("28 of 28 tensors equal to the bit") == 2
    assert sorted(folder.name for folder in second.glob("mp_*")) == [
        f"mp_{tp:02d}_sharding_00_pp_{pp:02d}" for tp in range(2) for pp in range(2)
    ]
    one, two = registry.open_any(step, {"num_heads": 4}), registry.open_any(second)
    for name, stored in one.tensors.items():
        assert torch.equal(stored.read(), two.tensors[name].read()), name


def test_s0_16_generate_prints_text_from_a_fleetx_folder(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp16 weights, with the mp_XX level and without; the tokenizer is a small one beside the weights."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    words = registry.open_any(step, {"num_heads": 4}).model.vocab_size
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet[:words])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    shared = ["-o", "model.num_heads=4", "--max-new-tokens", "4", "--strategy", "greedy", "--device", "cpu"]
    prompt = alphabet[3] + alphabet[5]
    assert main(["generate", "--model", str(step), "--tokenizer", str(tmp_path), "--prompt", prompt, *shared]) == 0
    assert len(capsys.readouterr().out.strip()) > len(prompt)
