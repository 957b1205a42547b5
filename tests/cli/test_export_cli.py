"""gptworks export and infer as they are typed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(_finished: Path, call: Call, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "program"
    call("export", "--model", _finished, "--to", "torch", "--out", out)
    return out


def test_a_run_is_exported_and_writes_what_generate_writes(folder: Path, _finished: Path, call: Call) -> None:
    prompts = ["--prompt", "The sea", "--prompt", "On Friday morning", "--max-new-tokens", "10"]
    expected = call("generate", "--model", _finished, "--strategy", "greedy", "--device", "cpu", *prompts).out
    assert call("infer", folder, *prompts).out == expected
    (first, second) = [json.loads(line) for line in call("infer", folder, *prompts, "--json").out.splitlines()]
    assert first["prompt"] == "The sea" and len(first["tokens"]) == 10 and first["finish"] == "length"
    assert second["prompt"] + second["text"] in expected


def test_prompts_of_a_file(folder: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("The sea\nOn Friday\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The sea"}\n{"prompt": "On Friday"}\n')
    found = [
        call("infer", folder, "--prompts", tmp_path / name, "--max-new-tokens", "4").out
        for name in ("prompts.txt", "prompts.jsonl")
    ]
    assert found[0] == found[1] and found[0].startswith("The sea") and "On Friday" in found[0]


def test_what_export_says(_finished: Path, call: Call, tmp_path: Path) -> None:
    done = call("export", "--model", _finished, "--to", "hf", "--out", tmp_path / "hf", "--weights", "fp16")
    assert "Hugging Face folder, for transformers, fp16" in done.out
    assert "model.safetensors" in done.out and f"gptworks infer {tmp_path / 'hf'}" in done.out
    command = ["export", "--model", _finished, "--to", "hf", "--out", tmp_path / "again", "--json"]
    told = json.loads(call(*command).out)
    assert told["to"] == "hf" and told["weights"] == "fp32" and told["parameters"] == 28
    assert told["files"]["config.json"] == (tmp_path / "again" / "config.json").stat().st_size
    assert "exists and is not empty" in call(*command, expect=2).err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--to", "tensorrt"], "error: --to tensorrt: no such target. Known: hf, onnx, torch, gguf, ctranslate2."),
        (["--weights", "int4"], "error: --weights int4: --to hf has fp32, fp16, bf16."),
        (["--model", "nowhere"], "nowhere"),
        (["--model", "gpt2-xl"], "gpt2-xl"),
        (["-o", "heads=4"], "error: -o heads=4: needed model.KEY=VALUE"),
        (["--tokenizer", "gpt2"], "50257 tokens, but the model only 512"),
    ],
)
def test_mistakes(
    change: list[str],
    message: str,
    _finished: Path,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPTWORKS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    done = call("export", "--model", _finished, "--to", "hf", "--out", tmp_path / "out", *change, expect=2)
    assert message in done.err and "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_mistakes_of_infer(folder: Path, _finished: Path, call: Call, tmp_path: Path) -> None:
    assert "no such folder" in call("infer", tmp_path / "none", "--prompt", "x", expect=2).err
    wrong = call("infer", _finished, "--prompt", "x", expect=2).err
    assert "Needed: a folder that `gptworks export` wrote" in wrong and "`gptworks generate`" in wrong
    assert "context is 32" in call("infer", folder, "--prompt", "x", "--max-new-tokens", "99", expect=2).err
    call("infer", folder, expect=2)


@pytest.mark.parametrize("verb", ["export", "infer"])
def test_help_imports_nothing_heavy(verb: str) -> None:
    code = (
        "import sys\nfrom gptworks.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('HEAVY', *({'torch', 'numpy', 'pydantic', 'onnx', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, verb, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("HEAVY\n") and f"gptworks {verb}" in done.stdout
