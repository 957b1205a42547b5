"""Lists of texts in Python learn their tokenizer as files do, whatever is beside them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks as gw
from gptworks.data.store import Store
from gptworks.errors import ConfigError, UsageError

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 300, "max_positions": 6}
FEW: dict[str, Any] = {"train": {"steps": 2, "log_every": 1}, "batch": {"global_size": 2}, "run": {"device": "cpu"}}
TEXTS = [f"On {day} morning {who} found a map." for day in ("Monday", "Friday") for who in ("Anna", "Tom", "Mei")] * 4


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tokenizers_of(out: str) -> set[str]:
    stores = sorted(Path(out).glob(".inputs/*.bin"))
    return {Store(store.with_suffix("")).load_tokenizer().identity for store in stores}  # type: ignore[union-attr]


def test_a_list_learns_a_vocabulary_that_fits_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = gw.Trainer(model=SHAPE, train_dataset=TEXTS, out="run", **FEW)
    trainer.train()
    said = capsys.readouterr().out
    assert (
        "data:  train_dataset: 24 documents, " in said and "learned from the text, prepared as run/.inputs/path" in said
    )
    tokenizer = trainer.model.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size <= 300
    file = Path("same.txt")
    file.write_text("\n\n".join(TEXTS))
    of_file = gw.Trainer(model=SHAPE, train_dataset="same.txt", out="file", **FEW)
    of_file.train()
    assert of_file.model.tokenizer is not None and of_file.model.tokenizer.identity == tokenizer.identity
    assert trainer.evaluate().tokens > 0


def test_lists_of_dictionaries_and_of_characters() -> None:
    pairs = [{"prompt": text[:20], "completion": text[20:30]} for text in TEXTS]
    gw.Trainer(model={**SHAPE, "max_positions": 64}, train_dataset=pairs, out="pairs", **FEW).train()
    ways: list[dict[str, Any]] = [{"data": {"tokenizer": "chars"}}, {"tokenizer": "chars"}]
    for number, named in enumerate(ways):
        letters = gw.Trainer(model=SHAPE, train_dataset=TEXTS, out=f"letters{number}", **named, **FEW)
        letters.train()
        tokenizer = letters.model.tokenizer
        assert tokenizer is not None and tokenizer.vocab_size == len(set("".join(TEXTS))) + 1


@pytest.mark.slow
@pytest.mark.parametrize("train", ["list", "file", "store"])
@pytest.mark.parametrize("evaluated", ["list", "file"])
def test_held_out_data_does_not_change_the_tokenizer(train: str, evaluated: str) -> None:
    def given(kind: str, name: str, texts: list[str]) -> Any:
        if kind == "list":
            return texts
        Path(f"{name}.txt").write_text("\n\n".join(texts))
        return f"{name}.txt"

    alone = gw.Trainer(model=SHAPE, train_dataset=given("file", "train", TEXTS), out="alone", **FEW)
    alone.train()
    data = "alone/.inputs/train" if train == "store" else given(train, "train", TEXTS)
    both = gw.Trainer(
        model=SHAPE,
        train_dataset=data,
        eval_dataset=given(evaluated, "other", ["Zoë found it."] * 9),
        out="both",
        **FEW,
    )
    both.train()
    assert tokenizers_of("both") == tokenizers_of("alone") and both.evaluate().tokens > 0


def test_the_tokenizer_of_a_run() -> None:
    first = gw.Trainer(model=SHAPE, train_dataset=TEXTS, out="first", **FEW)
    first.train()
    second = gw.Trainer(model=SHAPE, train_dataset=["Mei found Tom."] * 30, tokenizer="first", out="second", **FEW)
    second.train()
    assert first.model.tokenizer is not None and second.model.tokenizer is not None
    assert second.model.tokenizer.identity == first.model.tokenizer.identity
    step = gw.Tokenizer.from_pretrained("first/checkpoints/step-00000002")
    assert step.identity == first.model.tokenizer.identity
    Path("empty/checkpoints").mkdir(parents=True)
    with pytest.raises(gw.GPTWorksError, match="empty: no tokenizer in this folder"):
        gw.Tokenizer.from_pretrained("empty")


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    with pytest.raises(UsageError, match=r"tokenizer gpt2 has 50,257 tokens, but model.vocab_size is 300"):
        gw.Trainer(model=SHAPE, train_dataset=TEXTS, tokenizer="gpt2", out="run", **FEW).train()
    assert not Path("run").exists()
    with pytest.raises(gw.GPTWorksError, match=r"GPT.from_config: the tokenizer gpt2 has 50,257 tokens.* is 100"):
        gw.GPT.from_config({**SHAPE, "vocab_size": 100}, tokenizer="gpt2")


def test_one_text_is_held_out_of(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = gw.Trainer(model=SHAPE, train_dataset=[" ".join(TEXTS * 4)], out="run", **FEW)
    trainer.train()
    assert "data:  1 document cannot be divided as data.split asks: the text is cut by" in capsys.readouterr().out
    assert trainer.evaluate().tokens > 0


def test_a_fresh_model_without_a_tokenizer_says_how_it_gets_one() -> None:
    with pytest.raises(gw.GPTWorksError) as error:
        gw.generate(gw.GPT.from_config(SHAPE), "Anna")
    assert 'GPT.from_config(..., tokenizer="gpt2")' in str(error.value) and "loaded" not in str(error.value)
    trainer = gw.Trainer(model=gw.GPT.from_config(SHAPE), train_dataset=TEXTS, out="run", **FEW)
    trainer.train()
    assert trainer.model.tokenizer is not None


ROWS = [{"title": f"Soup {number}", "steps": text, "minutes": number} for number, text in enumerate(TEXTS)]


def test_dictionaries_with_keys_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """As the columns of a file: the same documents, and the same in evaluate."""
    for key in ("title,steps", "steps"):
        joined = [str(row["steps"]) if key == "steps" else f"{row['title']}\n{row['steps']}" for row in ROWS]
        named = gw.Trainer(model=SHAPE, train_dataset=ROWS, eval_dataset=ROWS[:4], data={"key": key}, out=key, **FEW)
        plain = gw.Trainer(model=SHAPE, train_dataset=joined, eval_dataset=joined[:4], out=f"{key} plain", **FEW)
        assert named.train().held_out_loss == plain.train().held_out_loss
        assert gw.evaluate(named.model, ROWS[:4], key=key).loss == gw.evaluate(plain.model, joined[:4]).loss
    assert "data:  train_dataset: 24 documents, " in capsys.readouterr().out


def test_what_is_said_of_keys_that_are_not_there() -> None:
    with pytest.raises(UsageError, match=r'or choose some: data=\{"key": "title,steps"\}\.$'):
        gw.Trainer(model=SHAPE, train_dataset=ROWS, out="run", **FEW)
    with pytest.raises(
        UsageError, match=r"train_dataset: item 1 has no key 'stps'\. Its keys: title, steps, minutes\.$"
    ):
        gw.Trainer(model=SHAPE, train_dataset=ROWS, data={"key": "title,stps"}, out="run", **FEW)
    with pytest.raises(UsageError, match=r"item 1 has 0 under 'minutes', which is not text"):
        gw.Trainer(model=SHAPE, train_dataset=ROWS, data={"key": "minutes"}, out="run", **FEW)
    with pytest.raises(UsageError, match=r"item 2 is 'a text', which has no key 'steps'"):
        gw.Trainer(model=SHAPE, train_dataset=[ROWS[0], "a text"], data={"key": "steps"}, out="run", **FEW)
    with pytest.raises(UsageError, match=r'or choose some: key="title,steps"\.$'):
        gw.evaluate("none", ROWS)


def test_habits_from_the_trainer_of_hugging_face() -> None:
    with pytest.raises(ConfigError) as wrong:
        gw.Trainer(preset="tiny", train_dataset=TEXTS, max_steps=6, learning_rate=3e-4)
    assert [problem.partition(" (")[0] for problem in wrong.value.problems] == [
        "max_steps: unknown key; did you mean train={'steps': ...}?",
        "learning_rate: unknown key; did you mean optim={'lr': ...}?",
    ]
    assert gw.Trainer(preset="tiny", train_dataset=TEXTS).config.model == gw.load_config(preset="tiny").model
    trainer = gw.Trainer(model=SHAPE, train_dataset=TEXTS, out="run", **FEW)
    trainer.train()
    trainer.save_model("mine")
    saved = gw.GPT.from_pretrained("mine").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())
