"""stories15M: what llama2.c's own program writes (its C, compiled to WebAssembly by its publisher, under node)."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from real_model_places import MODELS, needed

import gptworks
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import registry

pytestmark = pytest.mark.real_models

PROGRAM = """
const [folder, prompt, count] = process.argv.slice(1);
require(folder + '/llama2.js')({
  locateFile: (path) => folder + '/' + path, arguments: ['model.bin'], print: () => {},
}).then(async (program) => {
  const ids = [];
  const told = program.addFunction((text, token, probability, finished) => {
    ids.push(token);
    if (finished || ids.length == Number(count)) { console.log(JSON.stringify(ids)); process.exit(0); }
  }, 'viifi');
  await program.ccall('register_callback', null, ['number'], [told]);
  await program.ccall('set_parameters', null, ['number', 'number'], [0, 0]);
  await program.ccall('generate', null, ['string'], [prompt]);
});
"""


@pytest.mark.parametrize("prompt", ["Once upon a time", "Lily and Ben", "One day a dog"])
def test_200_greedy_tokens(prompt: str, stories: Path) -> None:
    """The published build is of before the program put a blank before a prompt: it is given one."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    folder = needed(MODELS / "llama2c")
    tokenizer = registry.open_any(stories).open_tokenizer()
    assert tokenizer is not None
    first, *encoded = tokenizer.encode_prompt(prompt)
    assert first == 1
    count = len(encoded) + 200
    done = subprocess.run(
        [node, "-e", PROGRAM, str(folder), f" {prompt}", str(count)], capture_output=True, text=True, check=True
    )
    theirs = json.loads(done.stdout)
    assert theirs[: len(encoded)] == encoded
    settings = {"strategy": "greedy", "max_new_tokens": 200, "ignore_eod": True}
    (ours,) = gptworks.generations(PretrainedGPT.from_pretrained(stories), prompt, **settings)
    assert ours.tokens == theirs[len(encoded) :]


def test_parameters(stories: Path) -> None:
    """15.2 million, as its name says: counted from the file itself."""
    found = registry.open_any(stories).require_whole()
    numbers = sum(each.shape.numel() for each in found.tensors.values())
    positions = 2 * 256 * 24  # cosines and sines
    assert 4 * (numbers + positions) + 28 == stories.stat().st_size
    assert all(torch.isfinite(each.read()).all() for each in found.tensors.values())
