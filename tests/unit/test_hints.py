"""What is answered to a name that is not ours, or to a configuration that is used as if it were another object."""

from pathlib import Path

import pytest

import gptworks as gw
from gptworks.config import presets
from gptworks.errors import ConfigError
from gptworks.python_words import in_option_words, reworded


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("generate.temp", "did you mean 'temperature'?"),
        ("generate.max_tokens", "did you mean 'max_new_tokens'?"),
        ("train.max_tokens", "did you mean 'tokens'?"),
        ("model.block_size", "did you mean 'max_positions'?"),
        ("data.block_size", "did you mean 'seq_len'?"),
        ("data.eval_path", "did you mean 'held_out_path'?"),
        ("model.norm_first", "no such setting: norms come before attention and feed-forward here, as in GPT-2. Leave"),
    ],
)
def test_a_key_of_another_tool(key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        gw.load_config(overrides=[f"{key}=1"])
    assert f"{key}: " in str(error.value) and hint in str(error.value)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("precision.compute=float16", "input should be 'fp32', 'bf16' or 'fp16'. Did you mean fp16?"),
        ("precision.compute=bf16-mixed", "Did you mean bf16?"),
        ("run.device=gpu", "Did you mean cuda?"),
        ("optim.schedule=linear_with_warmup", "Did you mean linear?"),
        ("optim.name=AdamW", "optim.name: no such setting: it is AdamW. Leave it out."),
        ("precision=bf16", "precision: 'bf16' is not a section. A section has keys, such as 'precision.compute'."),
        ("model=gpt2", "A preset is --preset gpt2, or preset: gpt2 in a file."),
        (
            "data.key=[title,steps]",
            "data.key: got ('title', 'steps'); needs one text, with commas between several columns",
        ),
        ("data.key=[title,steps]", ": title,steps."),
        ("data.split=0.1", "alone it gives everything to training. 0.1 held out is data.split=0.9,0.1"),
        # Words without =.
        ("optim.lr", "Here the value is missing; there are no blanks around the = of optim.lr=VALUE."),
        ("run.yaml", "A configuration is -c run.yaml."),
        ("config/train_gpt2.py", "goes with its command: gptworks run -- python train.py config/train_gpt2.py."),
    ],
)
def test_a_value_of_another_tool(setting: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        gw.load_config(overrides=[setting])
    assert hint in str(error.value)


@pytest.mark.parametrize("setting", ["precision.compute=f", "precision.compute=1", "data.split=1", "data.split=100"])
def test_where_nothing_is_meant(setting: str) -> None:
    try:
        gw.load_config(overrides=[setting])
    except ConfigError as error:
        assert "Did you mean" not in str(error)


@pytest.mark.parametrize(
    ("keywords", "hint"),
    [
        ({"dataset": ["a"]}, "dataset: unknown key; did you mean train_dataset=...?"),
        ({"eval_data": ["a"]}, "eval_data: unknown key; did you mean eval_dataset=...?"),
        ({"output_dir": "x"}, "output_dir: unknown key; did you mean out=...?"),
        ({"learning_rate": 3}, "did you mean optim={'lr': ...}?"),
        ({"train": 3}, "train: 3 is not a section. A section has keys, such as train={'steps': ...}."),
    ],
)
def test_keywords_of_another_trainer(keywords: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        gw.Trainer(model="tiny", train_dataset=["a"], **keywords)  # type: ignore[arg-type]
    assert hint in str(error.value)


def test_a_model_in_the_place_of_a_task_and_one_that_is_misspelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(gw.GPTWorksError, match=r"no task 'tiny-4k'.* If it is a model, write model='tiny-4k'\."):
        gw.Trainer("tiny-4k", ["a"])  # type: ignore[arg-type]
    with pytest.raises(
        gw.GPTWorksError, match=r"model 'tiny-4' is neither a preset nor a folder. Did you mean tiny-4k\?"
    ):
        gw.Trainer(model="tiny-4", train_dataset=["a"])
    with pytest.raises(gw.GPTWorksError, match=r"GPT: got 'gpt2'; needs a ModelConfig. GPT.from_pretrained takes"):
        gw.GPT("gpt2")  # type: ignore[arg-type]


def test_public_names_of_others() -> None:
    with pytest.raises(AttributeError, match=r"'GPT2Config'. Did you mean ModelConfig\? Public names: GPT, "):
        gw.GPT2Config  # noqa: B018
    with pytest.raises(AttributeError, match=r"'nonsense'. Public names: "):
        gw.nonsense  # noqa: B018
    for meant in gw._OTHER_NAMES.values():
        name, _, attribute = meant.partition(",")[0].partition(".")
        assert hasattr(gw, name) and (not attribute or hasattr(getattr(gw, name), attribute))


def test_prepare_takes_paths_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(gw.GPTWorksError, match=r"item 2 is the text 'Soup\\nCut the onion.'; needs paths"):
        gw.prepare([tmp_path / "a.txt", "Soup\nCut the onion."], tmp_path / "out")
    with pytest.raises(gw.GPTWorksError, match=r"key: got \['title', 'steps'\]; needs one text, with commas"):
        gw.prepare(tmp_path / "a.csv", tmp_path / "out", key=["title", "steps"])  # type: ignore[arg-type]
    (tmp_path / "a.csv").write_text("title,steps\nSoup,Cut.\n")
    with pytest.raises(gw.GPTWorksError, match=r'Columns: title, steps. Choose one with key="NAME", or several'):
        gw.prepare(tmp_path / "a.csv", tmp_path / "out")


def test_characters_are_no_tokenizer_before_there_is_a_text() -> None:
    with pytest.raises(gw.GPTWorksError, match=r"chars: not a tokenizer.*`gptworks prepare --train-tokenizer chars`"):
        gw.Tokenizer.from_pretrained("chars")
    with pytest.raises(gw.GPTWorksError) as error:
        gw.Tokenizer.from_pretrained("no/letters")
    assert "train-tokenizer" not in str(error.value)


def test_the_same_in_python() -> None:
    with pytest.raises(ConfigError, match=r"model.block_size: unknown key; did you mean 'max_positions'\?"):
        gw.ModelConfig(block_size=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"model.norm_first: no such setting"):
        gw.ModelConfig(norm_first=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "meant"), [("tiny-4", "tiny-4k"), ("gpt2-mediun", "gpt2-medium"), ("TINY4K", "tiny-4k")]
)
def test_a_preset_that_is_nearly_there(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' is not known. Did you mean {meant}\? Presets: "):
        presets.find(name)
    with pytest.raises(ConfigError, match=r"'xyzzy' is not known. Presets: "):
        presets.find("xyzzy")


def test_a_configuration_does_not_change() -> None:
    config = gw.load_config(preset="tiny-4k")
    with pytest.raises(ConfigError, match=r"model.num_layers: cannot be set to 3: a configuration does not change"):
        config.model.num_layers = 3
    with pytest.raises(ConfigError, match=r"num_layers: cannot be deleted"):
        del config.model.num_layers
    assert config.model.num_layers == 4
    assert config.model_copy(update={"model": gw.ModelConfig(num_layers=3)}).model.num_layers == 3
    assert gw.ModelConfig(**{**dict(config.model), "num_layers": 3}).num_layers == 3, "as the message says"


def test_positional_arguments_are_refused_in_our_words() -> None:
    with pytest.raises(
        ConfigError, match=r"ModelConfig: 1 problem\n  got 12, 768 without a name; needs keywords, such as"
    ):
        gw.ModelConfig(12, 768)  # type: ignore[call-arg,misc]


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {}\n")

    def refused(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refused)  # root may read everything
    with pytest.raises(gw.GPTWorksError, match=r"run\.yaml: permission denied"):
        gw.load_config(file)


def test_weights_that_are_not_here_are_downloaded_with_a_keyword(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GPTWORKS_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(gw.GPTWorksError) as error:
        gw.GPT.from_pretrained("gpt2-xl", download=False)
    assert str(error.value).endswith("then download=True or GPTWORKS_DOWNLOAD=1.")


def test_settings_of_generation_in_the_words_of_a_command() -> None:
    with pytest.raises(ConfigError) as error, in_option_words({"min_new_tokens", "max_new_tokens"}):
        raise ConfigError("generate", ["generate.min_new_tokens: 5 is above generate.max_new_tokens (3); generate.x"])
    assert error.value.problems == ["--min-new-tokens: 5 is above --max-new-tokens (3); generate.x"]
    assert str(error.value).endswith("--min-new-tokens: 5 is above --max-new-tokens (3); generate.x")
    assert (
        reworded("keys here: content; --key content takes that one")
        == 'keys here: content; key="content" takes that one'
    )
