"""Run by a test in a process of its own: `python fake_steps.py LIBRARY WHAT`. Prints what was seen as JSON."""

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import fake_cuda

fake_cuda.load(sys.argv[1])

import numpy as np  # noqa: E402
import torch  # noqa: E402
from fake_cuda import Seen, Watch  # noqa: E402
from torch import distributed  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gptworks.checkpoint.background import Background  # noqa: E402
from gptworks.config.checks import fit_layout  # noqa: E402
from gptworks.config.derive import BatchPlan, Layout, solve_batch, solve_layout  # noqa: E402
from gptworks.config.load import from_dict  # noqa: E402
from gptworks.data.loader import Batch, Batches, EodPolicy  # noqa: E402
from gptworks.data.windows import Sample  # noqa: E402
from gptworks.evaluate.heldout import held_out_loss  # noqa: E402
from gptworks.launch import process_group  # noqa: E402
from gptworks.launch.world import World  # noqa: E402
from gptworks.model import loss, masks  # noqa: E402
from gptworks.parallel.parts import Part, SingleStage  # noqa: E402
from gptworks.train import optim  # noqa: E402
from gptworks.train import step as steps  # noqa: E402
from gptworks.train.precision import LossScaler  # noqa: E402
from gptworks.train.prefetch import Prefetch  # noqa: E402
from gptworks.train.run import build_part  # noqa: E402

fake_cuda.settle()
DEVICE = torch.device("cuda", 0)
VOCAB, LENGTH, EOD = 512, 64, 7


@dataclass(frozen=True)
class Case:
    """Sections of a configuration; `ranks`: those that are tried, one after the other, each as if it were alone."""

    sections: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)
    evaluates: bool = False
    waits: bool = False


def parallel(ranks: tuple[int, ...] = (0,), /, *, evaluates: bool = False, **layout: Any) -> Case:
    return Case({"parallel": layout}, ranks, evaluates)


DROPOUT = {"dropout_embed": 0.1, "dropout_hidden": 0.1, "dropout_attention": 0.1}
ENDS = (0, 1)  # of a pipeline of two
CASES = {
    "fp32": Case(evaluates=True),
    "bf16": Case({"precision": {"compute": "bf16"}}),
    "fp16": Case({"precision": {"compute": "fp16"}}),
    "dropout": Case({"model": DROPOUT}),
    "math attention": Case({"model": {**DROPOUT, "attention": "math"}}),
    "recompute full": Case({"train": {"recompute": "full"}, "model": DROPOUT}),
    "recompute full_attn": Case({"train": {"recompute": "full_attn"}, "model": DROPOUT}),
    "recompute core_attn": Case({"train": {"recompute": "core_attn"}, "model": DROPOUT}),
    "segments": Case({"data": {"reset_positions": True, "reset_attention": True, "mask_eod": True}}),
    "dp2": parallel(dp=2, evaluates=True),
    "zero 0": parallel(fsdp=2, zero=0),
    "zero 1": parallel(fsdp=2, zero=1),
    "zero 2": parallel(fsdp=2, zero=2),
    "zero 3": parallel(fsdp=2, zero=3, evaluates=True),
    "zero 3 bf16": Case({"parallel": {"fsdp": 2, "zero": 3}, "precision": {"compute": "bf16"}}),
    # FSDP waits for each gradient to arrive in the memory of the host: devices are looked at, waiting is not.
    "offload": Case({"parallel": {"fsdp": 2, "zero": 3, "offload": True}}, waits=True),
    "hsdp": parallel(dp=2, fsdp=2, zero=3),
    "tp2": parallel(tp=2, sequence=False),
    "tp2 sequence": Case({"parallel": {"tp": 2, "sequence": True}, "model": DROPOUT}),
    "tp2 bf16": Case({"parallel": {"tp": 2}, "precision": {"compute": "bf16"}}),
    "pp2 gpipe": parallel(ENDS, pp=2, schedule="gpipe"),
    "pp2 1f1b": parallel(ENDS, pp=2, schedule="1f1b"),
    "pp2 interleaved": parallel(ENDS, pp=2, schedule="interleaved", virtual_stages=2),
    "pp2 zero bubble": parallel(ENDS, pp=2, schedule="zero_bubble", virtual_stages=2),
    "pp2 fsdp2 tp2": Case(
        {"parallel": {"pp": 2, "fsdp": 2, "tp": 2}, "precision": {"compute": "bf16"}, "model": DROPOUT}, (0, 7)
    ),
}


