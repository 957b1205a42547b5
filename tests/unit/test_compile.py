"""Compiled blocks: the same numbers under the same names, and a plain word where nothing can be compiled."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptworks.config import from_dict
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt, can_compile
from gptworks.train.loop import train

CPU = torch.device("cpu")

# Dynamo asks every tensor whether it has a gradient and hides the answer's warning only from the screen.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """torch.compile that notes each captured graph and leaves out the C++ compiler: forward and backward are traced
    and run as graphs."""
    captured: list[torch.fx.GraphModule] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def note_and_run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        captured.append(graph)
        return aot_eager(graph, inputs)

    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(note_and_run)
    yield captured
    torch.compiler.set_default_backend(before)
    torch.compiler.reset()


def tiny(*, compiled: bool, mode: str = "none", **changes: object) -> GPT:
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 40, "max_positions": 16, **changes}
    cfg = ModelConfig.model_validate(shape)
    weights = FreshWeights(InitConfig(std=0.2), cfg.num_layers, seed=1)
    return build_gpt(cfg, World(CPU), torch.float32, weights, compile_blocks=compiled, recompute_mode=mode).train()


def loss_and_gradients(model: GPT) -> tuple[float, dict[str, Tensor]]:
    tokens = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(2))
    loss = model(tokens[:, :-1], labels=tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["none", "full", "full_attn", "core_attn"])
def test_compiled_equals_eager(mode: str, graphs: list[torch.fx.GraphModule]) -> None:
    eager, compiled = tiny(compiled=False), tiny(compiled=True, mode=mode)
    wanted_loss, wanted = loss_and_gradients(eager)
    assert not graphs
    loss, gradients = loss_and_gradients(compiled)
    assert graphs, "nothing was compiled"
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert list(gradients) == list(wanted)
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name


def test_names_of_parameters_and_modules_stay(graphs: list[torch.fx.GraphModule]) -> None:
    eager, compiled = tiny(compiled=False), tiny(compiled=True)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in compiled.named_modules()] == [name for name, _ in eager.named_modules()]


# No compiler


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which nothing is found; programs can be put into the folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


@pytest.mark.parametrize("name", ["g++", "clang++", "c++"])
def test_a_compiler_is_found_by_its_name(name: str, no_compiler: Path) -> None:
    assert not can_compile(CPU)
    (no_compiler / name).touch(mode=0o755)
    assert can_compile(CPU)


def test_a_compiler_may_be_named_in_the_environment(no_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_compiler / "my-compiler").touch(mode=0o755)
    assert not can_compile(CPU)
    monkeypatch.setenv("CXX", "my-compiler")
    assert can_compile(CPU)
    monkeypatch.setenv("CXX", "not-there")
    assert not can_compile(CPU)


def test_cuda_needs_triton_and_a_c_compiler(no_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.delenv("CC", raising=False)
    (no_compiler / "gcc").touch(mode=0o755)
    if find_spec("triton") is None:
        assert not can_compile(cuda)
        (tmp_path / "triton.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    assert can_compile(cuda)
    (no_compiler / "gcc").unlink()
    assert not can_compile(cuda)


def test_training_says_so_and_goes_on_eager(
    no_compiler: Path,
    small_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    graphs: list[torch.fx.GraphModule],
) -> None:
    cfg = from_dict(
        {
            "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512, "max_positions": 16},
            "data": {"path": str(small_store)},
            "train": {"steps": 2, "compile": True},
            "run": {"out": str(tmp_path / "run"), "device": "cpu"},
        }
    )
    assert train(cfg).step == 2
    assert "train.compile: no C++ compiler found (g++ or clang++)" in capsys.readouterr().out
    assert not graphs
