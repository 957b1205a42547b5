"""gw.Trainer: the same run as the command line makes of the same settings, from everything it takes as a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from home_folder import own_home

import gptworks as gw
from gptworks.config.schema import ModelConfig
from gptworks.data.store import Store
from gptworks.errors import CheckpointError, ConfigError, DataError, UsageError

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512, "max_positions": 16}
FEW = {"train": {"steps": 3}, "batch": {"global_size": 2}, "run": {"device": "cpu"}}
TEXTS = [f"On {day} morning {who} found a map." for day in ("Monday", "Friday") for who in ("Anna", "Tom", "Mei")] * 3


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTWORKS_HOME", own_home(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same_weights(a: gw.GPT, b: gw.GPT) -> bool:
    other = dict(b.named_parameters())
    return all(torch.equal(parameter, other[name]) for name, parameter in a.named_parameters())


@pytest.mark.slow
def test_the_run_is_that_of_the_command_line(small_store: Path, run_cli) -> None:
    keys = [f"model.{key}={value}" for key, value in SHAPE.items()] + ["train.steps=3", "batch.global_size=2"]
    run_cli("train", *keys, f"data.path={small_store}", "--out", "runs/cli", "--device", "cpu")
    trainer = gw.Trainer(model=SHAPE, train_dataset=str(small_store), out="runs/python", **FEW)
    outcome = trainer.train()
    assert (outcome.folder, outcome.step, outcome.stopped_by) == (Path("runs/python"), 3, "end")
    theirs = gw.GPT.from_pretrained("runs/cli")
    assert same_weights(trainer.model, theirs)
    told = run_cli("eval", "--model", "runs/cli", "--data", small_store, "--json", "--device", "cpu").stdout
    assert f'"loss": {trainer.evaluate().loss}' in told
    assert gw.evaluate(theirs, small_store).loss == trainer.evaluate().loss
    greedy = {"strategy": "greedy", "max_new_tokens": 4}
    (result,) = trainer.predict(input_data="Anna walked", **greedy)
    assert result == {"text_generation_text": ["Anna walked" + gw.generate(theirs, "Anna walked", **greedy)[0]]}


@pytest.mark.parametrize("as_what", ["ModelConfig", "dict", "config", "RunConfig", "yaml"])
def test_ways_to_say_the_shape(as_what: str, small_store: Path) -> None:
    config: Any = {"model": SHAPE, "optim": {"lr": 0.5, "beta1": 0.5}}
    model: Any = {"ModelConfig": ModelConfig(**SHAPE), "dict": SHAPE}.get(as_what)
    if as_what == "RunConfig":
        keys = [f"model.{key}={value}" for key, value in SHAPE.items()]
        config = gw.load_config(overrides=[*keys, "optim.lr=0.5", "optim.beta1=0.5"])
    if as_what == "yaml":
        lines = [f"  {key}: {value}" for key, value in SHAPE.items()]
        Path("run.yaml").write_text("\n".join(["optim: {lr: 0.5, beta1: 0.5}", "model:", *lines]))
        config = "run.yaml"
    trainer = gw.Trainer(model=model, train_dataset=small_store, config=config, optim={"lr": 0.25}, **FEW)
    assert trainer.config.model == ModelConfig(**SHAPE)
    assert (trainer.config.optim.lr, trainer.config.optim.beta1, trainer.config.train.steps) == (0.25, 0.5, 3)
    assert trainer.config.run.out == "runs/trainer" and trainer.config.data.seq_len == 16


def test_the_model_comes_before_the_config_and_single_keys_before_the_model() -> None:
    config = gw.load_config(preset="tiny-4k")
    trainer = gw.Trainer(model="gpt2-medium", config=config, **{"model.dropout_hidden": 0.5, "data.seq_len": 64})
    assert (trainer.config.model.num_layers, trainer.config.model.vocab_size) == (24, 50257)
    assert trainer.config.model.dropout_hidden == 0.5
    assert gw.Trainer(config={"preset": "tiny-4k"}).config.model == config.model


@pytest.mark.slow
def test_held_out_means_the_same_as_in_training(small_store: Path) -> None:
    data = {"split": "60,40", "seq_len": 8, "mask_eod": True}
    trainer = gw.Trainer(model=SHAPE, train_dataset=small_store, out="runs/a", data=data, **FEW)
    trainer.train()
    for model in ("runs/a", trainer.model):
        assert gw.evaluate(model, small_store, device="cpu") == trainer.evaluate()
        assert gw.evaluate(model, small_store, shares="90,10").samples < trainer.evaluate().samples


def test_one_epoch_where_nothing_says_how_long(small_store: Path) -> None:
    assert gw.Trainer(model=SHAPE, train_dataset=small_store).config.train.epochs == 1
    assert gw.Trainer(model=SHAPE, train_dataset=small_store, train={"tokens": 99}).config.train.epochs == 0


def test_from_texts_to_weights_to_more_training(small_tokenizer: gw.Tokenizer, tmp_path: Path) -> None:
    first = gw.Trainer(
        model=SHAPE, train_dataset=TEXTS, eval_dataset=TEXTS[:6], tokenizer=small_tokenizer, out="runs/first", **FEW
    )
    with pytest.raises(UsageError, match=r"model \{'num_layers': 1.* has no weights yet"):
        first.predict(input_data="Anna")
    first.train()
    store = Store(tmp_path / "runs" / "first" / ".inputs" / "path")
    documents = [small_tokenizer.decode(store.tokens[: store.document_starts[1] - 1])]
    assert documents == TEXTS[:1] and len(store.document_starts) == len(TEXTS) + 1
    assert first.model.tokenizer is not None and first.model.tokenizer.identity == small_tokenizer.identity
    result = first.evaluate()
    assert result.loss == gw.evaluate(first.model, TEXTS[:6]).loss

    for number, model in enumerate([first.model, "runs/first", Path("runs/first/latest")]):
        before = {name: parameter.clone() for name, parameter in first.model.named_parameters()}
        again = gw.Trainer(model=model, train_dataset=TEXTS, eval_dataset=TEXTS[:6], out=f"runs/{number}", **FEW)
        assert again.config.model == first.config.model
        assert again.evaluate() == result, "before training it has the weights it was given"
        outcome = again.train()
        assert outcome.step == 3 and again.evaluate().loss < result.loss
        assert not same_weights(again.model, first.model)
        assert all(torch.equal(before[name], parameter) for name, parameter in first.model.named_parameters())


def test_only_data_to_evaluate(small_tokenizer: gw.Tokenizer) -> None:
    trainer = gw.Trainer(model=SHAPE, train_dataset=TEXTS, tokenizer=small_tokenizer, out="runs/a", **FEW)
    trainer.train()
    only = gw.Trainer(model="runs/a", eval_dataset=TEXTS[:6], out="runs/b")
    assert only.evaluate() == gw.evaluate("runs/a", TEXTS[:6])
    with pytest.raises(DataError, match=r"data\.path: not set"):
        gw.Trainer(model="runs/a", out="runs/c").train()


def test_resuming_is_asked_for(small_store: Path) -> None:
    trainer = gw.Trainer(model=SHAPE, train_dataset=small_store, out="runs/a", **FEW)
    trainer.train()
    with pytest.raises(UsageError, match="runs/a: not empty"):
        trainer.train()
    longer = gw.Trainer(model=SHAPE, train_dataset=small_store, out="runs/a", **FEW | {"train": {"steps": 5}})
    assert longer.train(resume="auto").step == 5


def test_a_folder_with_other_things_in_it_is_left_alone(small_tokenizer: gw.Tokenizer) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    trainer = gw.Trainer(model=SHAPE, train_dataset=TEXTS, tokenizer=small_tokenizer, out="mine", **FEW)
    with pytest.raises(UsageError, match=r"mine: not empty \(thesis\.txt\)"):
        trainer.train()
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_finetuning_takes_the_published_weights_of_the_name(own_folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    published = GPT2LMHeadModel(GPT2Config(n_embd=4, n_head=2, n_layer=1, n_positions=16))
    published.save_pretrained(own_folder / "home" / "models" / "gpt2")
    for name in ("gpt2", "124M", "gpt2-en"):
        trainer = gw.Trainer(model=name, train_dataset=TEXTS, out=f"runs/{name}", **FEW | {"optim": {"lr": 0.0}})
        if name != "gpt2-en":
            assert trainer.config.model.num_layers == 12 and not trainer.config.init.checkpoint
        trainer.finetune()
        assert trainer.config.init.checkpoint in ("gpt2", "gpt2-en")
        tokens = torch.tensor([[15496, 995]])
        torch.testing.assert_close(trainer.model(tokens), published.eval()(tokens).logits)
        assert trainer.predict("Hello", max_new_tokens=2)[0]["text_generation_text"][0].startswith("Hello")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"task": "translation"}, UsageError, "no task 'translation'. Tasks: text_generation"),
        ({"task": 3}, UsageError, "no task 3"),
        ({"model": 7}, UsageError, "model: got 7"),
        ({"model": "gpt3-enormous"}, CheckpointError, "gpt3-enormous: no such folder"),
        ({"model": "gpt2-en"}, CheckpointError, "gpt2-en: these weights are not on this machine"),
        ({"model": {"layers": 3}}, ConfigError, "model.layers: unknown key"),
        ({"config": 7}, UsageError, "config: got 7"),
        ({"config": "nowhere.yaml"}, ConfigError, "nowhere.yaml"),
        ({"optim": {"lr": "fast"}}, ConfigError, "optim.lr: got 'fast'"),
        ({"learning_rate": 3}, ConfigError, "learning_rate: unknown key"),
        ({"train_dataset": 7}, UsageError, "train_dataset: got 7"),
        ({"train_dataset": ["a", 7]}, UsageError, "train_dataset: item 2 is 7"),
        ({"eval_dataset": []}, DataError, "eval_dataset: an empty list"),
        ({"train_dataset": ["corpus.txt"]}, UsageError, "item 1 is 'corpus.txt', which is a file and not a text"),
    ],
)
def test_what_a_trainer_refuses(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    Path("corpus.txt").write_text("text")
    with pytest.raises(error, match=said):
        gw.Trainer(**arguments)


def test_a_prefix_in_a_list_is_no_text(small_store: Path) -> None:
    with pytest.raises(UsageError, match="which is a file and not a text"):
        gw.Trainer(model=SHAPE, train_dataset=[str(small_store)])


def test_a_shape_has_nothing_to_be_tuned(small_store: Path) -> None:
    with pytest.raises(UsageError, match="model 'tiny' has no weights to start from"):
        gw.Trainer(model="tiny", train_dataset=small_store).finetune()
