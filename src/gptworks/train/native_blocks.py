"""Blocks of a GPT by a C++ function, for training in one process on a CPU: a second implementation of `model/gpt.py`.

A block is one call forward and one backward, instead of some thirty operators of torch each way. Numbers are those of
torch within rounding; what the function does not know is left to torch, and the run says so before its first step.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gptworks import architecture
from gptworks.architecture import Known
from gptworks.config.schema import ModelConfig, OptimConfig, TrainConfig
from gptworks.generate.kernel_library import OFF
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.model.cache import LayerCache
from gptworks.model.masks import first_seen
from gptworks.model.rope import Turns
from gptworks.parallel.parts import Part
from gptworks.train import block_library, optim
from gptworks.train.block_library import Functions
from gptworks.train.native_loss import NativeLoss, is_plain
from gptworks.train.native_product import multiplier
from gptworks.train.native_update import NativeUpdate
from gptworks.train.optim import AdamW

KNOWN: Known = {key: values for key, values in architecture.LLAMA.items() if key != "qk_norm"}
_ACTIVATIONS = ("tanh", "erf", "sigmoid", "swiglu")  # by their numbers in elementwise.h
# Parameters of a block, in the order of Weights in block.cpp.
WEIGHTS = (
    "ln1.weight", "ln1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.out.weight", "attn.out.bias",
    "ln2.weight", "ln2.bias", "mlp.gate.weight", "mlp.gate.bias", "mlp.up.weight", "mlp.up.bias",
    "mlp.down.weight", "mlp.down.bias",
)  # fmt: skip
_ACTIVATION_NAMES = (
    "normal1", "stats1", "qkv", "log_sums", "mixed", "middle", "normal2", "stats2", "gate", "up", "inner", "y",
)  # fmt: skip
_WORK_NAMES = ("qkv", "mixed", "middle", "normal", "gate", "inner", "sums")


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "hidden", "heads", "kv_heads", "head_size", "ffn")),
        *((name, ctypes.c_int64) for name in ("is_rms", "activation", "is_narrow", "turns_per_row", "first_per_row")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("sgemm", "cos", "sin", "first")),
        ("weights", ctypes.c_void_p * len(WEIGHTS)),
        *((name, ctypes.c_void_p) for name in ("x", *_ACTIVATION_NAMES)),
    )


class _Gradients(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "x")),
        ("weights", ctypes.c_void_p * len(WEIGHTS)),
        *((name, ctypes.c_void_p) for name in _WORK_NAMES),
    )


class _Memory:
    """Tensors one after the other in one piece of memory. Each begins at a line of the cache."""

    def __init__(self, sizes: dict[str, int], like: Tensor) -> None:
        self.whole = like.new_empty(sum(_rounded(size) for size in sizes.values()))
        self.addresses, address = {}, self.whole.data_ptr()
        for name, size in sizes.items():
            self.addresses[name] = address if size else None
            address += 4 * _rounded(size)


def _rounded(size: int) -> int:
    return -(-size // 16) * 16


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, native: "NativeBlock", x: Tensor, first: Tensor | None, cos: Any, sin: Any, *weights: Tensor | None
    ) -> Tensor:
        y = torch.empty_like(x)
        block, memory = native.describe(x, y, first, cos, sin, weights)
        native.functions.forward(ctypes.byref(block))
        ctx.native, ctx.block, ctx.memory = native, block, memory
        ctx.save_for_backward(x, first, cos, sin, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.block is None:
            raise RuntimeError("backward was called twice: what a block keeps of its forward pass is used once")
        x, _, _, _, *weights = ctx.saved_tensors  # raises where a weight was changed since
        grad_x, grads = ctx.native.gradients(ctx.block, x, grad_y.contiguous(), weights)
        ctx.block = ctx.memory = None
        return None, grad_x, None, None, None, *grads


class NativeBlock:
    """In place of a block's forward. What comes with a cache, a dense mask or another type goes to the block itself."""

    def __init__(self, cfg: ModelConfig, block: nn.Module, functions: Functions, *, is_narrow: bool) -> None:
        self.cfg, self.functions, self.is_narrow = cfg, functions, is_narrow
        self.original: Callable[..., Tensor] = block.forward
        self.weights = [_parameter(block, name) for name in WEIGHTS]
        self.queries = cfg.num_heads * cfg.head_size
        self.qkv = self.queries + 2 * cfg.num_kv_heads * cfg.head_size

    def __call__(self, x: Tensor, mask: Tensor | None, turns: Turns | None, cache: LayerCache | None) -> Tensor:
        is_known = cache is None and x.numel() > 0 and is_plain(x) and all(map(_is_readable, self.weights))
        if is_known and mask is not None and mask.dtype == torch.bool:
            is_known = mask.ndim == 2  # the sliding window of one long document
            mask = (
                first_seen(torch.zeros_like(mask[:1], dtype=torch.long), self.cfg.sliding_window) if is_known else mask
            )
        if turns is not None and turns[0].ndim == 3 and len(turns[0]) == 1:  # all rows have the same
            turns = (turns[0][0], turns[1][0])
        by_row = [*([] if mask is None else [mask]), *(turns[:1] if turns is not None and turns[0].ndim == 3 else [])]
        if not is_known or any(len(each) not in (1, len(x)) for each in by_row):
            return self.original(x, mask, turns, cache)
        cos, sin = (None, None) if turns is None else (each.contiguous() for each in turns)
        y: Tensor = _BlockFunction.apply(self, x.contiguous(), mask, cos, sin, *self.weights)
        return y

    def describe(
        self, x: Tensor, y: Tensor, first: Tensor | None, cos: Any, sin: Any, weights: tuple[Tensor | None, ...]
    ) -> tuple[_Block, _Memory]:
        cfg, (rows, tokens, hidden) = self.cfg, x.shape
        R, is_gated = rows * tokens, cfg.mlp == "swiglu"
        sizes = {"normal1": R * hidden, "stats1": 2 * R, "qkv": R * self.qkv, "log_sums": R * cfg.num_heads}
        sizes |= {"mixed": R * self.queries, "middle": R * hidden, "normal2": R * hidden, "stats2": 2 * R}
        sizes |= {"gate": R * cfg.ffn_size * is_gated, "up": R * cfg.ffn_size, "inner": R * cfg.ffn_size}
        memory = _Memory(sizes, x)
        block = _Block(
            rows=rows,
            tokens=tokens,
            hidden=hidden,
            heads=cfg.num_heads,
            kv_heads=cfg.num_kv_heads,
            head_size=cfg.head_size,
            ffn=cfg.ffn_size,
            is_rms=cfg.norm == "rmsnorm",
            activation=_ACTIVATIONS.index("swiglu" if is_gated else cfg.gelu),
            is_narrow=self.is_narrow,
            turns_per_row=cos is not None and cos.ndim == 3,
            first_per_row=first is not None and len(first) > 1,
            eps=cfg.layernorm_eps,
            sgemm=self.functions.sgemm,
            cos=_address(cos),
            sin=_address(sin),
            first=_address(first),
            weights=_addresses(weights),
            x=x.data_ptr(),
            y=y.data_ptr(),
            **memory.addresses,
        )
        return block, memory

    def gradients(
        self, block: _Block, x: Tensor, grad_y: Tensor, weights: list[Tensor | None]
    ) -> tuple[Tensor, list[Tensor | None]]:
        cfg, (rows, tokens, hidden) = self.cfg, x.shape
        R = rows * tokens
        sizes = {"qkv": R * self.qkv, "mixed": R * self.queries, "middle": R * hidden, "normal": R * hidden}
        sizes |= {"gate": R * cfg.ffn_size * (cfg.mlp == "swiglu"), "inner": R * cfg.ffn_size}
        sizes |= {"sums": torch.get_num_threads() * 4 * hidden}
        work = _Memory(sizes, x)
        grad_x = torch.empty_like(x)
        grads = [None if weight is None else torch.empty_like(weight) for weight in weights]
        gradients = _Gradients(y=grad_y.data_ptr(), x=grad_x.data_ptr(), weights=_addresses(grads), **work.addresses)
        self.functions.backward(ctypes.byref(block), ctypes.byref(gradients))
        return grad_x, grads


