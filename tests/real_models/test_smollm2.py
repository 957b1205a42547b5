"""SmolLM2-135M-Instruct as it was published (GGUF, Q4_1 with Q8_0 and F32 parts), beside those who know it.

llama.cpp rounds activations to 8 bits where matrices are of block types, and keeps its cache in fp16: text is compared
with F32 and F16 files that were converted from the same numbers, and with a cache in fp32.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_model_places import CORPORA, needed

import gptworks
from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import registry
from gptworks.cli.main import main

pytestmark = pytest.mark.real_models

PASSAGES = int(os.environ.get("GPTWORKS_REAL_PASSAGES", "300"))
WINDOWS = int(os.environ.get("GPTWORKS_REAL_WINDOWS", "32"))  # of 1024 tokens; 0 = the whole of it
PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The primary colors are",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n", "In 1969,", "Dear Sir or Madam,",
    "Roses are red,", "To bake bread you need",
]  # fmt: skip
HARD = Path(__file__).parents[1] / "fixtures" / "tokenizers" / "hard_text.txt"

LOGITS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
path, ids = sys.argv[1], json.loads(sys.argv[2])
folder, _, name = path.rpartition("/")
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
with torch.no_grad():
    torch.save(model(torch.tensor([ids])).logits[0], sys.argv[3])
print("true")
"""

SCORES = """
import json, sys, torch
from transformers import AutoModelForCausalLM
path, rows = sys.argv[1], json.load(open(sys.argv[2]))
folder, _, name = path.rpartition("/")
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
found = []
for ids, asked in rows:
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    last, target = logits[-asked:], torch.tensor(ids[-asked:])
    found.append([float(last.gather(1, target[:, None]).double().sum()), bool((last.argmax(-1) == target).all())])
print(json.dumps(found))
"""

HARNESS = """
import json, sys, torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
model = HFLM(pretrained=sys.argv[1], dtype="float32", device="cpu", batch_size=1)
pairs = json.load(open(sys.argv[2]))
requests = [Instance("loglikelihood", {}, tuple(pair), number) for number, pair in enumerate(pairs)]
print(json.dumps([[float(score), bool(greedy)] for score, greedy in model.loglikelihood(requests, disable_tqdm=True)]))
"""

WINDOWS_IN_HARNESS = """
import json, sys
from lm_eval.models.huggingface import HFLM
model = HFLM(pretrained=sys.argv[1], dtype="float32", device="cpu", batch_size=1)
rows = [(("", ""), ids[:1], ids[1:]) for ids, _ in json.load(open(sys.argv[2]))]
print(json.dumps([float(score) for score, _ in model._loglikelihood_tokens(rows, disable_tqdm=True)]))
"""

TEXT = """
import json, sys
import numpy as np
from llama_cpp import Llama, llama_cpp
kind = llama_cpp.GGML_TYPE_F32
llama = Llama(sys.argv[1], n_ctx=512, verbose=False, logits_all=False, type_k=kind, type_v=kind, flash_attn=False)
found = []
for ids in json.loads(sys.argv[2]):
    llama.reset()
    new = []
    for token in llama.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):
        new.append(int(token))
        if len(new) == int(sys.argv[3]):
            break
    found.append(new)
print(json.dumps(found))
"""

IDS = """
import json, sys
from llama_cpp import Llama
llama = Llama(sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(open(sys.argv[2]))
print(json.dumps([llama.tokenize(text.encode(), add_bos=True, special=True) for text in texts]))
"""


