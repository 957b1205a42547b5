"""Whatever computes or writes a GPT a second time refuses, by name, a variant that it does not know."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from gptworks import architecture
from gptworks.checkpoint import portable
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.pretrained import Pretrained
from gptworks.checkpoint.systems import gguf_architectures, huggingface, huggingface_families, registry
from gptworks.checkpoint.systems.contract import SplitSpec, Weights
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
from gptworks.plan import block_kinds
from gptworks.plan.workload import Workload
from gptworks.tokenizer import Tokenizer
from gptworks.train import native_blocks


class Spiral(ModelConfig):
    """An invented variant: a curve that nobody knows."""

    curve: Literal["straight", "spiral"] = "straight"


SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_heads": 4,
    "vocab_size": 512,
    "max_positions": 16,
}
PLAIN, SPIRAL = Spiral(**SHAPE), Spiral(**SHAPE, curve="spiral")
SAID = r"model\.curve: spiral \(known: straight\)"


def model_of(cfg: ModelConfig) -> GPT:
    torch.manual_seed(1)
    return GPT(cfg).eval()


def weights_of(cfg: ModelConfig) -> Weights:
    tensors = {name: in_memory(each.detach()) for name, each in model_of(cfg).named_parameters()}
    return Weights(cfg, tensors)


# All but our own folder, which keeps the whole config.
@pytest.mark.parametrize("name", [name for name in registry.WRITTEN if name != "gptworks"])
def test_a_checkpoint_of_another_system(name: str, tmp_path: Path) -> None:
    system = registry.system(name)
    for number, cfg in enumerate((PLAIN, SPIRAL)):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / f"model{system.SUFFIX}" if system.SUFFIX else folder
        if cfg is PLAIN:
            assert system.write(path, weights_of(cfg), SplitSpec())
        else:
            with pytest.raises(CheckpointError, match=SAID):
                system.write(path, weights_of(cfg), SplitSpec())
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


def test_the_plan() -> None:
    Workload(PLAIN, 16)
    with pytest.raises(UsageError, match=r"plan: it cannot compute .* model\.curve: spiral"):
        Workload(SPIRAL, 16)


TABLES: dict[str, Any] = {
    "plan": block_kinds.KNOWN,
    "decoder": fast_decode.KNOWN,
    "gguf": gguf_architectures.KNOWN,
    "huggingface": huggingface_families.KNOWN,
    "GPT-2": architecture.GPT2,
}


@pytest.mark.parametrize("learns", TABLES)
def test_what_one_learns_the_others_do_not(learns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES[learns], "curve", ("spiral",))
    assert [name for name, known in TABLES.items() if not architecture.unknown(SPIRAL, known)] == [learns]


def test_the_plan_asks_its_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gain = ModelConfig(**SHAPE, qk_norm=True)
    Workload(with_gain, 16)
    monkeypatch.delitem(TABLES["plan"], "qk_norm")
    with pytest.raises(UsageError, match=r"plan: it cannot compute .* model\.qk_norm: True \(known: False\)"):
        Workload(with_gain, 16)


@needs_compiler
def test_the_decoder_in_cxx() -> None:
    assert Decoder.of(model_of(PLAIN)) is not None and fast_decode.why_not(PLAIN) is None
    assert Decoder.of(model_of(SPIRAL)) is None
    assert fast_decode.why_not(SPIRAL) == "the C++ function does not know model.curve: spiral (known: straight)"


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


def test_the_blocks_of_training_in_cpp() -> None:
    assert native_blocks.unknown(PLAIN) == ""
    assert native_blocks.unknown(SPIRAL) == "model.curve: spiral (known: straight)"
