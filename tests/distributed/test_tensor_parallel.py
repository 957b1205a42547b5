"""Tensor parallel equals one process: losses, gradients, generation. Dropout, which differs, is what it should be."""

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
from gptworks.errors import UsageError
from gptworks.launch.world import World
from gptworks.model import GPT, IGNORED, tie
from gptworks.model import loss as cross_entropy
from gptworks.model.init import draw
from gptworks.parallel import collectives, recompute, tensor, vocabulary

# Dynamo asks every tensor whether it has a gradient and hides the answer's warning only from the screen.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

VOCABULARY, EOD, T = 509, 3, 16
STEPS, ACCUMULATION, ROWS = 5, 2, 4
TOLERANCE = 5e-6
Curve = tuple[list[float], list[float], dict[str, Tensor]]


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


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
    """The order of parallel.build.build, with tensor parallelism and sharding in it."""
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


@pytest.mark.parametrize(
    ("tp", "sequence", "tied"),
    [(2, True, False), (2, False, True), slow(4, True, True)],
    ids=["two-sequence-untied", "two-whole-tied", "four-sequence-tied"],
)
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


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "sequence"), [("full", True), slow("full_attn", False)])
def test_compiling_blocks_equals_one_process(run_layout, compiler: None, mode: str, sequence: bool) -> None:
    cfg = config(num_layers=1)
    wanted = train(build(cfg), steps=1)

    def run(world: World) -> Any:
        found = worst(train(build(cfg, world, sequence=sequence, mode=mode, compiled=True), world, steps=1), wanted)
        counters = torch._dynamo.utils.counters
        assert counters["frames"]["ok"] >= 1, "nothing was compiled"
        if mode == "full":  # the other leaves the graph for what it recomputes
            assert not counters["graph_break"], dict(counters["graph_break"])
        return found

    assert_equal(run_layout(Layout(tp=2), run))


@pytest.mark.slow
def test_two_byte_types_stay_close_to_one_process(run_layout) -> None:
    wanted = train(build(config(), dtype=torch.bfloat16))
    exact = one_process()
    rounding = worst(wanted, exact)[0]

    def run(world: World) -> list[float]:
        return [
            worst(train(build(config(), world, sequence=sequence, dtype=torch.bfloat16), world), wanted)[0]
            for sequence in (True, False)
        ]

    assert rounding > 1e-4, "bf16 is not in use"
    for differences in run_layout(Layout(tp=2), run):
        assert max(differences) <= 2 * rounding


def test_sums_of_two_byte_types_round_once(run_layout) -> None:
    """256 + 1 + 1 + 1 is 260 in bf16, but 256 when each sum of two is rounded."""

    def run(world: World) -> list[float]:
        group = world.axis("tp").get_group()
        x_BTD = torch.full((2, 8, 1), 256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16)
        sums = [collectives.all_reduce(x_BTD, group), collectives.reduce_scatter_tokens(x_BTD, group)]
        assert [tuple(total.shape) for total in sums] == [(2, 8, 1), (2, 2, 1)]
        return [value for total in sums for value in total.unique().tolist()]

    assert run_layout(Layout(tp=4), run) == [[260.0, 260.0]] * 4


# What is where


