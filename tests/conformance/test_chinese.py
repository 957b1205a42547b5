"""Chinese GPT (gpt-cn, GPT-CPM): its sentencepiece model with CPM's rules. Row X-02 of the conformance list."""

import json
from pathlib import Path

import pytest

from gptworks.cli.main import main
from gptworks.data.store import Store
from gptworks.tokenizer import Tokenizer

pytest.importorskip("sentencepiece", reason="sentencepiece (extra interop) is not installed")
pytest.importorskip("jieba", reason="jieba (extra interop) is not installed")

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "cpm" / "ids.json").read_text(encoding="utf-8"))


@pytest.fixture
def vocabulary(shared_data: Path) -> Path:
    return shared_data / "vocab" / "cpm-zh" / "chinese_vocab.model"


def test_x_02_ids_equal_paddlenlps(vocabulary: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(vocabulary)
    for recorded in RECORDED["texts"]:
        assert tokenizer.encode(recorded["text"]) == recorded["ids"], recorded["name"]
    assert tokenizer.eod_id == RECORDED["eod_id"]


def test_x_02_chinese_text_to_a_model_that_writes(
    vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [recorded for recorded in RECORDED["texts"] if recorded["ids"]]
    corpus, prefix, run = tmp_path / "zh.jsonl", tmp_path / "zh", tmp_path / "run"
    lines = [json.dumps({"text": recorded["text"]}, ensure_ascii=False) for recorded in texts]
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(["prepare", str(corpus), "--tokenizer", str(vocabulary), "--append-eod", "--out", str(prefix)]) == 0
    store = Store(prefix)
    expected = [i for recorded in texts for i in [*recorded["ids"], RECORDED["eod_id"]]]
    assert store.tokens[:].tolist() == expected
    assert (tmp_path / "zh.tokenizer.model").read_bytes() == vocabulary.read_bytes()
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 30000, "max_positions": 16}
    model = [f"model.{key}={value}" for key, value in shape.items()]
    settings = ["run.device=cpu", "batch.global_size=2", "train.steps=1", "data.split=80,20"]
    assert main(["train", "--out", str(run), f"data.path={prefix}", *model, *settings]) == 0
    # The checkpoint brings the tokenizer along.
    capsys.readouterr()
    assert main(["generate", "--model", str(run), "--prompt", "我们在北京", "--max-new-tokens", "3"]) == 0
    assert "我们在北京" in capsys.readouterr().out
    [portable] = run.glob("checkpoints/step-*/portable")
    assert Tokenizer.from_pretrained(portable).identity == Tokenizer.from_pretrained(vocabulary).identity
