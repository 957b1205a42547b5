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