def _parameter(block: nn.Module, name: str) -> nn.Parameter | None:
    module, _, kind = name.rpartition(".")
    owner = dict(block.named_modules()).get(module)
    parameter: nn.Parameter | None = getattr(owner, kind, None)
    return parameter


def _is_readable(weight: nn.Parameter | None) -> bool:
    return weight is None or (is_plain(weight) and weight.is_contiguous())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(tensors: Any) -> Any:
    return (ctypes.c_void_p * len(WEIGHTS))(*map(_address, tensors))


# Whether it is used


@dataclass(frozen=True)
class Computing:
    """Who computes."""

    line: str = ""  # for the user; empty where there was no choice
    multiply: Callable[[Tensor, Tensor], Tensor] | None = None  # the products of the C++ functions, where they compute


def use_where_known(part: Part, optimizer: AdamW, train: TrainConfig, compute: str) -> Computing:
    """In one process on a CPU C++ functions compute blocks and updates from now on, if the blocks are known and the
    functions can be built."""
    if part.world.device.type != "cpu" or part.world.mesh is not None:
        return Computing()
    if reason := why_not(part.cfg, train, compute):
        return Computing(f"blocks: torch, because of {reason}")
    is_narrow = compute == "bf16"
    functions = use_in(part.parts[0], is_narrow=is_narrow)
    optimizer.native = NativeUpdate(functions)
    products = ", products of bf16" if is_narrow else ""
    line = f"blocks: a C++ function ({functions.instructions}{products}); {OFF}=off leaves them to torch"
    return Computing(line, multiplier(functions, is_narrow=is_narrow))


