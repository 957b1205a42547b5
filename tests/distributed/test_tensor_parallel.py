"""Tensor parallel equals one process: losses, gradients, generation; and dropout, which differs, is what it should be."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gptworks.config.derive import Layout
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.errors import ConfigError, UsageError
from gptworks.model import GPT, IGNORED, tie
from gptworks.model.init import draw
from gptworks.parallel import recompute, tensor
from gptworks.parallel.launch import World

# Dynamo asks every tensor whether it has a gradient and hides the answer's warning only from the screen.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

VOCABULARY, EOD, T = 509, 3, 16
STEPS, ACCUMULATION, ROWS = 5, 2, 4
TOLERANCE = 5e-6
Curve = tuple[list[float], list[float], dict[str, Tensor]]


def config(**changes: object) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCABULARY, "max_positions": T}
    return ModelConfig.model_validate({**shape, **changes})


def build(
    cfg: ModelConfig,
    world: World | None = None,
    *,
    sequence: bool = True,
    mode: str = "none",
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> GPT:
    """The order of parallel.apply.build, with tensor parallelism and sharding in it."""
    with torch.device("meta"):
        part = GPT(cfg, dtype)
    if world is not None and (tp := world.axis("tp")):
        tensor.apply(part, tp, sequence=sequence)
    recompute.apply_inside(part, mode)
    if compiled:
        for block in part.blocks.values():
            block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
    recompute.apply_around(part, mode)
    if world is not None and (fsdp := world.axis("fsdp")):
        for module in [*part.blocks.values(), part]:
            fully_shard(module, mesh=fsdp)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other scaled sum
    part.to_empty(device="cpu")
    tie(part)
    fill(part, cfg)
    return part.train()


@torch.no_grad()
def fill(part: GPT, cfg: ModelConfig) -> None:
    for name, parameter in part.named_parameters():
        whole = draw(name, parameter.shape, cfg.num_layers, InitConfig(std=0.2), seed=1)
        if ".ln" in f".{name}" or name.endswith("bias"):  # ones and zeros would hide a sum taken twice
            whole += 0.1 * torch.randn(whole.shape, generator=torch.Generator().manual_seed(len(name)))
        if isinstance(parameter, DTensor):
            cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(cut.to_local())
        else:
            parameter.copy_(whole)


def batch(number: int, *, resets: bool = True, rows: int = ROWS) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens and what else the model reads: documents end often, and what follows an end is not scored."""
    generator = torch.Generator().manual_seed(number)
    window = torch.randint(0, VOCABULARY, (rows, T + 1), generator=generator)
    window[torch.rand(rows, T + 1, generator=generator) < 0.2] = EOD
    tokens, labels = window[:, :-1], window[:, 1:]
    is_eod = tokens == EOD
    segments = is_eod.cumsum(1) - is_eod.long()
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = torch.where(is_eod[:, :-1], torch.arange(1, T), 0)
    more = {"labels": labels.masked_fill(is_eod, IGNORED)}
    if resets:
        more |= {"positions": torch.arange(T) - starts.cummax(1).values, "segments": segments}
    return tokens, more


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(
    part: GPT,
    world: World | None = None,
    *,
    resets: bool = True,
    steps: int = STEPS,
    finish: Callable[..., None] = tensor.finish_gradients,
    seed: int | None = None,
) -> Curve:
    """Losses and gradient norms of all steps, and the gradients of the first."""
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    tp, fsdp = (world.axis("tp"), world.axis("fsdp")) if world else (None, None)
    rank, ranks = (world.data_rank, world.data_parallel) if world else (0, 1)
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        batches = [batch(step * ACCUMULATION + i, resets=resets) for i in range(ACCUMULATION)]
        count = sum(int((more["labels"] != IGNORED).sum()) for _, more in batches)
        total = torch.zeros(())
        for i, (tokens, more) in enumerate(batches):
            if seed is not None:
                torch.manual_seed(seed + 100 * step + i)
            loss = part(tokens[mine], **{key: value[mine] for key, value in more.items()})
            (loss / count).backward()
            total += loss.detach() / count
        if fsdp is not None:
            distributed.all_reduce(total, group=fsdp.get_group())
        if tp is not None:
            finish(part, tp)
        if step == 0:
            gradients = {name: whole(p.grad).clone() for name, p in part.named_parameters()}
        norms.append(whole(nn.utils.clip_grad_norm_(part.parameters(), 1.0)).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, norms, gradients


@cache
def one_process(tied: bool = True, resets: bool = True) -> Curve:
    return train(build(config(tied=tied)), resets=resets)


def worst(found: Curve, wanted: Curve) -> tuple[float, float, float]:
    """The largest difference of losses, of gradient norms, and of gradients: the latter two relative."""
    assert list(found[2]) == list(wanted[2])
    losses = max(abs(a - b) for a, b in zip(found[0], wanted[0], strict=True))
    norms = max(abs(a / b - 1) for a, b in zip(found[1], wanted[1], strict=True))
    gradients = max(((found[2][n] - g).abs().max() / g.abs().max()).item() for n, g in wanted[2].items())
    return losses, norms, gradients


def assert_equal(differences: list[tuple[float, float, float]]) -> None:
    for losses, norms, gradients in differences:
        assert losses <= TOLERANCE
        assert norms <= TOLERANCE
        assert gradients <= TOLERANCE


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize("tp", [2, 4])
def test_training_equals_one_process(run_layout, tp: int, sequence: bool, tied: bool) -> None:
    wanted = one_process(tied)
    assert_equal(
        run_layout(
            Layout(tp=tp),
            lambda world: worst(train(build(config(tied=tied), world, sequence=sequence), world), wanted),
        )
    )


def test_training_without_document_borders_equals_one_process(run_layout) -> None:
    """No mask and no positions: the kernels of plain causal attention."""
    wanted = one_process(resets=False)
    assert_equal(
        run_layout(Layout(tp=2), lambda world: worst(train(build(config(), world), world, resets=False), wanted))
    )


@pytest.mark.parametrize("mode", ["full", "full_attn", "core_attn"])
def test_recomputing_equals_one_process(run_layout, mode: str) -> None:
    wanted = one_process()
    assert_equal(run_layout(Layout(tp=2), lambda world: worst(train(build(config(), world, mode=mode), world), wanted)))


@pytest.mark.parametrize(
    ("mode", "sequence"), [("none", True), ("none", False), ("full", True), ("full_attn", True), ("core_attn", True)]
)
def test_compiling_blocks_equals_one_process(run_layout, mode: str, sequence: bool) -> None:
    cfg = config(num_layers=1)
    wanted = train(build(cfg), steps=2)

    def run(world: World) -> Any:
        found = worst(train(build(cfg, world, sequence=sequence, mode=mode, compiled=True), world, steps=2), wanted)
        counters = torch._dynamo.utils.counters
        assert counters["frames"]["ok"] >= 1, "nothing was compiled"
        if mode in {"none", "full"}:  # the others leave the graph for what they recompute
            assert not counters["graph_break"], dict(counters["graph_break"])
        return found

    assert_equal(run_layout(Layout(tp=2), run))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
def test_sharding_on_top_equals_one_process(run_layout, sequence: bool, tied: bool) -> None:
    """Each rank of fsdp reads other rows, and shards what tp has left to it, of 509 words too."""
    wanted = one_process(tied)
    assert_equal(
        run_layout(
            Layout(fsdp=2, tp=2),
            lambda world: worst(train(build(config(tied=tied), world, sequence=sequence), world), wanted),
        )
    )