def evaluated(capsys: Any, *args: object) -> dict[str, Any]:
    assert main(["eval", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"][0]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_logits_are_those_of_transformers(smollm2: Path, peer: Callable[..., Any], tmp_path: Path) -> None:
    opened = registry.open_any(smollm2).require_whole()
    tokenizer = opened.open_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(HARD.read_bytes().decode().split("carriage")[0])[:300]
    peer(LOGITS, smollm2, json.dumps(ids), tmp_path / "logits.pt")
    theirs = torch.load(tmp_path / "logits.pt")
    ours = conversion_check.logits(opened.model, opened.tensors, torch.tensor([ids]))[0]
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_ids_are_those_of_llama_cpp(smollm2: Path, peer: Callable[..., Any], tmp_path: Path) -> None:
    """transformers makes GPT-2's tokenizer of every GGUF with merges: it leaves digits together; SmolLM2 does not."""
    tokenizer = registry.open_any(smollm2).open_tokenizer()
    assert tokenizer is not None
    text = HARD.read_bytes().decode()
    texts = [text, *text.split("\n")]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    for text, theirs in zip(texts, peer(IDS, smollm2, tmp_path / "texts.json"), strict=True):
        assert tokenizer.encode_prompt(text) == theirs, text


def test_lambada(
    smollm2: Path, smollm2_folder: Path, peer: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers computes it from the same GGUF, and as lm-evaluation-harness does."""
    from gptworks.evaluate.tasks.lambada import encode_pair

    data = needed(CORPORA / "lambada" / "lambada_test.jsonl")
    each = tmp_path / "each.jsonl"
    options = ["--task", "lambada", "--protocol", "openai", "--data", data, "--limit", PASSAGES]
    found = evaluated(capsys, "--model", smollm2, *options, "--per-document", each)
    ours = [(row["log_probability"], row["greedy"]) for row in lines_of(each)]
    texts = [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines()[:PASSAGES]]
    pairs = [(before, f" {word}") for before, _, word in (text.rpartition(" ") for text in texts)]
    tokenizer = registry.open_any(smollm2).open_tokenizer()
    assert tokenizer is not None
    asked = [encode_pair(*pair, tokenizer) for pair in pairs]
    (tmp_path / "rows.json").write_text(json.dumps([[[*q.context, *q.target], len(q.target)] for q in asked]))
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    for theirs in (
        peer(SCORES, smollm2, tmp_path / "rows.json"),
        peer(HARNESS, smollm2_folder, tmp_path / "pairs.json"),
    ):
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        assert max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)) < 1e-3
    assert found["correct"] == sum(greedy for _, greedy in theirs) and found["total"] == len(texts)


def test_wikitext(
    smollm2: Path, smollm2_folder: Path, peer: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows of 1024 tokens, one after the other: as transformers scores them, and as lm-evaluation-harness does."""
    data = needed(CORPORA / "wikitext-2" / "wiki.test.raw")
    each = tmp_path / "each.jsonl"
    options = ["--task", "wikitext", "--protocol", "as-is", "--data", data, "--overlap", "none"]
    options += ["--limit", WINDOWS] if WINDOWS else []
    found = evaluated(
        capsys,
        "--model",
        smollm2,
        "-o",
        "model.max_positions=1024",
        *options,
        "--per-document",
        each,
        "--batch-size",
        1,
    )
    tokenizer = registry.open_any(smollm2).open_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(data.read_text(encoding="utf-8"))
    rows = [[ids[begin : begin + 1025], 1024] for begin in range(0, len(ids) - 1025, 1024)]
    rows = rows[:WINDOWS] if WINDOWS else rows
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    of_transformers = [score for score, _ in peer(SCORES, smollm2, tmp_path / "rows.json")]
    of_harness = peer(WINDOWS_IN_HARNESS, smollm2_folder, tmp_path / "rows.json")
    for theirs in (of_transformers, of_harness):
        ours = [row["log_probability"] for row in lines_of(each)][: len(theirs)]
        assert len(ours) == len(theirs)
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.05  # of thousands
        if WINDOWS:
            assert found["loss"] == pytest.approx(-sum(theirs) / (1024 * len(theirs)), abs=1e-5)


def differs_by_a_tie(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """Empty where texts are equal, or where the two tokens at the first difference are as likely, within rounding."""
    if ours == theirs:
        return ""
    place = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ours[:place]]]))[0, -1]
    gap = float(logits[ours[place]] - logits[theirs[place]])
    allowed = 2e-3 * float(logits.abs().max())
    return "" if abs(gap) <= allowed else f"token {place}: {ours[place]} and {theirs[place]}, {gap:.4f} apart"


def test_greedy_text_is_that_of_llama_cpp(
    smollm2: Path, smollm2_folder: Path, peer: Callable[..., Any], tmp_path: Path
) -> None:
    """100 tokens from 10 prompts: our engine, llama.cpp from F32 (GGUF -> GGUF), and from F16 (GGUF -> hf -> GGUF)."""
    model = PretrainedGPT.from_pretrained(smollm2)
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
    settings = {"strategy": "greedy", "max_new_tokens": 100, "ignore_eod": True}
    ours = [found.tokens for found in gptworks.generations(model, PROMPTS, **settings)]
    convert(smollm2, tmp_path / "f32.gguf", "gguf", dtype=torch.float32)
    convert(smollm2_folder, tmp_path / "f16.gguf", "gguf", dtype=torch.float16)
    equal = {}
    for name in ("f32", "f16"):
        theirs = peer(TEXT, tmp_path / f"{name}.gguf", json.dumps(prompts), 100)
        for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
            assert differs_by_a_tie(model, prompt, mine, other) == "", (name, model.tokenizer.decode(prompt))
        equal[name] = sum(mine == other for mine, other in zip(ours, theirs, strict=True))
    assert equal["f32"] >= 8, equal
