"""The Python lines of the documents, with nothing but their imports changed. Rows: S0-18, S4-06, S4-07, S4-08."""

import contextlib
import io
from pathlib import Path
from typing import Any

import foreign_runs as foreign
import pytest
import torch
import yaml
from home_folder import own_home
from transformers import GPT2Config, GPT2LMHeadModel

import gptworks as gw
from gptworks.cli.main import main
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.data.prepare import PrepareJob, prepare
from gptworks.interop import python_imports
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 50257, "max_positions": 128}
# What stands above the lines of FleetX's document in its own program.
IMPORTS = "import os\nimport paddle\nfrom fleetx.models.gpt_model.modeling import GPTGenerationModule\n"


def changed(code: str) -> str:
    """As `gptworks run` says."""
    lines = code.splitlines()
    told = python_imports.changes(code)
    assert told
    for each in told:
        place, _, change = each.partition(": ")
        before, _, after = change.partition("  ->  ")
        at = int(place.removeprefix("line ")) - 1
        assert lines[at] == before
        lines[at] = after
    return "\n".join(lines)


@pytest.mark.slow
def test_s4_06_s4_07_s4_08_the_lines_of_mindformers(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTWORKS_HOME", own_home(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    off = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(1)
    published = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=2, n_positions=32, initializer_range=0.3, **off))
    published.eval().save_pretrained(tmp_path / "home" / "models" / "gpt2")
    model, trainer, pipeline = foreign.python_blocks(shared_data, 4)
    code = model.replace("print(output)", "logits = output", 1) + pipeline
    names: dict[str, Any] = {}
    exec(compile(changed(code), "document", "exec"), names)
    row = torch.tensor([[31373, 995, *[50256] * 30]])
    torch.testing.assert_close(names["logits"], published(row).logits, rtol=1e-4, atol=1e-4)
    # MindFormers scores a position by its input, so what follows "world" is scored too.
    scored = torch.tensor([[31373, 995, 50256]])
    torch.testing.assert_close(names["output"], published(scored, labels=scored).loss)
    ((text,),) = [each["text_generation_text"] for each in names["pipeline_result"]]
    assert text.startswith("I love Beijing, because")
    # With a file and a shape of a reader: that of gpt2, afresh, would take long.
    tokenizer = gw.Tokenizer.from_pretrained("gpt2")
    (tmp_path / "text.txt").write_text("On day 3 Anna found a map by the river and took it home.\n\n" * 60)
    prepare(PrepareJob([str(tmp_path / "text.txt")], tmp_path / "made", tokenizer, format="megatron"))
    for theirs, ours in {"your data file path": "made", "model='gpt2'": f"model={SHAPE}"}.items():
        assert theirs in trainer
        trainer = trainer.replace(theirs, ours)
    exec(compile(changed(trainer), "document", "exec"), names)
    ((text,),) = [each["text_generation_text"] for each in names["res"]]
    assert text.startswith("I love Beijing, because") and isinstance(names["trainer"], gw.Trainer)


def test_s0_18_the_lines_of_fleetx(shared_data: Path, tmp_path: Path) -> None:
    shape = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, ffn_size=64, vocab_size=50304, max_positions=64)
    gpt = build_gpt(shape, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(), 2, seed=5))
    from gptworks.checkpoint.systems import huggingface

    huggingface.save(tmp_path / "hf", shape, dict(gpt.named_parameters()), eod_id=50256)
    saved = ["convert", str(tmp_path / "hf"), str(tmp_path / "step_1"), "--to", "fleetx", "--dtype", "fp16"]
    assert main(saved) == 0
    configs = yaml.safe_load(
        (Path(__file__).parents[2] / "recipes/foreign/fleetx/configs_345m_single_card.yaml").read_text()
    )
    configs["Model"] |= {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 64}
    configs["Generation"] = {"decode_strategy": "greedy_search", "max_dec_len": 8}
    configs["Engine"]["save_load"]["ckpt_dir"] = str(tmp_path / "step_1")
    names: dict[str, Any] = {"configs": configs}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(changed(IMPORTS + "\n".join(foreign.python_blocks(shared_data, 0))), "document", "exec"), names)
    same = gw.GPT.from_pretrained(tmp_path / "step_1", tokenizer="gpt2")
    expected = gw.generate(same, names["input_text"], strategy="greedy", max_new_tokens=8, rules="paddle")
    assert names["result"] == expected and f"Generation: {expected[0]}" in printed.getvalue()


def test_run_says_which_line_to_change(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "api.py").write_text("\n".join(foreign.python_blocks(shared_data, 4)), encoding="utf-8")
    assert main(["run", "--cwd", str(tmp_path), "--", "python", "api.py"]) == 2
    told = capsys.readouterr().err
    first = (
        "line 1: from mindformers import GPT2LMHeadModel, GPT2Tokenizer  ->  from gptworks.compat.mindformers import"
    )
    assert first in told and "from gptworks.compat.mindformers.trainer import Trainer" in told
