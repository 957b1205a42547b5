"""WikiText and LAMBADA against the same numbers computed with transformers, text by text and token by token."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from gptworks.evaluate.request import Request
from gptworks.evaluate.run import evaluate
from gptworks.evaluate.tasks import lambada
from gptworks.evaluate.tasks.wikitext import detokenize
from gptworks.tokenizer import Tokenizer

LENGTH, LIMIT = 64, 40


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_pretrained("gpt2")


@pytest.fixture(scope="module")
def random_model(
    hf_folder: Callable[..., tuple[Path, GPT2LMHeadModel]], gpt2: Tokenizer
) -> tuple[Path, GPT2LMHeadModel]:
    """GPT-2's vocabulary and weights that matter."""
    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    folder, model = hf_folder(vocab_size=50257, n_positions=LENGTH, n_layer=2, **ends)
    gpt2.save(folder)
    return folder, model


@torch.no_grad()
def log_probabilities(model: GPT2LMHeadModel, ids: list[int]) -> torch.Tensor:
    """[place, token]: of what comes after each place; one text at a time, no padding."""
    return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def theirs_on_wikitext(model: GPT2LMHeadModel, ids: list[int], length: int, overlap: int) -> float:
    """Sum of -log p: window k begins at k x overlap; each target counts in the first window that has it."""
    nats, done, start = 0.0, 0, 0
    while done < len(ids) - 1:
        window = ids[start : start + length + 1]
        found = log_probabilities(model, window[:-1])
        for place in range(done - start, len(window) - 1):
            nats -= found[place, window[place + 1]].item()
        done = start + len(window) - 1
        start += overlap
    return nats


@pytest.mark.parametrize("overlap", [32, 48, None])
def test_wikitext_perplexity(
    overlap: int | None, random_model: tuple[Path, GPT2LMHeadModel], gpt2: Tokenizer, shared_data: Path, tmp_path: Path
) -> None:
    folder, model = random_model
    # From the middle of a real file, so that headings, numbers and quotes are in it.
    text = (shared_data / "corpora" / "wikitext-2" / "wiki.valid.tokens").read_text(encoding="utf-8")[5000:9000]
    (tmp_path / "slice.tokens").write_text(text, encoding="utf-8")
    request = Request(
        "wikitext", str(tmp_path / "slice.tokens"), settings={"overlap": overlap}, batch_size=3, device="cpu"
    )
    (row,) = evaluate([str(folder)], request)["rows"]
    ids = gpt2.encode(detokenize(text))
    nats = theirs_on_wikitext(model, ids, LENGTH, overlap or LENGTH)
    loss = nats / (len(ids) - 1)
    words = len(text.strip().split(" "))
    assert row["tokens"] == len(ids) - 1 > 10 * LENGTH
    assert nats / (words - 1) < 20, "else perplexities are cut off and nothing is compared"
    assert row["loss"] == pytest.approx(loss, rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(min(20, loss)), rel=1e-4)
    assert row["token_ratio"] == (len(ids) - 1) / (words - 1)
    assert row["adjusted_perplexity"] == pytest.approx(math.exp(min(20, nats / (words - 1))), rel=1e-4)


def theirs_on_lambada(model: GPT2LMHeadModel, text: str, tokenizer: Tokenizer, protocol: str) -> tuple[float, bool]:
    if protocol == "strict":
        word = text.split()[-1]
        before, target = tokenizer.encode(text[: text.rfind(word)].strip()), tokenizer.encode(" " + word)
    elif protocol == "last-token":
        *before, last = tokenizer.encode(text)
        target = [last]
    else:
        first, last_word = text.rsplit(" ", 1)
        before = tokenizer.encode(first.rstrip())
        target = tokenizer.encode(first + " " + last_word)[len(before) :]
    ids = (before + target)[-(model.config.n_positions + 1) :]
    found = log_probabilities(model, ids[:-1])[-len(target) :]
    summed = sum(found[place, token].item() for place, token in enumerate(target))
    return summed, found.argmax(-1).tolist() == target