def multiplies_by_itself(model: ModelConfig, train: TrainConfig, compute: str, world: World) -> bool:
    """Whether C++ functions will round to that type what they multiply, and compute all else in fp32."""
    is_alone = world.device.type == "cpu" and world.mesh is None
    return compute != "fp32" and is_alone and not why_not(model, train, compute)


def why_not(model: ModelConfig, train: TrainConfig, compute: str) -> str:
    """Why torch computes the blocks in one process on a CPU; empty where the C++ function does."""
    if train.compile:
        return "train.compile"
    if train.recompute != "none":
        return f"train.recompute: {train.recompute} (known: none)"
    if model.attention == "math":
        return "model.attention: math"
    if reason := unknown(model):  # nothing is built for such a run
        return reason
    functions, reason = block_library.loaded(compute_a_little)
    known = ("fp32", "bf16") if functions and functions.knows_bf16 else ("fp32",)
    if compute not in known:
        return f"precision.compute: {compute} (known here: {' and '.join(known)})"
    return reason


def unknown(model: ModelConfig) -> str:
    """What of a model the function does not know, in words; empty where it knows all."""
    names = ("dropout_hidden", "dropout_attention")
    dropped = next((f"model.{name}: {rate} (known: 0)" for name in names if (rate := getattr(model, name))), "")
    return architecture.unknown(model, KNOWN) or dropped


def use_in(gpt: GPT, *, is_narrow: bool = False) -> Functions:
    """From now on; names of parameters and modules stay. is_narrow: what is multiplied is rounded to bf16, and all else
    is fp32, so that it is more exact than a model whose activations are bf16."""
    functions, reason = block_library.loaded(compute_a_little)
    assert functions is not None, reason
    replace_in(gpt, functions, is_narrow=is_narrow)
    return functions


def replace_in(gpt: GPT, functions: Functions, *, is_narrow: bool) -> None:
    gpt.compute_dtype = torch.float32
    for block in gpt.blocks.values():
        block.forward = NativeBlock(gpt.cfg, block, functions, is_narrow=is_narrow)  # type: ignore[method-assign]
    loss = NativeLoss(gpt.loss_sum, functions, is_narrow=is_narrow)
    gpt.loss_sum.forward = loss  # type: ignore[method-assign, assignment]


def compute_a_little(functions: Functions) -> Iterator[str]:
    """A step of a small model, for a library that has just been built."""
    cfg = ModelConfig(num_layers=1, hidden_size=32, num_heads=2, vocab_size=8, max_positions=8)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for is_narrow in {False, functions.knows_bf16}:
        model = GPT(cfg)
        replace_in(model, functions, is_narrow=is_narrow)
        model(tokens, labels=tokens).backward()
    optimizer = optim.build(model, OptimConfig())
    optimizer.native = NativeUpdate(functions)
    optimizer.update(model.parameters(), 1.0)
    yield "done"