@pytest.mark.parametrize("layout", [Layout(tp=4), slow(Layout(fsdp=2, tp=2))], ids=str)
def test_parameters_keep_their_names_and_whole_shapes(run_layout, layout: Layout) -> None:
    """Also of 509 words, which nothing divides; and each rank has its share."""
    names = {name: parameter.detach() for name, parameter in build(config()).named_parameters()}

    def run(world: World) -> tuple[int, int]:
        part = build(config(), world)
        assert part.head.weight is part.wte.weight
        found = dict(part.named_parameters())
        assert list(found) == list(names)
        for name, parameter in found.items():
            assert torch.equal(parameter.full_tensor(), names[name]), name
        return len(part.wte.weight.to_local()), part.blocks["0"].get_parameter("mlp.down.weight").to_local().numel()

    rows, numbers = zip(*run_layout(layout, run), strict=True)
    assert sum(rows) == VOCABULARY
    assert max(rows) - min(rows) <= 3
    assert numbers == (4 * 32 * 32 // 4,) * 4


def test_a_cut_stream_keeps_fewer_activations(run_layout) -> None:
    """Between the matrices everything is a share of the tokens, also what the first ones multiply."""

    def kept(part: GPT) -> int:
        own = {p.to_local().untyped_storage().data_ptr() for p in part.parameters()}
        storages: dict[int, Tensor] = {}

        def pack(saved: Tensor) -> Tensor:
            if saved.untyped_storage().data_ptr() not in own:
                storages.setdefault(saved.untyped_storage().data_ptr(), saved)
            return saved

        tokens, _ = batch(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            x_BTD = part.wte(tokens) + part.wpe(torch.arange(T))
            part.blocks["0"](x_BTD, None, None, None)
        return sum(saved.untyped_storage().nbytes() for saved in storages.values())

    def run(world: World) -> tuple[int, int]:
        split, entire = (build(config(), world, sequence=sequence) for sequence in (True, False))
        return kept(split), kept(entire)

    for split, entire in run_layout(Layout(tp=4), run):
        # The inputs of two norms and of the two matrices behind them: three quarters of each.
        assert entire - split >= 4 * (ROWS * T * 32 * 4) * 3 / 4


# Generation


@pytest.mark.parametrize("tp", [4])
def test_cached_decoding_gives_the_same_logits(run_layout, tp: int) -> None:
    """A prompt of odd length, shorter in one row, then token by token: nothing that ranks could cut evenly."""
    tokens, _ = batch(0, rows=2)

    @torch.no_grad()
    def decode(part: GPT) -> list[Tensor]:
        part.eval()
        cache = part.new_cache(2, T)
        assert cache.keys_LBNSH.shape[2] == 4 // (1 if type(part.ln_f.weight) is nn.Parameter else tp)
        cache.counts_B = torch.tensor([5, 3])
        found = [part(tokens[:, :5], cache=cache, last_only=True)]
        found += [part(tokens[:, at : at + 1], cache=cache, last_only=True) for at in range(5, 9)]
        return [*found, part(tokens[:, :7])]

    wanted = decode(build(config()))
    assert wanted[0].shape == (2, VOCABULARY)

    def run(world: World) -> float:
        found = decode(build(config(), world))
        assert [logits.shape for logits in found] == [logits.shape for logits in wanted]
        return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))

    assert max(run_layout(Layout(tp=tp), run)) <= 1e-5 * max(1, max(logits.abs().max().item() for logits in wanted))


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
def test_gradients_go_through_gathered_logits(run_layout, sequence: bool) -> None:
    tokens, more = batch(0)
    weights = torch.randn(ROWS, T, VOCABULARY, generator=torch.Generator().manual_seed(1))

    def curve(part: GPT, world: World | None = None) -> Curve:
        loss = (part(tokens, segments=more["segments"]) * weights).mean()
        loss.backward()
        if world is not None:
            tensor.finish_gradients(part, world.axis("tp"))
        return [loss.item()], [1.0], {name: whole(p.grad) for name, p in part.named_parameters()}

    wanted = curve(build(config()))
    assert_equal(
        run_layout(Layout(tp=2), lambda world: worst(curve(build(config(), world, sequence=sequence), world), wanted))
    )


def test_evaluating_without_gradients_reads_any_length(run_layout) -> None:
    tokens, more = batch(0)
    short = {key: value[:, :7] for key, value in more.items()}

    @torch.no_grad()
    def loss(part: GPT) -> float:
        return part.eval()(tokens[:, :7], **short).item()

    wanted = loss(build(config()))
    assert run_layout(Layout(tp=2), lambda world: loss(build(config(), world))) == pytest.approx([wanted] * 2, rel=1e-6)


@pytest.mark.slow
def test_many_chunks_of_the_loss_give_the_same_gradients(run_layout, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = one_process()
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 7 * 255)  # 64 rows: 9 chunks of 7 and one of 1
    assert_equal(run_layout(Layout(tp=2), lambda world: worst(train(build(config(), world), world), wanted)))


@pytest.mark.parametrize("wrong", [-1, 61])
def test_an_id_outside_the_vocabulary_is_refused_as_on_one_process(run_layout, wrong: int) -> None:
    """By the rank at that end of the vocabulary: the others would wait for it. Tokens, and labels."""
    tokens, more = batch(0, resets=False)

    def refusals(world: World | None = None) -> list[str]:
        part = build(config(vocab_size=61), world) if world else build(config(vocab_size=61))
        if world and world.rank != (0 if wrong < 0 else 1):
            return []
        said = []
        for at in range(2):
            ids, labels = tokens.clamp(max=60), more["labels"].clamp(max=60)
            (ids, labels)[at][0, 0] = wrong
            try:
                part(ids, labels=labels)
            except (IndexError, RuntimeError) as error:
                said.append(type(error).__name__)
        return said

    assert sorted(run_layout(Layout(tp=2), refusals)) == [[], refusals()]


# Dropout

