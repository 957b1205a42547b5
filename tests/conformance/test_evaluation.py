"""Evaluation as the documents promise it. Rows of the conformance list: S1-14, S2-07, S2-08."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptworks.checkpoint.systems import huggingface
from gptworks.cli.main import main
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.evaluate.tasks.wikitext import detokenize
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

Say = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Say:
    """What a command prints; in this process, because each new one imports torch for seconds."""

    def run(*args: str | Path) -> str:
        assert main([str(arg) for arg in args]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_pretrained("gpt2")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, gpt2: Tokenizer) -> tuple[Path, GPT]:
    """A folder of weights with GPT-2's vocabulary, small enough for all of LAMBADA."""
    folder = tmp_path_factory.mktemp("weights")
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 50257, "max_positions": 256}
    cfg = ModelConfig.model_validate(shape)
    model = build_gpt(
        cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.5), 1, seed=7)
    ).eval()
    huggingface.save(folder, cfg, dict(model.named_parameters()), eod_id=50256)
    gpt2.save(folder)
    return folder, model


@torch.no_grad()
def losses(model: GPT, ids: list[int]) -> list[float]:
    found = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return [-found[place, token].item() for place, token in enumerate(ids[1:])]


@pytest.mark.slow
def test_s2_07_wikitext_perplexity(
    weights: tuple[Path, GPT], gpt2: Tokenizer, shared_data: Path, tmp_path: Path, said: Say
) -> None:
    folder, model = weights
    text = (shared_data / "corpora" / "wikitext-2" / "wiki.valid.tokens").read_text(encoding="utf-8")[:3500]
    data = tmp_path / "wiki.valid.tokens"
    data.write_text(text, encoding="utf-8")
    command = ["eval", "--model", folder, "--task", "wikitext", "--data", data, "--overlap", "32"]
    result = json.loads(said(*command, "--json"))
    assert result["protocol"] == "wikitext, sliding window, overlap 32, detokenized (Megatron)"
    (row,) = result["rows"]
    ids = gpt2.encode(detokenize(text))
    nats = sum(losses(model, ids[:257]))
    for begin in range(32, len(ids) - 256 - 1 + 32, 32):
        nats += sum(losses(model, ids[begin : begin + 257])[224:])
    words = len(text.strip().split(" ")) - 1
    assert row["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-4)
    assert row["adjusted_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-4)
    assert row["token_ratio"] == (len(ids) - 1) / words
    *_, last = said(*command, "--log-style", "fleetx").splitlines()
    number = r"\d\.\d{4}E[+-]\d\d"
    shape = rf" validation results on (\S+) \| avg loss: {number} \| ppl: {number} \| adjusted ppl: ({number}) \| "
    match = re.search(shape + r"token ratio: (\S+) \|$", last)
    assert match and match[1] == str(data)
    assert float(match[2]) == pytest.approx(row["adjusted_perplexity"], rel=1e-4)
    assert float(match[3]) == row["token_ratio"]


@pytest.mark.slow
def test_s2_08_lambada_accuracy(
    weights: tuple[Path, GPT], gpt2: Tokenizer, shared_data: Path, tmp_path: Path, said: Say
) -> None:
    """All 5,153 passages; every protocol on some of them."""
    folder, model = weights
    data, out = shared_data / "corpora" / "lambada" / "lambada_test.jsonl", tmp_path / "words.jsonl"
    command = ["eval", "--model", folder, "--task", "lambada", "--data", data]
    strict = [*command, "--batch-size", "64", "--per-document", out]
    first, *_, last = said(*strict, "--log-style", "fleetx").splitlines()
    stamp = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[    INFO\] - "
    assert re.fullmatch(stamp + r"step 0, batch: 0, number correct: \d+\.\d{6}, speed: \d+\.\d\d step/s", first)
    row = json.loads(said(*strict, "--json"))["rows"][0]  # read from the file: nothing is computed again
    assert row["total"] == 5153
    assert row["accuracy"] == row["correct"] / 5153
    assert re.match(stamp, last)
    assert last.endswith(
        f" -  validation results on {data} | number correct: {row['correct']:.4E} | total examples: 5.1530E+03 | "
        f"avg accuracy: {row['accuracy']:.4E}"
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    texts = [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines()]
    for number in range(0, 5153, 500):
        word = texts[number].split()[-1]
        target = gpt2.encode(" " + word)
        ids = gpt2.encode(texts[number][: texts[number].rfind(word)].strip()) + target
        expected = -sum(losses(model, ids)[-len(target) :])
        assert lines[number]["log_probability"] == pytest.approx(expected, abs=1e-4)
    for protocol in ("last-token", "openai", "standard"):
        got = json.loads(said(*command, "--protocol", protocol, "--limit", "20", "--json"))
        assert got["protocol"].startswith(f"{protocol}: ") and got["rows"][0]["total"] == 20


def test_s1_14_lambada_cloze_beside_published_figures(
    weights: tuple[Path, GPT], shared_data: Path, said: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shared_data / "corpora" / "lambada" / "lambada_test.jsonl"
    command = ["eval", "--model", weights[0], "--task", "lambada", "--data", data, "--limit", "10", "--published"]
    result = json.loads(said(*command, "--json"))
    published = {(each["model"], each["metric"]): each for each in result["published"]}
    oneflow = published["OneFlow 117M, 500k iterations", "accuracy"]
    assert round(oneflow["value"], 5) == 0.26106 and oneflow["source"].startswith("OneFlow")
    assert round(published["GPT-2 124M (gpt2-en)", "accuracy"]["value"], 5) == 0.32564
    monkeypatch.setenv("COLUMNS", "250")
    shown = said(*command)
    assert "published, not reproduced here" in shown and "26.106%" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "file", "key"), [("wikitext", "wiki.tokens", "loss"), ("lambada", "l.jsonl", "accuracy")]
)
def test_s2_07_and_s2_08_from_python(task: str, file: str, key: str, weights: tuple[Path, GPT], tmp_path: Path) -> None:
    """`gptworks.evaluate` gives what the command line prints."""
    import gptworks
    from gptworks.evaluate.request import Request
    from gptworks.evaluate.run import evaluate

    text = "the cat sat on the mat and the dog lay by the door"
    lines = {"wiki.tokens": f" \n = Pets = \n \n {text} \n" * 8, "l.jsonl": json.dumps({"text": text}) + "\n"}
    (tmp_path / file).write_text(lines[file])
    model, _ = weights
    found = gptworks.evaluate(model, tmp_path / file, task=task, batch_size=2)
    expected = evaluate([str(model)], Request(task=task, data=str(tmp_path / file)))
    assert found["rows"][0][key] == pytest.approx(expected["rows"][0][key], rel=1e-6)
    assert found["protocol"] == expected["protocol"]
