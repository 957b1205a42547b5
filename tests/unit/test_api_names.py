"""Names of models and tokenizers: the places where they are looked for, and what is said when they are not there."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gptworks as gw
from gptworks import model_hub
from gptworks.checkpoint import folder as folders
from gptworks.errors import CheckpointError, TokenizerError

ALL_NAMES = [
    f"{before}gpt2{size}{after}"
    for size in ("", "-medium", "-large", "-xl")
    for before, after in (("", ""), ("", "-en"), ("openai-community/", ""))
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with GPT-2's vocabulary, saved by transformers; without a tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "saved"
    GPT2LMHeadModel(GPT2Config(n_embd=4, n_head=2, n_layer=1, n_positions=16)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing in the caches of this test, and nothing of the environment it runs in."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "GPTWORKS_DOWNLOAD"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("GPTWORKS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def place(weights: Path, at: Path) -> Path:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(weights)
    return at


def cached(weights: Path, hub: Path, hub_name: str, revision: str = "abc123", main: bool = True) -> Path:
    """As the hub's library lays it out."""
    folder = hub / f"models--{hub_name.replace('/', '--')}"
    if main:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
    return place(weights, folder / "snapshots" / revision)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_names_of_gpt2_are_found_in_our_home_and_in_the_hubs_cache(
    name: str, weights: Path, empty_machine: Path
) -> None:
    assert model_hub.find(name) is None
    size = name.removeprefix("openai-community/").removesuffix("-en")
    in_cache = cached(weights, empty_machine / "hf" / "hub", f"openai-community/{size}")
    assert model_hub.find(name) == in_cache
    short = place(weights, empty_machine / "home" / "models" / size)
    assert model_hub.find(name) == short, "our own home comes first"
    if name != size:
        own = place(weights, empty_machine / "home" / "models" / name)
        assert model_hub.find(name) == own, "the very name comes before the short one"


def test_a_folder_of_that_path_comes_first(weights: Path, empty_machine: Path) -> None:
    place(weights, empty_machine / "home" / "models" / "gpt2")
    place(weights, Path("gpt2"))
    assert gw.GPT.from_pretrained("gpt2").folder == Path("gpt2")


