"""Whatever computes or writes a GPT a second time refuses, by name, a variant that it does not know."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from gptworks.checkpoint import portable
from gptworks.checkpoint.pretrained import Pretrained
from gptworks.checkpoint.stored import in_memory
from gptworks.checkpoint.systems import huggingface, registry
from gptworks.checkpoint.systems.contract import Cut, Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, UsageError
from gptworks.export import registry as targets
from gptworks.export.folder import export
from gptworks.generate import fast_decode
from gptworks.generate.fast_decode import Decoder
from gptworks.launch.ranks import Ranks
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.model.gpt import LayerNorm
from gptworks.tokenizer import Tokenizer


class Spiral(ModelConfig):
    """An invented variant: positions of a kind that nobody knows."""

    positions: Literal["learned", "spiral"] = "learned"


SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_heads": 4,
    "vocab_size": 512,
    "max_positions": 16,
}
PLAIN, SPIRAL = Spiral(**SHAPE), Spiral(**SHAPE, positions="spiral")
SAID = r"model\.positions: spiral \(known: learned\)"


def model_of(cfg: ModelConfig) -> GPT:
    torch.manual_seed(1)
    return GPT(cfg).eval()


def weights_of(cfg: ModelConfig) -> Weights:
    tensors = {name: in_memory(each.detach()) for name, each in model_of(cfg).named_parameters()}
    return Weights(cfg, tensors)


# All but our own folder, which keeps the whole config.
@pytest.mark.parametrize("name", [name for name in registry.NAMES if name != "gptworks"])
def test_a_checkpoint_of_another_system(name: str, tmp_path: Path) -> None:
    system = registry.system(name)
    for number, cfg in enumerate((PLAIN, SPIRAL)):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / f"model{system.SUFFIX}" if system.SUFFIX else folder
        if cfg is PLAIN:
            assert system.write(path, weights_of(cfg), Cut())
        else:
            with pytest.raises(CheckpointError, match=SAID):
                system.write(path, weights_of(cfg), Cut())
            assert list(folder.iterdir()) == []


def test_the_portable_folder_of_a_run(tmp_path: Path) -> None:
    weights = dict(model_of(PLAIN).named_parameters())
    ranks = Ranks(World(torch.device("cpu")))
    assert portable.write(tmp_path / "plain", PLAIN, weights, ranks, eod_id=None)
    with pytest.raises(CheckpointError, match=SAID):
        portable.write(tmp_path / "spiral", SPIRAL, weights, ranks, eod_id=None)
    assert not (tmp_path / "spiral").exists()


@pytest.mark.parametrize("to", targets.NAMES)
def test_an_exported_folder(
    to: str, tmp_path: Path, small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets.target(to)
    try:
        target.require()
    except UsageError as error:
        pytest.skip(str(error))
    source = tmp_path / "source"
    huggingface.save(source, PLAIN, dict(model_of(PLAIN).named_parameters()), eod_id=None)
    small_tokenizer.save(source)
    really_open = Pretrained.open

    def as_a_spiral(*args: Any, **more: Any) -> Pretrained:
        found = really_open(*args, **more)
        return replace(found, weights=replace(found.weights, model=SPIRAL))

    monkeypatch.setattr(Pretrained, "open", as_a_spiral)
    with pytest.raises(UsageError, match=rf"--to {to}: .*{SAID}"):
        export(source, to, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


needs_compiler = pytest.mark.skipif(fast_decode.why_not() is not None, reason=f"no fast steps: {fast_decode.why_not()}")


@needs_compiler
def test_the_decoder_in_cxx() -> None:
    assert Decoder.of(model_of(PLAIN)) is not None and fast_decode.why_not(PLAIN) is None
    assert Decoder.of(model_of(SPIRAL)) is None
    assert fast_decode.why_not(SPIRAL) == "the C++ function does not know model.positions: spiral (known: learned)"


@needs_compiler
def test_the_decoder_in_cxx_knows_modules_by_their_types() -> None:
    class ScaledNorm(LayerNorm):
        """A module of the model's own kind that computes something else, with the same parameters."""

        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    ScaledNorm.__module__ = "gptworks.model.gpt"
    other = model_of(PLAIN)
    other.blocks["1"].ln2 = ScaledNorm(24)
    assert Decoder.of(other) is None

    class Backwards(GPT):
        def forward(self, tokens_BT: Tensor, **keywords: Any) -> Tensor:
            return super().forward(tokens_BT.flip(1), **keywords)

    assert Decoder.of(Backwards(PLAIN).eval()) is None
