"""What a newcomer tries in Python: fresh models, saving, whole texts, seeds, observers, lists of dictionaries."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks as gw
from gptworks.config.schema import RunFolderConfig
from gptworks.data.store import Store
from gptworks.errors import ConfigError, DataError, GenerationError, UsageError
from gptworks.evaluate.heldout import HeldOut
from gptworks.python_words import command_line

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512, "max_positions": 16}
FEW: dict[str, Any] = {"train": {"steps": 4, "log_every": 2}, "batch": {"global_size": 2}, "run": {"device": "cpu"}}
TEXTS = [f"On {day} morning {who} found a map." for day in ("Monday", "Friday") for who in ("Anna", "Tom", "Mei")] * 3


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(small_tokenizer: gw.Tokenizer) -> gw.GPT:
    return gw.GPT.from_config(SHAPE, tokenizer=small_tokenizer)


def same_weights(a: gw.GPT, b: gw.GPT) -> bool:
    other = dict(b.named_parameters())
    return all(torch.equal(parameter, other[name]) for name, parameter in a.named_parameters())


# Fresh models


@pytest.mark.parametrize("shape", [gw.ModelConfig(**SHAPE), SHAPE])
def test_a_fresh_model_is_what_training_begins_with(shape: Any, small_store: Path) -> None:
    settings = FEW | {"optim": {"lr": 0.0}, "train": {"steps": 1, "seed": 77}}
    trainer = gw.Trainer(model=SHAPE, train_dataset=small_store, out="runs/a", **settings)
    trainer.train()
    assert same_weights(gw.GPT.from_config(shape, seed=77), trainer.model)
    assert not same_weights(gw.GPT.from_config(shape), trainer.model)


def test_a_preset_by_name_and_what_is_wrong_with_a_shape() -> None:
    assert gw.GPT.from_config("tiny-4k").cfg == gw.load_config(preset="tiny-4k").model
    with pytest.raises(ConfigError, match=r"ModelConfig: 1 problem\n  model\.num_heads: 3 does not divide"):
        gw.ModelConfig(hidden_size=16, num_heads=3)
    with pytest.raises(ConfigError, match=r"model\.num_layer: unknown key; did you mean 'num_layers'"):
        gw.ModelConfig(num_layer=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"RunFolderConfig: 1 problem\n  run\.threads: "):
        RunFolderConfig(threads=-1)
    with pytest.raises(ConfigError, match=r"model\.layers: unknown key"):
        gw.GPT.from_config({"layers": 2})
    with pytest.raises(gw.GPTWorksError, match="enormous"):
        gw.GPT.from_config("enormous")


# Saving


def test_saved_weights_are_read_by_us_and_by_transformers(model: gw.GPT, own_folder: Path) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    model.save_pretrained("mine")
    again = gw.GPT.from_pretrained("mine")
    assert same_weights(again, model) and again.tokenizer is not None and model.tokenizer is not None
    assert again.tokenizer.identity == model.tokenizer.identity
    tokens = torch.tensor([[5, 300, 7]])
    theirs = GPT2LMHeadModel.from_pretrained("mine").eval()
    torch.testing.assert_close(model(tokens), theirs(tokens).logits)
    assert AutoTokenizer.from_pretrained("mine").encode("Anna found") == model.tokenizer.encode("Anna found")
    model.save_pretrained("mine")  # and again over it
    assert same_weights(gw.GPT.from_pretrained("mine"), model)


def test_where_nothing_is_saved(model: gw.GPT, small_store: Path) -> None:
    gw.Trainer(model=SHAPE, train_dataset=small_store, out="run", **FEW).train()
    before = sorted(path.name for path in Path("run").iterdir())
    with pytest.raises(UsageError, match="save_pretrained: run is the folder of a run"):
        model.save_pretrained("run")
    assert sorted(path.name for path in Path("run").iterdir()) == before
    Path("file").write_text("mine")
    with pytest.raises(UsageError, match="save_pretrained: file is a file"):
        model.save_pretrained("file")
    small = gw.GPT.from_pretrained("run", weights="int8")
    with pytest.raises(UsageError, match='Load it with weights="fp32"'):
        small.save_pretrained("other")
    assert not Path("other").exists()


# Texts and seeds


def test_each_call_draws_anew_unless_a_seed_is_given(model: gw.GPT) -> None:
    prompt, settings = "Anna", {"max_new_tokens": 8}
    assert len({gw.generate(model, prompt, **settings)[0] for _ in range(4)}) > 1
    (first,) = gw.generations(model, prompt, **settings)
    assert gw.generations(model, prompt, seed=first.seed, **settings) == [first]
    assert gw.generate(model, prompt, seed=3, **settings) == gw.generate(model, prompt, seed=3, **settings)
    write = gw.pipeline(model=model, **settings)
    assert len({str(write(prompt)) for _ in range(4)}) > 1
    assert write(prompt, seed=5) == write(prompt, seed=5) == gw.pipeline(model=model, seed=5, **settings)(prompt)


def test_a_trained_model_draws_anew_too(small_store: Path, small_tokenizer: gw.Tokenizer) -> None:
    trainer = gw.Trainer(model=SHAPE, train_dataset=small_store, out="run", **FEW)
    trainer.train()
    assert len({str(trainer.predict("Anna", max_new_tokens=8)) for _ in range(4)}) > 1
    write = gw.pipeline(model="run", device="cpu", max_new_tokens=8)
    assert len({str(write("Anna")) for _ in range(4)}) > 1
    fixed = gw.Trainer(model="run", generate={"seed": 9}, run={"device": "cpu"})
    assert fixed.predict("Anna", max_new_tokens=8) == fixed.predict("Anna", max_new_tokens=8)


def test_with_the_prompt_or_without(model: gw.GPT) -> None:
    settings: dict[str, Any] = {"strategy": "greedy", "max_new_tokens": 4}
    (text,) = gw.generate(model, "Anna", **settings)
    assert gw.generate(model, "Anna", return_full_text=True, **settings) == ["Anna" + text]
    write = gw.pipeline(model=model, **settings)
    assert write("Anna") == write("Anna", return_full_text=True) == [{"text_generation_text": ["Anna" + text]}]
    assert write("Anna", return_full_text=False) == [{"text_generation_text": [text]}]
    assert gw.pipeline(model=model, return_full_text=False, **settings)("Anna") == [{"text_generation_text": [text]}]
    with pytest.raises(UsageError, match="return_full_text: got 'no'"):
        write("Anna", return_full_text="no")


# Words


def test_errors_name_keywords_in_python_and_options_on_the_command_line(model: gw.GPT) -> None:
    def error(**settings: Any) -> str:
        with pytest.raises(gw.GPTWorksError) as caught:
            gw.generate(model, "Anna", **settings)
        return str(caught.value)

    assert 'window="slide"' in error(max_new_tokens=99) and "--" not in error(max_new_tokens=99)
    assert error(top_k=600).startswith("top_k: 600 is above the vocabulary")
    assert error(temperature=0).endswith("strategy: greedy.") and "generate.temperature" not in error(temperature=0)
    with command_line():
        assert "--window slide" in error(max_new_tokens=99) and error(top_k=600).startswith("generate.top_k")
    with pytest.raises(GenerationError, match='window="slide"'):
        gw.pipeline(model=model)("Anna", max_new_tokens=99)


def test_errors_of_a_trainer_name_its_keywords(small_store: Path) -> None:
    trainer = gw.Trainer(model=SHAPE, train_dataset=small_store, out="run", **FEW)
    trainer.train()
    with pytest.raises(UsageError, match=r'Go on with resume="auto", or choose another out=\.'):
        trainer.train()
    with pytest.raises(UsageError, match=r"^protocol=: lambada has none called 'x'"):
        Path("l.jsonl").write_text('{"text": "a b"}\n')
        gw.evaluate("run", "l.jsonl", task="lambada", protocol="x")


def test_what_held_out_shows() -> None:
    found = HeldOut(nats=20.0, tokens=10, text_bytes=40, samples=2)
    assert repr(found) == "HeldOut(loss=2.0000, perplexity=7.3891, bits_per_byte=0.7213, tokens=10, samples=2)"
    assert repr(HeldOut(20.0, 10, 0, 2)) == "HeldOut(loss=2.0000, perplexity=7.3891, tokens=10, samples=2)"


# Observers


def test_callbacks_see_what_is_logged_and_change_nothing(small_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = SHAPE | {"dropout_hidden": 0.2}
    settings = FEW | {"evaluate": {"every": 2}, "data": {"split": "80,20"}}
    plain = gw.Trainer(model=shape, train_dataset=small_store, out="runs/plain", **settings)
    plain.train()
    seen: list[dict[str, Any]] = []

    def meddle(line: dict[str, Any]) -> None:
        line.clear()
        torch.manual_seed(0)
        torch.rand(3)

    def fail(line: dict[str, Any]) -> None:
        raise ValueError("not today")

    watched = gw.Trainer(
        model=shape, train_dataset=small_store, out="runs/watched", callbacks=[meddle, fail, seen.append], **settings
    )
    watched.train()
    assert same_weights(watched.model, plain.model)
    lines = [json.loads(line) for line in Path("runs/watched/metrics.jsonl").read_text().splitlines()]
    assert seen == lines and {line["step"] for line in seen} == {2, 4}
    assert any("loss" in line for line in seen) and any("held_out_loss" in line for line in seen)
    said = capsys.readouterr().err
    assert said.count("ValueError: not today") == 1 and "fail failed and is not called again" in said
    with pytest.raises(UsageError, match="callbacks: got 7"):
        gw.Trainer(model=SHAPE, callbacks=7)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"callbacks: got \['print'\]"):
        gw.Trainer(model=SHAPE, callbacks=["print"])  # type: ignore[list-item]


# Data


def test_an_eval_dataset_is_evaluated_during_training(small_tokenizer: gw.Tokenizer) -> None:
    trainer = gw.Trainer(
        model=SHAPE, train_dataset=TEXTS, eval_dataset=TEXTS[:6], tokenizer=small_tokenizer, out="run", **FEW
    )
    outcome = trainer.train()
    there = gw.evaluate("run", TEXTS[:6], device="cpu")  # not a part of what is trained on
    assert outcome.held_out_loss == pytest.approx(there.loss, abs=1e-6)
    assert trainer.evaluate().samples == there.samples


def test_a_list_of_dictionaries(small_tokenizer: gw.Tokenizer) -> None:
    def train(data: Any, out: str) -> gw.GPT:
        trainer = gw.Trainer(model=SHAPE, train_dataset=data, tokenizer=small_tokenizer, out=out, **FEW)
        trainer.train()
        return trainer.model

    texts = train(TEXTS, "runs/texts")
    assert same_weights(train([{"text": text, "n": 3} for text in TEXTS], "runs/dicts"), texts)
    pairs = [{"prompt": "Who?", "completion": f" {who}."} for who in ("Anna", "Tom", "Mei")] * 4
    train(pairs, "runs/pairs")
    store = Store("runs/pairs/.inputs/path")
    assert store.sidecar is not None and store.sidecar.kind == "examples" and store.num_documents == 12
    assert (
        gw.evaluate("runs/pairs", pairs[:3], device="cpu").tokens
        < gw.evaluate("runs/pairs", ["Who? Anna.", "Who? Tom.", "Who? Mei."], device="cpu").tokens
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([{"body": "a"}], "item 1 has the keys body"),
        ([{"text": "a"}, {"body": "b"}], r"item 2 is \{'body': 'b'\}"),
        ([{"text": 3}], r"item 1 is \{'text': 3\}"),
        ([{"prompt": "a", "completion": "b"}, "c"], "item 2 is 'c'; needs a prompt and a completion"),
        ({"train": ["a"], "test": ["b"]}, r"got a dict with train, test; .* such as \['train'\]"),
    ],
)
def test_lists_that_are_refused(data: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        gw.Trainer(model=SHAPE, train_dataset=data)


def test_a_table_of_pandas_is_not_taken_for_its_columns() -> None:
    class DataFrame(list):  # type: ignore[type-arg]
        def iterrows(self) -> None: ...

    with pytest.raises(UsageError, match=r"got a DataFrame; .*to_dict\('records'\)"):
        gw.Trainer(model=SHAPE, train_dataset=DataFrame(["text"]))


def test_raw_text_as_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    Path("stories.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    Path("held.csv").write_text("n,text\n" + "".join(f"1,{text}\n" for text in TEXTS[:6]), encoding="utf-8")
    trainer = gw.Trainer(model=SHAPE, train_dataset="stories.txt", eval_dataset="held.csv", out="run", **FEW)
    trainer.train()
    said = capsys.readouterr().out
    assert "data:  stories.txt is text: 18 documents" in said and "prepared as run/.inputs/stories" in said
    assert trainer.model.tokenizer is not None and trainer.model.tokenizer.vocab_size <= 512
    assert trainer.evaluate() == gw.evaluate("run", "held.csv", device="cpu")
    assert trainer.evaluate().samples == gw.evaluate("run", TEXTS[:6], device="cpu").samples
    with pytest.raises(DataError, match="no column 'text'"):
        Path("other.csv").write_text("n,body\n1,a\n", encoding="utf-8")
        gw.evaluate("run", "other.csv", device="cpu")
