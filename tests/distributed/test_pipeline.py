"""A pipeline computes what one process computes: losses, gradient norms, evaluation and generation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gptworks.config.derive import Layout
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.data.loader import Batch, Borders, collate
from gptworks.data.windows import Sample
from gptworks.errors import ConfigError, UsageError
from gptworks.generate.contexts import Contexts
from gptworks.model import GPT, tie
from gptworks.model.init import seed_of
from gptworks.parallel import pipeline, recompute, stage_memory
from gptworks.parallel.apply import FreshWeights
from gptworks.parallel.launch import World
from gptworks.parallel.parts import canonical_name
from gptworks.parallel.pipeline import Pipeline
from gptworks.parallel.stages import assign_layers, check_micro_batches

TOLERANCE = 5e-6
STEPS = 5
CLIP = 0.5
SEED = 7
EOD = 0
LENGTH = 12
ALL_BORDERS = Borders(EOD, True, True, True)

# (schedule, stages per rank)
SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("looped_bfs", 2),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
]


def config(**changes: Any) -> ModelConfig:
    shape = {"num_layers": 4, "hidden_size": 16, "num_heads": 2, "vocab_size": 61, "max_positions": 16}
    return ModelConfig(**(shape | changes))


def micro_batch(number: int, rows: int = 2, borders: Borders = ALL_BORDERS) -> Batch:
    """Documents end at other places in each, so that the numbers of scored tokens differ."""
    tokens = np.random.default_rng(number).integers(0, 61, (rows, LENGTH + 1))
    tokens[:, 1 : 1 + number % 4] = EOD
    return collate([Sample(row, None) for row in tokens], 0, borders)


def batches_of(step: int, data_rank: int = 0, num_micro_batches: int = 4) -> list[Batch]:
    return [micro_batch(1000 * step + 100 * data_rank + number) for number in range(num_micro_batches)]


def global_scored(step: int, data_parallel: int, num_micro_batches: int) -> int:
    return sum(b.num_scored for r in range(data_parallel) for b in batches_of(step, r, num_micro_batches))


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, fused=True)


@functools.cache
def one_process(cfg: ModelConfig, data_parallel: int = 1, num_micro_batches: int = 4) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    model = GPT(cfg)
    fill([model], cfg)
    optimizer = optimizer_of(list(model.parameters()))
    found = []
    for step in range(STEPS):
        num_scored = global_scored(step, data_parallel, num_micro_batches)
        loss = 0.0
        for rank in range(data_parallel):
            for batch in batches_of(step, rank, num_micro_batches):
                loss_sum = model(batch.tokens, **batch.keywords()) / num_scored
                loss_sum.backward()
                loss += loss_sum.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss, norm.item()))
    return found


def named(parts: Sequence[GPT]) -> list[tuple[str, nn.Parameter]]:
    """By the names of the whole model."""
    return [(canonical_name(n, tied=part.cfg.tied), p) for part in parts for n, p in part.named_parameters()]


def counted(parts: Sequence[GPT]) -> list[nn.Parameter]:
    """Without the copy of a tied embedding."""
    return [p for part in parts for n, p in part.named_parameters() if canonical_name(n, tied=part.cfg.tied) == n]


@torch.no_grad()
def fill(parts: Sequence[GPT], cfg: ModelConfig) -> None:
    weights = FreshWeights(InitConfig(), cfg.num_layers, SEED)
    for name, parameter in named(parts):
        whole = weights.tensor(name, parameter.shape)
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(whole)


def build(
    world: World,
    cfg: ModelConfig,
    schedule: str,
    virtual: int,
    *,
    recompute_mode: str = "none",
    backend: str = "",
    reshard: bool = False,
) -> Pipeline:
    parts = []
    for stage in pipeline.stages_of(world.place.pp, world.layout.pp, virtual, schedule):
        with torch.device("meta"):
            part = GPT(cfg)
        pipeline.keep_stage(part, stage, world.layout.pp * virtual)
        recompute.apply_inside(part, recompute_mode)
        if backend:
            for block in part.blocks.values():
                block.forward = torch.compile(block.forward, backend=backend)
        recompute.apply_around(part, recompute_mode)
        if world.axis("fsdp") is not None:
            shard(part, world, reshard)
        part.to_empty(device=world.device)
        tie(part)
        parts.append(part)
    fill(parts, cfg)
    return Pipeline(parts, world, schedule=schedule)


def shard(part: GPT, world: World, reshard: bool) -> None:
    mesh = world.axis("fsdp")
    for module in (*part.blocks.values(), part):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def global_norm(run: Pipeline, world: World) -> float:
    squares = torch.zeros(())
    for parameter in counted(run.parts):
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        squares += gradient.double().square().sum().float()
    for axis in ("pp", "fsdp"):
        mesh = world.axis(axis)
        if mesh is not None:
            distributed.all_reduce(squares, group=mesh.get_group())
    return squares.sqrt().item()


def train(
    run: Pipeline,
    world: World,
    *,
    num_micro_batches: int = 4,
    steps: int = STEPS,
    seed_dropout: Callable[[int], Callable[[int, int], None]] | None = None,
    sum_tied: bool = True,
) -> list[tuple[float, float]]:
    parameters = [parameter for part in run.parts for parameter in part.parameters()]
    optimizer = optimizer_of(parameters)
    found = []
    for step in range(steps):
        num_scored = global_scored(step, world.data_parallel, num_micro_batches)
        batches = batches_of(step, world.data_rank, num_micro_batches)
        hook = None if seed_dropout is None else seed_dropout(step)
        loss_sums = run.step(batches, 1 / num_scored, seed_dropout=hook)
        assert len(loss_sums) == (num_micro_batches if run.has_last else 0)
        loss = run.share_losses(loss_sums, num_micro_batches).sum() / num_scored
        if world.axis("fsdp") is not None:
            distributed.all_reduce(loss, group=world.axis("fsdp").get_group())
        if sum_tied:
            run.sum_tied_gradients()
        norm = global_norm(run, world)
        torch._foreach_mul_([p.grad for p in parameters], min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm))
    return found


def difference(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    return float(np.abs(np.array(found)[:, 0] - np.array(expected)[:, 0]).max())


def norm_difference(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    return float(np.abs(np.array(found)[:, 1] - np.array(expected)[:, 1]).max())


def assert_equal(results: list[Any], expected: list[tuple[float, float]]) -> None:
    for found in results:
        assert difference(found, expected) < TOLERANCE
        assert norm_difference(found, expected) < 2e-5


Kind = tuple[ModelConfig, str, int, int]  # model, schedule, stages per rank, micro-batches


def assert_trained_like_one_process(run_layout: Any, pp: int, kinds: list[Kind], steps: int = STEPS) -> None:
    """All kinds in one launch, one after the other."""

    def run(world: World) -> list[Any]:
        return [
            train(build(world, cfg, schedule, virtual), world, num_micro_batches=number, steps=steps)
            for cfg, schedule, virtual, number in kinds
        ]

    ranks = run_layout(Layout(pp=pp), run)
    for at, (cfg, _, _, number) in enumerate(kinds):
        assert_equal([curves[at] for curves in ranks], one_process(cfg, num_micro_batches=number)[:steps])


def test_two_ranks_train_like_one_process(run_layout) -> None:
    """By every schedule; the embeddings of the first and the last stage tied, where they are on one rank too, or not;
    and with layers that the stages do not divide."""
    tied = [(config(), schedule, virtual, 4) for schedule, virtual in SCHEDULES]
    untied = [(config(tied=False), schedule, virtual, 4) for schedule, virtual in (("1f1b", 1), ("zbv", 2))]
    uneven = [(config(num_layers=5), schedule, virtual, 4) for schedule, virtual in (("interleaved", 2), ("zbv", 2))]
    assert_trained_like_one_process(run_layout, 2, tied + untied + uneven)


def test_four_ranks_train_like_one_process(run_layout) -> None:
    """With ranks between the first and the last, more micro-batches than they need and just enough."""
    kinds: list[Kind] = [
        (config(num_layers=5), "1f1b", 1, 8),
        (config(num_layers=8), "interleaved", 2, 8),
        (config(), "zero_bubble", 1, 4),
        (config(num_layers=8, tied=False), "zbv", 2, 4),
    ]
    assert_trained_like_one_process(run_layout, 4, kinds, steps=3)


def test_without_the_sum_of_tied_gradients_the_losses_differ(run_layout) -> None:
    cfg = config()
    results = run_layout(Layout(pp=2), lambda world: train(build(world, cfg, "1f1b", 1), world, sum_tied=False))
    assert difference(results[0], one_process(cfg)) > 100 * TOLERANCE


def test_a_tied_embedding_counted_twice_gives_another_norm(run_layout) -> None:
    """The control of the norm: the same steps, whose first norm has both copies."""
    cfg = config()

    def run(world: World) -> list[tuple[float, float]]:
        globals()["counted"] = lambda parts: [p for part in parts for p in part.parameters()]
        return train(build(world, cfg, "1f1b", 1), world, steps=1)

    assert norm_difference(run_layout(Layout(pp=2), run)[0], one_process(cfg)[:1]) > 1e-3


def test_sharded_stages_train_like_one_process(run_layout) -> None:
    cfg = config()
    kinds = [("1f1b", 1, True), ("zero_bubble", 2, False), ("zbv", 2, False)]

    def run(world: World) -> list[Any]:
        curves = []
        for schedule, virtual, reshard in kinds:
            trained = build(world, cfg, schedule, virtual, reshard=reshard)
            trained.eval().loss_sum(micro_batch(5))  # leaves nothing gathered behind
            assert all(isinstance(parameter, DTensor) for _, parameter in named(trained.parts))
            curves.append(train(trained.train(), world, steps=3))
        return curves

    for curves in run_layout(Layout(pp=2, fsdp=2), run):
        assert_equal(curves, one_process(cfg, data_parallel=2)[:3])


def test_recompute(run_layout) -> None:
    cfg = config(attention="math")
    kinds = [("1f1b", 1, "core_attn"), ("interleaved", 2, "full_attn"), ("zero_bubble", 2, "full")]

    def run(world: World) -> list[Any]:
        return [train(build(world, cfg, *kind, recompute_mode=mode), world, steps=3) for *kind, mode in kinds]

    for curves in run_layout(Layout(pp=2), run):
        assert_equal(curves, one_process(cfg)[:3])


def test_compiled_blocks_are_refused_where_gradients_come_in_two_turns(run_layout) -> None:
    def compiled(world: World) -> None:
        with pytest.raises(ConfigError, match=r"train\.compile: with parallel\.schedule: zero_bubble"):
            build(world, config(), "zero_bubble", 1, backend="aot_eager", recompute_mode="full")

    run_layout(Layout(pp=2), compiled)


def test_bf16_stages_give_the_losses_of_one_bf16_process(run_layout) -> None:
    cfg = config()

    def sums(model: Any) -> list[float]:
        return [model(batch.tokens, **batch.keywords()).item() for batch in batches_of(0)]

    def run(world: World) -> tuple[list[float], list[float]]:
        trained = build(world, cfg, "1f1b", 1)
        for part in trained.parts:
            part.compute_dtype = torch.bfloat16
        return sums(trained), trained.share_losses(trained.step(batches_of(0), 1.0), 4).tolist()

    model = GPT(cfg, torch.bfloat16)
    fill([model], cfg)
    for read, trained_on in run_layout(Layout(pp=2), run):
        assert read == trained_on == sums(model)


def test_a_stage_may_send_on_a_cut_of_the_sequence(run_layout) -> None:
    """As tensor parallel stages do. Causal attention makes the first half of a row a row of its own."""
    cfg = config()
    half = LENGTH // 2
    cut = [micro_batch(number, borders=Borders(EOD, True, False, False)) for number in range(2)]

    def halved(_part: Any, args: tuple[Tensor, ...], keywords: dict[str, Any]) -> Any:
        return args, keywords | {"labels": keywords["labels"][:, :half]}

    def run(world: World) -> tuple[list[float], list[float]]:
        trained = build(world, cfg, "1f1b", 1)
        if trained.has_first:
            trained.parts[0].register_forward_hook(lambda _part, _args, hidden: hidden[:, :half])
        else:
            trained.parts[0].register_forward_pre_hook(halved, with_kwargs=True)
        return trained.share_losses(trained.step(cut, 1.0), 2).tolist(), trained.loss_sums(cut).tolist()

    model = GPT(cfg)
    fill([model], cfg)
    expected = [model(batch.tokens[:, :half], labels=batch.labels[:, :half]).item() for batch in cut]
    for trained_on, read in run_layout(Layout(pp=2), run):
        assert trained_on == pytest.approx(expected, abs=1e-4)
        assert read == pytest.approx(expected, abs=1e-4)


def seeded(step: int) -> Callable[[int, int], None]:
    def seed(number: int, stage: int) -> None:
        torch.manual_seed(seed_of(SEED, "dropout", step, number, stage))

    return seed


DROPPING = {"dropout_embed": 0.1, "dropout_hidden": 0.1, "dropout_attention": 0.1}


@pytest.mark.parametrize(
    ("virtual", "names"), [(1, ["gpipe", "1f1b"]), (2, ["interleaved", "looped_bfs", "zero_bubble", "zbv"])]
)
def test_dropout_does_not_depend_on_the_schedule(run_layout, virtual: int, names: list[str]) -> None:
    cfg = config(**DROPPING)

    def run(world: World) -> list[Any]:
        curves = []
        for name in [names[0], *names]:
            torch.manual_seed(len(curves))  # what was drawn before must not matter
            curves.append(train(build(world, cfg, name, virtual), world, steps=3, seed_dropout=seeded))
        again = build(world, cfg, names[0], virtual, recompute_mode="full")
        return [*curves, train(again, world, steps=3, seed_dropout=seeded)]

    first, *others, recomputed = run_layout(Layout(pp=2), run)[0]
    assert first == others[0]
    assert_equal(others, first)
    assert difference(recomputed, first) < 1e-7
    assert difference(first, one_process(config())[:3]) > 1e-3


def test_without_a_seed_per_micro_batch_dropout_depends_on_the_schedule(run_layout) -> None:
    cfg = config(**DROPPING)

    def run(world: World) -> list[Any]:
        curves = []
        for name in ("interleaved", "looped_bfs"):
            torch.manual_seed(SEED)
            curves.append(train(build(world, cfg, name, 2), world, steps=2))
        return curves

    interleaved, looped = run_layout(Layout(pp=2), run)[0]
    assert difference(interleaved, looped) > 1e-3


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_evaluation_of_any_batch_size_between_steps(run_layout, schedule: str, virtual: int) -> None:
    cfg = config()
    held_out = [micro_batch(1, rows=3), micro_batch(2, rows=3), micro_batch(3, rows=1)]

    def run(world: World) -> Any:
        trained = build(world, cfg, schedule, virtual)
        before = trained.eval().loss_sums(held_out).tolist()
        curve = train(trained.train(), world)
        one = trained.eval().loss_sum(held_out[2]).item()
        as_a_model = trained(held_out[2].tokens, **held_out[2].keywords()).item()
        return before, curve, one, as_a_model

    model = GPT(cfg)
    fill([model], cfg)
    expected = [model(batch.tokens, **batch.keywords()).item() for batch in held_out]
    results = run_layout(Layout(pp=2), run)
    for before, _, one, as_a_model in results:
        assert before == pytest.approx(expected, abs=1e-4)  # sums of 36 and fewer losses
        assert one == as_a_model == results[0][2]
        assert abs(one - expected[2]) > 0.01
    assert_equal([curve for _, curve, _, _ in results], one_process(cfg))


@pytest.mark.parametrize(("pp", "schedule", "virtual"), [(4, "1f1b", 1), (2, "interleaved", 2), (2, "zbv", 2)])
def test_cached_generation_gives_the_tokens_of_one_process(run_layout, pp: int, schedule: str, virtual: int) -> None:
    cfg = config()
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 4]]

    def greedy(model: Any) -> tuple[list[list[int]], list[float]]:
        contexts = Contexts(model, prompts, new_tokens=14, vocab_size=cfg.vocab_size)
        following = contexts.read_prompts()
        seen = []
        for _ in range(14):  # beyond the 16 positions: rows leave the cache and are read anew
            seen.append(torch.stack(list(following)))
            chosen = {row: int(logits.argmax()) for row, logits in enumerate(following)}
            following = list(contexts.read(chosen).values())
        contexts.select([2, 0])
        seen.append(torch.cat(list(contexts.read({0: 1, 1: 2}).values())))
        return contexts.tokens, torch.cat([one.flatten() for one in seen]).tolist()

    def sharper(parts: Sequence[GPT]) -> None:
        fill(parts, cfg)
        with torch.no_grad():
            for _, parameter in named(parts):
                parameter.mul_(3)

    def run(world: World) -> tuple[list[list[int]], list[float]]:
        model = build(world, cfg, schedule, virtual).eval()
        sharper(model.parts)
        whole = model.logits(torch.tensor([[1, 2, 3]]), last_only=False)
        assert whole.shape == (1, 3, cfg.vocab_size)
        return greedy(model)

    model = GPT(cfg).eval()
    sharper([model])
    with torch.no_grad():
        tokens, logits = greedy(model)
    for found_tokens, found_logits in run_layout(Layout(pp=pp), run):
        assert found_tokens == tokens
        assert found_logits == pytest.approx(logits, rel=0, abs=1e-5)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2)])
def test_received_tensors_are_held_no_longer_than_the_schedule_asks(run_layout, schedule: str, virtual: int) -> None:
    cfg = config()
    num_micro_batches = 16

    def most_alive(world: World, keep: bool) -> tuple[Any, int, int]:
        made: list[StorageWeakRef] = []
        most = 0

        def counted(make: Any) -> Any:
            def wrapped(*args: Any) -> Tensor:
                nonlocal most
                tensor = make(*args)
                made.append(StorageWeakRef(tensor.untyped_storage()))
                most = max(most, sum(not one.expired() for one in made))
                return tensor

            return wrapped

        for module in (stage_memory, torch_stage):  # ours, and torch's own that makes them all at once
            module._make_tensor_from_meta = counted(module._make_tensor_from_meta)
        if keep:
            stage_memory._let_go = lambda infos: None
        trained = build(world, cfg, schedule, virtual)
        curve = train(trained, world, num_micro_batches=num_micro_batches, steps=2)
        return curve, most, asked_for(trained)

    def asked_for(trained: Pipeline) -> int:
        """At most how many are received and not yet done with, read off the order of the schedule."""
        prepared = trained._prepared[1]
        held: set[tuple[str, int, int]] = set()
        most = 0
        for action in getattr(prepared, "pipeline_order_with_comms", prepared.pipeline_order)[trained.pp_rank]:
            if action is None:
                continue
            number, name, micro_batch = action.stage_index, action.computation_type.name, action.microbatch_index
            if name in {"RECV_F", "RECV_B"}:
                held.add((name, number, micro_batch))
            elif name == "FORWARD" and number > 0:  # an order without receives: one comes right before each use
                held.add(("RECV_F", number, micro_batch))
            elif name == "FULL_BACKWARD" and number < trained.num_stages - 1:
                held.add(("RECV_B", number, micro_batch))
            most = max(most, len(held))
            if name in {"FULL_BACKWARD", "BACKWARD_WEIGHT"}:
                held -= {(kind, number, micro_batch) for kind in ("RECV_F", "RECV_B")}
        return most

    for curve, most, asked in run_layout(Layout(pp=2), lambda world: most_alive(world, keep=False)):
        assert difference(curve, one_process(cfg, num_micro_batches=num_micro_batches)[:2]) < TOLERANCE
        assert most <= asked + 1 < num_micro_batches  # 1: the schedule still names the one it took last
    if schedule == "1f1b":
        for _, most, _ in run_layout(Layout(pp=2), lambda world: most_alive(world, keep=True)):
            assert most >= num_micro_batches  # the control: what torch's own stage holds


def test_a_step_of_another_size_or_shape_follows(run_layout) -> None:
    cfg = config()

    def run(world: World) -> list[float]:
        trained = build(world, cfg, "1f1b", 1)
        found = []
        for numbers, rows in (([0, 1], 2), ([0, 1, 2], 2), ([0, 1], 1)):
            batches = [micro_batch(number, rows) for number in numbers]
            found += trained.share_losses(trained.step(batches, 1.0), len(batches)).tolist()
        with pytest.raises(UsageError, match="1 of 2 micro-batches of a step have positions"):
            trained.step([micro_batch(0), micro_batch(1, borders=Borders(EOD, True, False, True))], 1.0)
        with pytest.raises(UsageError, match="17 tokens in a row, but the model has 16 positions"):
            trained(torch.zeros(1, 17, dtype=torch.long))
        with pytest.raises(UsageError, match=r"shapes \[\(1, 12\), \(2, 12\)\] in one step"):
            trained.step([micro_batch(0, 1), micro_batch(1, 2)], 1.0)
        return found

    model = GPT(cfg)
    fill([model], cfg)
    kinds = [(0, 2), (1, 2), (0, 2), (1, 2), (2, 2), (0, 1), (1, 1)]
    expected = [model(b.tokens, **b.keywords()).item() for b in (micro_batch(*kind) for kind in kinds)]
    for found in run_layout(Layout(pp=2), run):
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(5, 2, [3, 2]), (5, 4, [1, 1, 2, 1]), (7, 4, [2, 2, 2, 1]), (8, 4, [2, 2, 2, 2]), (3, 3, [1, 1, 1])],
)
def test_layers_are_contiguous_and_the_last_stage_has_the_fewest(
    num_layers: int, num_stages: int, sizes: list[int]
) -> None:
    stages = assign_layers(num_layers, num_stages)
    assert [len(layers) for layers in stages] == sizes
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))


def test_a_stage_keeps_its_names_and_nothing_else() -> None:
    parts = []
    for number in range(2):
        part = GPT(config(num_layers=3))
        pipeline.keep_stage(part, number, 2)
        parts.append(part)
    first, last = ({name.split(".attn.")[0] for name, _ in part.named_parameters() if "." in name} for part in parts)
    assert {"wte.weight", "wpe.weight", "blocks.0", "blocks.1"} <= first
    assert {"head.weight", "ln_f.weight", "blocks.2"} <= last
    assert "head.weight" not in first
    assert "blocks.0" not in last
    whole = {name for name, _ in GPT(config(num_layers=3)).named_parameters()}
    assert len(counted(parts)) == len(whole)
    assert sorted(name for name, _ in named(parts)) == sorted([*whole, "wte.weight"])
    assert parts[1].new_cache(2, 4).keys_LBNSH.shape[0] == 1


def test_a_cut_of_the_sequence_advances_a_cache_by_all_tokens() -> None:
    part = GPT(config())
    pipeline.keep_stage(part, 1, 2)
    cache = part.new_cache(1, 8)
    part(torch.zeros(1, 3, 16), positions=torch.arange(6)[None], cache=cache)
    assert (cache.used, cache.lengths_B.tolist()) == (6, [6])


def test_what_cannot_be_piped_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="4 pipeline stages, but the model has 3 layers"):
        assign_layers(3, 4)
    with pytest.raises(ConfigError, match=r"3 micro-batches .* fewer than the 4 pipeline stages"):
        check_micro_batches("gpipe", 3, 4)
    with pytest.raises(ConfigError, match=r"6 micro-batches .* not a multiple of pp = 4.* Nearest: 4 or 8\."):
        check_micro_batches("interleaved", 6, 4)
    check_micro_batches("1f1b", 5, 4)
    with pytest.raises(
        ConfigError, match=r"virtual_stages: 2, but schedule 1f1b needs 1\. .* interleaved or looped_bfs"
    ):
        pipeline.stages_of(0, 2, 2, "1f1b")
    with pytest.raises(ConfigError, match="virtual_stages: 3, but schedule zbv needs 2"):
        pipeline.stages_of(0, 2, 3, "zbv")
    with pytest.raises(ConfigError, match=r"parallel\.schedule: 2f2b is unknown"):
        pipeline.stages_of(0, 2, 1, "2f2b")
    with pytest.raises(UsageError, match="2 ranks or more in pp, but the layout is 1"):
        Pipeline([GPT(config())], World(torch.device("cpu")))