class Numbers:
    """Samples of ids that count up, with an end of a document now and then."""

    per_epoch = 1000
    sources = ()

    def at(self, first: int, count: int) -> list[Sample]:
        return [Sample(np.arange(i, i + LENGTH + 1, dtype=np.int64) % 32, None) for i in range(first, first + count)]


def configured(sections: dict[str, Any]) -> Any:
    layout = sections.get("parallel", {})
    num_stages = layout.get("pp", 1) * layout.get("virtual_stages", 1)
    model = {"num_layers": num_stages, "hidden_size": 64, "num_heads": 4, "vocab_size": VOCAB, "max_positions": LENGTH}
    usual: dict[str, dict[str, Any]] = {
        "model": model,
        "data": {"seq_len": LENGTH},
        "batch": {"micro_size": 2, "accumulation": 2},
        "train": {"steps": 4, "compile": False},
    }
    names = usual.keys() | sections.keys()
    return from_dict({name: usual.get(name, {}) | sections.get(name, {}) for name in names}, "a test")


@contextlib.contextmanager
def world_of(layout: Layout, rank: int) -> Iterator[World]:
    """As process_group.imagined has it, on a GPU."""
    memory = FakeTensorMode(allow_non_fake_inputs=True)
    if layout.world_size == 1:
        yield World(DEVICE, layout, memory=memory)
        return
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield World(DEVICE, layout, rank, process_group._mesh(layout, "cuda"), memory)
    finally:
        distributed.destroy_process_group()
        _clear_sharding_prop_cache()


class AnyWeights:
    def tensor(self, name: str, shape: torch.Size, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        whole = torch.empty(shape)
        return whole if region is None else whole[region]


def run(case: Case, rank: int = 0) -> dict[str, Seen]:
    """One step of training, the second, as a run makes it; perhaps an evaluation."""
    cfg = configured(case.sections)
    sizes = [size for size in case.sections.get("parallel", {}).items() if size[0] in vars(Layout())]
    layout = solve_layout(cfg.parallel, int(np.prod([size for _, size in sizes])) if sizes else 1)
    fitted, plan = fit_layout(cfg, layout), solve_batch(cfg.batch, layout.data_parallel)
    borders = EodPolicy.from_config(cfg.data, EOD)
    found = {}
    with world_of(layout, rank) as world, contextlib.ExitStack() as stack:
        if world.mesh is not None:
            stack.enter_context(fake_cuda.fsdp_allocates_in(world.memory))
        part = build_part(cfg, world, fitted, AnyWeights())
        batches = Batches(Numbers(), plan, borders, vocab_size=VOCAB, data_rank=world.data_rank)
        reader = stack.enter_context(contextlib.closing(Prefetch(batches, DEVICE)))
        stack.enter_context(world.memory)
        if not isinstance(part, SingleStage):
            # The other stages cannot be asked what they send.
            part.hidden_len = LENGTH // (layout.tp if fitted.sequence else 1)
        part.train()
        optimizer = optim.build(part, cfg.optim)
        optim.set_moments(part, optimizer, optim.moments(part, optimizer), updates=1)
        scaler = LossScaler(cfg.precision.scaler, enabled=cfg.precision.compute == "fp16")
        # What FSDP and a pipeline do once, they do in the first step.
        for number in (1, 2) if world.mesh is not None else (1,):
            micro_batches = reader.next_step()
            with Watch() as seen:
                report = steps.train_step(part, optimizer, micro_batches, world, scaler, clip=1.0, seed=1, step=number)
        assert report.updated
        found["step"] = Seen() if case.waits else seen
        if case.evaluates:
            with Watch() as seen:
                held_out_loss(part, Numbers(), borders, micro_size=2, num_samples=4, device=DEVICE, world=world)
            found["evaluation"] = seen
    return found


# What must be noticed


def mask_on_the_host(num_tokens: int, _: torch.device) -> torch.Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device="cpu").tril()