def compare(
    folder: Path, model: GPT2LMHeadModel, data: Path, protocol: str, out: Path, tokenizer: Tokenizer
) -> dict[str, Any]:
    request = Request(
        "lambada", str(data), protocol=protocol, limit=LIMIT, batch_size=7, device="cpu", per_document=out
    )
    (row,) = evaluate([str(folder)], request)["rows"]
    lines = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    texts = lambada.read_passages(data, LIMIT)
    theirs = [theirs_on_lambada(model, text, tokenizer, protocol) for text in texts]
    assert len(lines) == len(theirs)
    for line, (summed, right) in zip(lines, theirs, strict=True):
        assert line["log_probability"] == pytest.approx(summed, abs=1e-4)
        assert line["greedy"] is right
    assert row["correct"] == sum(right for _, right in theirs)
    assert row["accuracy"] == row["correct"] / len(theirs)
    assert row["target_perplexity"] == pytest.approx(math.exp(-np.mean([s for s, _ in theirs])), rel=1e-4)
    return row


@pytest.fixture(scope="module")
def long_model(hf_folder: Callable[..., tuple[Path, GPT2LMHeadModel]], gpt2: Tokenizer) -> tuple[Path, GPT2LMHeadModel]:
    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    # Smaller logits: sums of a few tokens that are compared to 1e-4 must not be thousands.
    folder, model = hf_folder(vocab_size=50257, n_positions=256, n_layer=2, **ends)
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(0.1)
    model.save_pretrained(folder)
    gpt2.save(folder)
    return folder, model


@pytest.mark.parametrize("protocol", ["strict", "last-token", "openai"])
def test_real_lambada_passages(
    protocol: str, long_model: tuple[Path, GPT2LMHeadModel], gpt2: Tokenizer, shared_data: Path, tmp_path: Path
) -> None:
    data = shared_data / "corpora" / "lambada" / "lambada_test.jsonl"
    compare(*long_model, data, protocol, tmp_path / "out.jsonl", gpt2)


# A model that knows some of the words


NAMES = ["Anna", "Tom", "Mei", "Henrik", "Shane", "Preston"]
THINGS = ["statuette", "lantern", "key", "letter", "gloves", "harmonium"]


def passages() -> list[str]:
    texts = []
    for number in range(40):
        name, thing = NAMES[number % 6], THINGS[(number * 5 + number // 6) % 6]
        break_before = "\n" if number % 5 == 4 else " "
        texts.append(f"{number}: {name} found the {thing} by the river. They gave {name} the{break_before}{thing}")
    return texts


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory, hf_model: Callable[..., GPT2LMHeadModel]) -> Any:
    """Trained by transformers on some of the passages until it knows most of them; (folder, model, data, tokenizer)."""
    folder = tmp_path_factory.mktemp("overfitted")
    texts = passages()
    tokenizer = Tokenizer.train(texts[:8], 300)
    torch.manual_seed(0)
    model = hf_model(vocab_size=300, n_positions=96, n_layer=2, n_embd=64, bos_token_id=299, eos_token_id=299)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)
    rows = [tokenizer.encode(text) for text in texts[::2]]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [299] * (longest - len(row)) for row in rows])
    labels = ids.masked_fill(ids == 299, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save(folder)
    data = folder / "passages.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder, model, data, tokenizer


@pytest.mark.slow
def test_protocols_differ_on_a_model_that_knows_some_words(overfitted: Any, tmp_path: Path) -> None:
    folder, model, data, tokenizer = overfitted
    rows = {
        protocol: compare(folder, model, data, protocol, tmp_path / f"{protocol}.jsonl", tokenizer)
        for protocol in ("strict", "last-token", "openai")
    }
    assert 0.2 <= rows["strict"]["accuracy"] <= 0.95
    assert len({row["accuracy"] for row in rows.values()}) == 3
    assert len({round(row["target_perplexity"], 3) for row in rows.values()}) == 3