DROPPING = {"dropout_embed": 0.1, "dropout_hidden": 0.2, "dropout_attention": 0.3}


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
def test_ranks_drop_differently_what_is_cut_and_alike_what_is_whole(run_layout, sequence: bool) -> None:
    def run(world: World) -> dict[str, list[float]]:
        part = build(config(**DROPPING), world, sequence=sequence)
        attention = part.blocks["0"].get_submodule("attn")
        torch.manual_seed(5)
        stream = part.dropout(torch.ones(4, 64, 32))
        again = part.dropout(torch.ones(4, 64, 32))
        q_BNTH = torch.zeros(4, 2, 64, 64)
        heads = attention.core(q_BNTH, q_BNTH, torch.eye(64).expand(4, 2, 64, 64), torch.ones(64, 64).bool())
        assert not torch.equal(stream, again)
        assert set(stream.unique().tolist()) == {0.0, torch.tensor(1 / 0.9).item()}
        kept = {"stream": stream > 0, "heads": heads > 0, "after": torch.rand(64) > 0.5}
        shares = {"stream": 0.9, "heads": 0.7}
        for name, share in shares.items():
            assert abs(kept[name].float().mean().item() - share) < 0.015, name
        return {name: mask.flatten().tolist() for name, mask in kept.items()}

    first, second = run_layout(Layout(tp=2), run)
    assert (first["stream"] != second["stream"]) == sequence
    assert first["heads"] != second["heads"]
    assert first["after"] == second["after"]
    if sequence:  # independent: both keep a token as often as chance has it
        both = sum(a and b for a, b in zip(first["stream"], second["stream"], strict=True)) / len(first["stream"])
        assert abs(both - 0.81) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("sequence", "attention"), [(True, "auto"), slow(False, "math")])
def test_dropout_repeats_itself_also_where_it_is_recomputed(run_layout, sequence: bool, attention: str) -> None:
    def run(world: World) -> list[float]:
        def curve(mode: str = "none", seed: int = 1) -> Curve:
            cfg = config(attention=attention, **DROPPING)
            return train(build(cfg, world, sequence=sequence, mode=mode), world, steps=2, seed=seed)

        plain, other = curve(), curve(seed=2)
        assert abs(plain[0][0] - one_process()[0][0]) > 1e-3, "dropout does nothing here"
        assert plain[0] != other[0]
        for mode in ("none", "full", "full_attn", "core_attn"):
            found = curve(mode)
            assert found[0] == plain[0], mode
            for name, gradient in found[2].items():
                assert torch.equal(gradient, plain[2][name]), (mode, name)
        # What is whole on each rank has the same gradient on each.
        return [*plain[0], *plain[1], *(gradient.sum().item() for gradient in plain[2].values())]

    one_process()
    first, second = run_layout(Layout(tp=2), run)
    assert first == second


@pytest.mark.slow
def test_dropout_is_the_same_in_compiled_and_recomputed_blocks(run_layout, compiler: None) -> None:
    cfg = config(num_layers=1, **DROPPING)

    def run(world: World) -> Any:
        eager = train(build(cfg, world), world, steps=1, seed=1)
        compiled = train(build(cfg, world, mode="core_attn", compiled=True), world, steps=1, seed=1)
        assert torch._dynamo.utils.counters["frames"]["ok"] >= 1, "nothing was compiled"
        return worst(compiled, eager)

    assert_equal(run_layout(Layout(tp=2), run))


# What would go wrong


def leave_out(what: str) -> None:
    """In a rank's own process: it forgets one of its duties."""
    if what == "sum of outputs":
        collectives._SumOverRanks.forward = staticmethod(lambda ctx, x, group: x.clone())
    elif what == "sum of input gradients":
        collectives._CopyToRanks.backward = staticmethod(lambda ctx, grad: (grad, None))
    elif what == "sum of token shares":
        collectives.reduce_scatter_tokens = lambda x, group: x.chunk(group.size(), 1)[group.rank()].contiguous()
    elif what == "sum over the vocabulary":
        vocabulary.distributed = type(
            "Silent", (), {"all_reduce": lambda *_, **__: None, "ReduceOp": distributed.ReduceOp}
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "sequence"),
    [
        ("finish_gradients", True),
        ("sum of token shares", True),
        ("sum of outputs", False),
        ("sum of input gradients", False),
        ("sum over the vocabulary", True),
    ],
)
def test_leaving_out_one_sum_is_noticed(run_layout, what: str, sequence: bool) -> None:
    wanted = one_process()

    def run(world: World) -> Any:
        leave_out(what)
        finish = (lambda part, tp: None) if what == "finish_gradients" else tensor.finish_gradients
        return worst(train(build(config(), world, sequence=sequence), world, finish=finish), wanted)

    for losses, _, gradients in run_layout(Layout(tp=2), run):
        assert losses > 10 * TOLERANCE
        assert gradients > 100 * TOLERANCE


# Refusals


def test_a_length_that_ranks_do_not_divide_is_refused_in_training(run_layout) -> None:
    def run(world: World) -> list[str]:
        part = build(config(), world)
        tokens, _ = batch(0)
        texts = []
        for call in (lambda: part(tokens[:, :7]), lambda: part(tokens, last_only=True)):
            with pytest.raises(UsageError) as error:
                call()
            texts.append(str(error.value))
        return texts

    for length, last in run_layout(Layout(tp=2), run):
        assert "7 tokens in a row cannot be cut among the 2 ranks" in length
        assert "last_only" in last