def blocking_to(batch: Batch, device: torch.device) -> Batch:
    return batch._each(lambda tensor: tensor.to(device))


def sum_and_read(part: Part) -> None:
    next(parameter for _, parameter in part.named_parameters() if parameter.grad is not None).grad.sum().item()


def share_with_a_table(part: Part) -> torch.Tensor:
    """The numbers of copies as a tensor, which is made on the host and copied."""
    gradients = [gradient for gradient, _ in part.gradient_shares()]
    norms = torch.stack([gradient.norm() for gradient in gradients])
    return (norms.double().square() / torch.tensor([2] * len(gradients), device=DEVICE)).sum()


MUTANTS: dict[str, tuple[str, Any, str, Any]] = {
    "mask on the host": ("segments", masks, "causal_mask", mask_on_the_host),
    "a scalar is read": ("fp32", Part, "sum_gradients", sum_and_read),
    "a copy blocks": ("fp32", Batch, "to", blocking_to),
    "memory is not pinned": ("fp32", Batch, "pinned_for", lambda batch, _: batch),
    "a table is copied": ("dp2", optim, "share_of_squares", share_with_a_table),
}


def mutated(name: str) -> dict[str, Seen]:
    case, owner, attribute, mutant = MUTANTS[name]
    with mock.patch.object(owner, attribute, mutant):
        return run(replace(CASES[case], evaluates=False))


# Beside the step


def devices_of_threads() -> list[tuple[str, int | None]]:
    """Which device each of our threads chose, while the process uses the fourth."""
    device = torch.device("cuda", 3)
    fake_cuda.chosen_devices.clear()
    saving = Background(device)
    saving.start(lambda: None)
    saving.wait()
    batches = Batches(Numbers(), BatchPlan(2, 2, 1, 1), EodPolicy(None, False, False, False), vocab_size=VOCAB)
    with contextlib.closing(Prefetch(batches, device)) as reader:
        (batch,) = reader.next_step()
        assert fake_cuda.is_pinned(batch.tokens) and fake_cuda.is_pinned(batch.labels)
    return fake_cuda.chosen_devices


def products(refusal: Exception | None) -> list[str]:
    """Which operators multiply the gradient of the head in a step in bf16, and how often `mm` was tried in vain."""
    real, refused = torch.mm, 0

    def mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal refused
        if refusal is not None and "out_dtype" in kwargs:
            refused += 1
            raise refusal
        return real(*args, **kwargs)

    loss._multiplies_into.cache_clear()
    with mock.patch.object(torch, "mm", mm), FakeTensorMode(), _Names() as seen:
        for _ in range(3):
            total = torch.zeros(8, 4, device=DEVICE)
            a = torch.zeros(8, 6, dtype=torch.bfloat16, device=DEVICE)
            loss.add_product(total, a, a.new_zeros(6, 4))
    loss._multiplies_into.cache_clear()
    return [*seen.names, f"refused {refused}"]


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.names.append(
                f"{func} {str(args[-1].dtype).removeprefix('torch.')}" if "addmm" in str(func) else str(func)
            )
        return func(*args, **(kwargs or {}))


def attempted(work: Callable[[], dict[str, Seen]]) -> dict[str, Any]:
    try:
        return {name: asdict(seen) for name, seen in work().items()}
    except Exception as error:
        last = "".join(traceback.format_tb(error.__traceback__)[-6:])
        return {"error": f"{type(error).__name__}: {error}\n{last}"}


def main() -> None:
    names = sys.argv[2:] or list(CASES)
    cases = [(name, rank) for name in names for rank in CASES[name].ranks]
    found = {
        "cases": {f"{name}, rank {rank}": attempted(lambda n=name, r=rank: run(CASES[n], r)) for name, rank in cases},
        "mutants": {name: attempted(lambda n=name: mutated(n)) for name in MUTANTS},
        "threads": devices_of_threads(),
        "products": {
            "usual": products(None),
            "old torch": products(TypeError("mm() got an unexpected keyword argument 'out_dtype'")),
            "rocm": products(RuntimeError("gemm input type at::BFloat16 and output type float is not supported")),
        },
    }
    print(json.dumps(found))


main()
