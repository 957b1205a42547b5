"""The real lm-evaluation-harness comes to our numbers on a local LAMBADA: with our model in its own process, and with
our server, which it asks as it asks any (`local-completions`). `make test-interop`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.evaluate.request import Request
from gptworks.evaluate.run import evaluate
from gptworks.evaluate.tasks.wikitext import detokenize
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

pytestmark = pytest.mark.interop

SOURCE = Path(__file__).resolve().parents[2] / "src"

# The rule of the harness's own task of this name, on a file that is here.
TASK = """\
task: local_lambada
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""

RULE = """
import os, sys, yaml
import lm_eval
task = yaml.safe_load(open(os.path.join(os.path.dirname(lm_eval.__file__), "tasks/lambada", sys.argv[1] + ".yaml")))
print(task["doc_to_text"], task["doc_to_target"], task["output_type"], sep="\\n")
"""

DETOKENIZE = """
import sys
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
sys.stdout.buffer.write(wikitext_detokenizer({"page": sys.stdin.buffer.read().decode()}).encode())
"""


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("GPTWORKS_LMEVAL_PYTHON")
    if not found:
        pytest.skip("GPTWORKS_LMEVAL_PYTHON is not set: the Python of an environment with lm_eval and gptworks's needs")
    return found


def run(python: str, *args: str | Path, cwd: Path, text: bytes = b"") -> bytes:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cwd / "cache")}
    environment = {**os.environ, **offline, "PYTHONPATH": str(SOURCE)}
    command = [python, *(str(arg) for arg in args)]
    done = subprocess.run(command, cwd=cwd, env=environment, input=text, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout


def write_model(path: Path, max_positions: int) -> Path:
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 50257, "max_positions": max_positions}
    cfg = ModelConfig.model_validate(shape)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.3), 2, seed=3))
    huggingface.save(path, cfg, dict(model.named_parameters()), eod_id=50256)
    Tokenizer.from_pretrained("gpt2").save(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), 96)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for every passage: what a client cuts off depends on what it knows of the server."""
    return write_model(tmp_path_factory.mktemp("long"), 256)


@pytest.fixture(scope="module")
def url(long_folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "gptworks", "serve", "--model", f"it={long_folder}", "--port", "0"]
    server = subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = None
        while found is None:
            line = server.stdout.readline()
            assert line, "the server has not started"
            found = re.search(r"http://\S+/v1", line)
        yield found[0]
    finally:
        server.terminate()
        server.communicate()


def passages(shared_data: Path, folder: Path, longest: int) -> list[str]:
    """Real ones, of which some end with what the model would say, so that not all are wrong."""
    import gptworks

    real = shared_data / "corpora" / "lambada" / "lambada_test.jsonl"
    texts = [json.loads(line)["text"] for line in real.read_text(encoding="utf-8").splitlines()[:60]]

    model = gptworks.GPT.from_pretrained(folder)
    changed = []
    for number, text in enumerate(texts):
        before = text.rsplit(" ", 1)[0]
        if number % 3 == 0:
            ids = model.tokenizer.encode(before)[-longest:]
            before = model.tokenizer.decode(ids)
            word = model.tokenizer.decode([int(model(torch.tensor([ids]))[0, -1].argmax())])
            text = before + word if word.startswith(" ") and word.strip() else text
        changed.append(text)
    return changed


def write_task(tmp_path: Path, texts: list[str]) -> Path:
    data = tmp_path / "lambada.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(data=data))
    return data


def results_of(python: str, command: list[str], tmp_path: Path) -> dict[str, Any]:
    """What the harness finds on the task that lies there."""
    places = ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out")]
    run(python, "-m", *command, "--tasks", "local_lambada", *places, cwd=tmp_path)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    return dict(json.loads(results.read_text())["results"]["local_lambada"])


def test_lambada_of_the_harness_equals_ours(python: str, folder: Path, shared_data: Path, tmp_path: Path) -> None:
    # Long ones are shortened, and one has no space before its last word.
    texts = [*passages(shared_data, folder, longest=90), "with the\ngloves", "Power"]
    data = write_task(tmp_path, texts)
    command = ["gptworks.evaluate.harness", "run", "--model", "gptworks", "--model_args", f"pretrained={folder}"]
    theirs = results_of(python, [*command, "--device", "cpu", "--batch_size", "5", "--log_samples"], tmp_path)
    per_document = tmp_path / "ours.jsonl"
    request = Request("lambada", str(data), protocol="openai", device="cpu", per_document=per_document)
    (row,) = evaluate([str(folder)], request)["rows"]
    assert row["shortened"] > 0 and 0 < row["correct"] < row["total"] == len(texts)
    assert theirs["acc,none"] == pytest.approx(row["accuracy"], abs=1e-12)
    assert theirs["perplexity,none"] == pytest.approx(row["target_perplexity"], rel=1e-6)
    (samples,) = (tmp_path / "out").rglob("samples_local_lambada_*.jsonl")
    ours = [json.loads(line) for line in per_document.read_text().splitlines()[1:]]
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        (found,) = sample["filtered_resps"]
        total, greedy = found
        assert float(total) == pytest.approx(ours[sample["doc_id"]]["log_probability"], abs=1e-4)
        assert str(greedy) == str(ours[sample["doc_id"]]["greedy"])


@pytest.mark.parametrize("as_tokens", [True, False])
def test_lambada_through_the_server_equals_ours(
    python: str, long_folder: Path, url: str, shared_data: Path, tmp_path: Path, as_tokens: bool
) -> None:
    texts = passages(shared_data, long_folder, longest=250)
    data = write_task(tmp_path, texts)
    settings = f"model=it,base_url={url}/completions,tokenizer_backend=huggingface,tokenizer={long_folder}"
    settings += f",max_length=255,num_concurrent=4,max_retries=1,tokenized_requests={as_tokens}"
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", settings, "--batch_size", "3"]
    theirs = results_of(python, command, tmp_path)
    (row,) = evaluate([str(long_folder)], Request("lambada", str(data), protocol="openai", device="cpu"))["rows"]
    assert 0 < row["correct"] < row["total"] == len(texts) and not row["shortened"]
    assert theirs["acc,none"] == pytest.approx(row["accuracy"], abs=1e-12)
    assert theirs["perplexity,none"] == pytest.approx(row["target_perplexity"], rel=1e-5)


@pytest.mark.parametrize("name", ["lambada_openai", "lambada_standard"])
def test_the_rule_above_is_the_rule_of_the_harness(python: str, name: str, tmp_path: Path) -> None:
    rule = run(python, "-c", RULE, name, cwd=tmp_path).decode().splitlines()
    ours = TASK.format(data="x")
    assert rule[2] == "loglikelihood"
    assert all(f'"{line}"' in ours for line in rule[:2])


def test_the_detokenizer_of_the_harness_is_ours(python: str, shared_data: Path, tmp_path: Path) -> None:
    text = (shared_data / "corpora" / "wikitext-2" / "wiki.test.tokens").read_bytes()
    assert run(python, "-c", DETOKENIZE, cwd=tmp_path, text=text).decode() == detokenize(text.decode())