@pytest.mark.parametrize(
    ("variable", "value", "hub"),
    [
        ("HF_HUB_CACHE", "{here}/mine", "mine"),
        ("HUGGINGFACE_HUB_CACHE", "{here}/old", "old"),
        ("HF_HOME", "{here}/general", "general/hub"),
        ("XDG_CACHE_HOME", "{here}/xdg", "xdg/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_library_has_it(
    variable: str, value: str, hub: str, weights: Path, empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(variable, value.format(here=empty_machine))
    in_cache = cached(weights, empty_machine / hub, "gpt2")  # the short name: what caches from before 2024 hold
    assert model_hub.find("gpt2-en") == in_cache


def test_our_home_may_be_below_the_users(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(empty_machine))
    monkeypatch.setenv("GPTWORKS_HOME", "~/mine")
    assert model_hub.home() == empty_machine / "mine"
    monkeypatch.delenv("GPTWORKS_HOME")
    assert model_hub.home() == empty_machine / ".gptworks"


def test_the_main_branch_is_taken_or_the_only_revision(weights: Path, empty_machine: Path) -> None:
    hub = empty_machine / "hf" / "hub"
    only = cached(weights, hub, "somebody/model", "aaa", main=False)
    assert model_hub.find("somebody/model") == only
    cached(weights, hub, "somebody/model", "bbb", main=False)
    assert model_hub.find("somebody/model") is None, "which of the two is not said"
    newest = cached(weights, hub, "somebody/model", "ccc")
    assert model_hub.find("somebody/model") == newest


def test_a_cache_that_holds_the_tokenizer_only_has_no_weights(small_tokenizer, empty_machine: Path) -> None:
    small_tokenizer.save(empty_machine / "tokenizer")
    at = cached(empty_machine / "tokenizer", empty_machine / "hf" / "hub", "somebody/model")
    assert model_hub.find("somebody/model") is None and model_hub.find_tokenizer("somebody/model") == at
    assert gw.Tokenizer.from_pretrained("somebody/model").vocab_size == 512
    with pytest.raises(CheckpointError, match="somebody/model: no such folder"):
        gw.GPT.from_pretrained("somebody/model")


def test_weights_of_gpt2_get_the_tokenizer_that_comes_with_us(weights: Path, empty_machine: Path) -> None:
    place(weights, empty_machine / "home" / "models" / "gpt2-en")
    place(weights, empty_machine / "home" / "models" / "other")
    model = gw.GPT.from_pretrained("gpt2-en")
    assert model.tokenizer is not None and model.tokenizer.name == "gpt2"
    assert gw.GPT.from_pretrained("other").tokenizer is None
    theirs = GPT2LMHeadModel.from_pretrained(weights).eval()
    tokens = torch.tensor([[15496, 995]])
    torch.testing.assert_close(model(tokens), theirs(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_NAMES)
def test_names_of_gpt2_mean_the_bundled_tokenizer(name: str, small_tokenizer) -> None:
    assert gw.Tokenizer.from_pretrained(name).encode("Hello world") == [15496, 995]
    if name != "gpt2":  # for that one there is a test beside the others of the tokenizer
        small_tokenizer.save(name)
        assert gw.Tokenizer.from_pretrained(name).vocab_size == 512, "a folder of that path comes first"


def test_a_run_in_our_home_is_found_with_its_settings(empty_machine: Path, small_store: Path) -> None:
    config = gw.load_config(
        preset="tiny-4k",
        overrides=[
            f"data.path={small_store}",
            "train.steps=1",
            "data.seq_len=16",
            "generate.top_k=7",
            "run.device=cpu",
        ],
    )
    out = empty_machine / "home" / "models" / "mine"
    gw.train(config.model_copy(update={"run": config.run.model_copy(update={"out": str(out)})}))
    assert folders.config_of(Path("mine"))["generate"]["top_k"] == 7
    assert gw.GPT.from_pretrained("mine").tokenizer is not None


def test_what_to_put_where_is_said(empty_machine: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        gw.GPT.from_pretrained("gpt2-medium-en")
    text = str(caught.value)
    for part in (
        "gpt2-medium-en: these weights are not on this machine",
        str(empty_machine / "home" / "models" / "gpt2-medium-en"),
        str(empty_machine / "hf" / "hub"),
        "config.json and model.safetensors (1,520 MB) of openai-community/gpt2-medium",
        "gptworks[hub]",
        "GPTWORKS_DOWNLOAD=1",
    ):
        assert part in text
    for other in ("nowhere", "no/where", "/no/where/at/all", ""):
        with pytest.raises(CheckpointError, match=f"{other}: no such folder"):
            model_hub.resolve(other)
    with pytest.raises(TokenizerError, match="no/where: not a tokenizer"):
        gw.Tokenizer.from_pretrained("no/where")


class Hub(ModuleType):
    """Stands for huggingface_hub: writes down what was asked for and gives a folder back."""

    def __init__(self, folders: list[Path | Exception]) -> None:
        super().__init__("huggingface_hub")
        self.folders, self.asked = folders, []

    def snapshot_download(self, repo_id: str, *, cache_dir: Path, allow_patterns: list[str]) -> str:
        self.asked.append((repo_id, Path(cache_dir), allow_patterns))
        result = self.folders.pop(0)
        if isinstance(result, Exception):
            raise result
        return str(result)


def with_hub(monkeypatch: pytest.MonkeyPatch, *folders: Path | Exception) -> Hub:
    hub = Hub(list(folders))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_nothing_is_downloaded_unasked(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = with_hub(monkeypatch, weights)
    for value, download in (("", None), ("0", None), ("1", False)):
        monkeypatch.setenv("GPTWORKS_DOWNLOAD", value)
        with pytest.raises(CheckpointError, match="not on this machine"):
            gw.GPT.from_pretrained("gpt2", download=download)
    assert hub.asked == []


@pytest.mark.parametrize(("variable", "download"), [("1", None), ("", True), ("0", True)])
def test_a_download_is_made_when_it_is_allowed(
    variable: str, download: bool | None, weights: Path, empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = with_hub(monkeypatch, weights)
    monkeypatch.setenv("GPTWORKS_DOWNLOAD", variable)
    assert gw.GPT.from_pretrained("gpt2-xl-en", download=download).folder == weights
    ((name, cache, patterns),) = hub.asked
    assert (name, cache) == ("openai-community/gpt2-xl", empty_machine / "hf" / "hub")
    assert "model*.safetensors" in patterns and "pytorch_model.bin" not in patterns


def test_pickled_weights_are_fetched_where_there_are_no_others(
    weights: Path, empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = empty_machine / "empty"
    empty.mkdir()
    hub = with_hub(monkeypatch, empty, weights)
    assert model_hub.resolve("somebody/old", download=True) == weights
    assert "pytorch_model.bin" in hub.asked[1][2]
    with_hub(monkeypatch, empty, empty)
    with pytest.raises(CheckpointError, match=r"somebody/old: downloaded to .*empty, but there is no config\.json"):
        model_hub.resolve("somebody/old", download=True)


def test_downloads_that_fail_say_why(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_hub(monkeypatch, OSError("no route to host\nmore"))
    with pytest.raises(CheckpointError, match=r"openai-community/gpt2: could not be downloaded \(no route to host\)"):
        model_hub.resolve("gpt2", download=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"huggingface_hub, which is not installed.*gptworks\[hub\]"):
        model_hub.resolve("gpt2", download=True)
    monkeypatch.setenv("GPTWORKS_DOWNLOAD", "perhaps")
    with pytest.raises(CheckpointError, match="GPTWORKS_DOWNLOAD: got 'perhaps'"):
        model_hub.resolve("gpt2")


def test_the_real_library_offline_is_answered_in_one_line() -> None:
    """tests/conftest.py keeps every test offline."""
    pytest.importorskip("huggingface_hub")
    with pytest.raises(CheckpointError, match="openai-community/gpt2: could not be downloaded") as caught:
        model_hub.resolve("gpt2", download=True)
    assert "\n" not in str(caught.value)


def test_the_command_line_passes_the_permission_on(run_cli, empty_machine: Path) -> None:
    command = ("generate", "--model", "gpt2-en", "--prompt", "x")
    assert "these weights are not on this machine" in run_cli(*command, expect=2).stderr
    assert "could not be downloaded" in run_cli(*command, "--download", expect=2).stderr
