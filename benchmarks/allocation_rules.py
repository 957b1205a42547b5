"""How four public systems use the memory of a card, as facts of their code: the terms behind plan_memory.py.

    from allocation_rules import Case, fleetx, megatron, oneflow, deepspeed

Each function takes a Case and returns the named parts, in MiB, of what `nvidia-smi` shows for the fullest card of the
first machine. No number here is fitted to a row of the published tables: sizes come from shapes, the order of
allocations from the code of the system (run on meta tensors, see allocation_trace.py), and the constants are:

context     what a process holds before its first tensor. 1007 MiB on Volta: PyTorch 1.3 on a Titan V, measured in
            github.com/pytorch/pytorch/issues/28394 (1008.2 used after the first tensor, 0.9 before). 1687 MiB on
            Ampere: torch 1.8.2+cu111 on an RTX 3090, github.com/pytorch/pytorch/issues/55277. No such figure was found
            for OneFlow or Paddle: they load the same CUDA, cuBLAS, cuDNN and kernels of their own, so the same is used.
NCCL        nccl/src/init.cc and transport/p2p.cc: a connection to receive has a buffer of 512 KiB (LL) + 4.69 MiB
            (LL128) + 4 MiB (Simple) = 9.19, which cudaMalloc rounds to 10 MiB; a connection to send takes its least
            unit, 2 MiB. Rings and trees have two neighbours in every channel (with two ranks one): 24 MiB (12).
            Channels: twice the NVLinks that a card has to others of the group, so 12 among the 8 V100 of a machine
            (6 links), 8 among 4, 4 among 2; 24 among 8 A100 (NVSwitch); 2 between machines with one 100 Gb/s card.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from allocation_trace import MIB, CachingAllocator, Recorder
from torch.nn.functional import embedding, linear

CONTEXT = {"v100": 1007, "a100": 1687}
CARD = {"v100-16g": 16160, "v100-32g": 32510, "a100-40g": 40536}  # MiB in all, as nvidia-smi prints it
CHANNELS = {"v100": {8: 12, 4: 8, 2: 4}, "a100": {8: 24, 4: 24, 2: 24}}

Parts = dict[str, float]  # MiB


@dataclass(frozen=True)
class Case:
    hidden: int
    heads: int
    layers: int
    vocab: int  # as padded by the system
    seq_len: int
    micro_batch: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    accumulate: int = 1
    recompute: str = "full"  # none, core (the attention between its two linears), full (whole layers)
    zero: int = 0  # stage of the ZeRO sharding over the dp ranks
    card: str = "v100-16g"

    @property
    def chip(self) -> str:
        return self.card.split("-")[0]

    def parameters(self, first: bool = True, last: bool = True) -> int:
        """Of one rank of a stage; the tied word embedding is held by the first and by the last stage."""
        h, t = self.hidden, self.tp
        layer = 12 * h * h // t + (7 * h // t) + 6 * h
        embeddings = (self.vocab // t * h if first or last else 0) + (self.seq_len * h if first else 0)
        return self.layers // self.pp * layer + embeddings + (2 * h if last else 0)


def communicator(case: Case, ranks: int, machines: int) -> int:
    """MiB of the buffers of one NCCL communicator on one card."""
    if ranks == 1:
        return 0
    channels = 2 if machines > 1 else CHANNELS[case.chip][ranks]
    return channels * (12 if ranks == 2 else 24)


def model_of(case: Case) -> Case:
    """The case as one data-parallel rank sees it: the same for any number of them."""
    return replace(case, dp=1, zero=0, card="")


def machines_of(case: Case, ranks: int, stride: int) -> int:
    return max(1, -(-ranks * stride // 8)) if ranks > 1 else 1


# ---------------------------------------------------------------------------------------------------------------------
# Operations as they allocate: what each keeps for the backward pass, what it makes in the backward pass.


def new(*shape: Any, dtype: torch.dtype = torch.half) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def parameter(*shape: int, dtype: torch.dtype = torch.half) -> torch.nn.Parameter:
    return torch.nn.Parameter(new(*shape, dtype=dtype))


class Elementwise(torch.autograd.Function):
    """One output; keeps the tensors in `keep` ("in", "out", "mask") and makes one gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: str, copies: int) -> torch.Tensor:
        temporary = [new(x.shape) for _ in range(copies)]
        mask = new(x.shape, dtype=torch.uint8) if "mask" in keep else None
        out = new(x.shape)
        ctx.kept = mask
        ctx.save_for_backward(*([x] if "in" in keep else []), *([out] if "out" in keep else []))
        del temporary
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept = ctx.saved_tensors
        out = new(gradient.shape)
        ctx.kept = None
        del kept
        return out, None, None


def dropout(x: torch.Tensor) -> torch.Tensor:
    return Elementwise.apply(x, "mask", 0)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return Elementwise.apply(x, "out", 0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return Elementwise.apply(x, "in", 0)


class Norm(torch.autograd.Function):
    """Layer norm: keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return new(x.shape), new(weight.shape), new(weight.shape)


class Added(torch.autograd.Function):
    """Sum with a tensor of the same shape, or with a bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.same, ctx.shape = x.shape == other.shape, other.shape
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient if ctx.same else new(ctx.shape)


class Reduced(torch.autograd.Function):
    """An all-reduce of tensor parallelism: in the forward pass, in the backward pass, in place or not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: int, where: str, inplace: bool) -> torch.Tensor:
        ctx.here = ways > 1 and where == "backward"
        ctx.inplace = inplace
        return reduce(x, inplace) if ways > 1 and where == "forward" else x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (reduce(gradient, ctx.inplace) if ctx.here else gradient), None, None, None


def reduce(x: torch.Tensor, inplace: bool) -> torch.Tensor:
    if inplace and RECORDER:
        RECORDER[-1].mark(x)
    return x if inplace else new(x.shape)


RECORDER: list[Recorder] = []


class Recomputed(torch.autograd.Function):
    """Keeps the input, runs the function again in the backward pass (mpu.checkpoint, fleet.utils.recompute)."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        with torch.no_grad():
            out = function(*inputs)
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        torch.autograd.backward(out, gradient)
        return None, *(x.grad for x in inputs)


# ---------------------------------------------------------------------------------------------------------------------
# Megatron-LM (PyTorch)


class BiasDropoutAdd(torch.autograd.Function):
    """bias_dropout_add_fused_train (megatron/model/transformer.py), scripted: keeps the mask, one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        biased = new(x.shape)
        mask, _dropped = new(x.shape, dtype=torch.uint8), new(x.shape)
        ctx.save_for_backward(mask)
        del biased
        ctx.bias = bias.shape
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept = ctx.saved_tensors
        out = new(gradient.shape)
        del kept
        return out, new(ctx.bias), gradient


class BiasGelu(torch.autograd.Function):
    """megatron/model/fused_bias_gelu.py."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, bias = ctx.saved_tensors
        return new(x.shape), new(bias.shape)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """megatron/mpu/cross_entropy.py: softmax and gradient are made in place of the fp32 logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.saved_tensors[0]


class MegatronLayer:
    """ParallelTransformerLayer with its defaults: fused softmax, bias+GeLU and bias+dropout+add are on."""

    def __init__(self, case: Case) -> None:
        h, t = case.hidden, case.tp
        self.case = case
        self.norm1, self.norm2 = (parameter(h), parameter(h)), (parameter(h), parameter(h))
        self.qkv, self.out = (parameter(3 * h // t, h), parameter(3 * h // t)), (parameter(h, h // t), parameter(h))
        self.up, self.down = (parameter(4 * h // t, h), parameter(4 * h // t)), (parameter(h, 4 * h // t), parameter(h))
        self.parameters = [*self.norm1, *self.qkv, *self.out, *self.norm2, *self.up, *self.down]

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s, b, heads, size = q.shape
        q, k = q.view(s, b * heads, size), k.view(s, b * heads, size)
        scores = new(b * heads, s, s)
        scores = torch.baddbmm(scores, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0)
        weights = softmax(scores)
        weights = dropout(weights)
        context = torch.bmm(weights, v.view(s, b * heads, size).transpose(0, 1))
        return context.view(b, heads, s, size).permute(2, 0, 1, 3).contiguous().view(s, b, heads * size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        case, t = self.case, self.case.tp
        s, b, h = x.shape
        normed = Norm.apply(x, *self.norm1)
        mixed = linear(Reduced.apply(normed, t, "backward", True), *self.qkv).view(s, b, case.heads // t, -1)
        q, k, v = torch.split(mixed, h // case.heads, -1)
        context = Recomputed.apply(self.core, q, k, v) if case.recompute == "core" else self.core(q, k, v)
        attended = Reduced.apply(linear(context, self.out[0]), t, "forward", True)
        y = BiasDropoutAdd.apply(attended, self.out[1], x)
        normed = Norm.apply(y, *self.norm2)
        up = linear(Reduced.apply(normed, t, "backward", True), self.up[0])
        up = BiasGelu.apply(up, self.up[1])
        down = Reduced.apply(linear(up, self.down[0]), t, "forward", True)
        return BiasDropoutAdd.apply(down, self.down[1], y)


def masked(layer: MegatronLayer, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


class MegatronStage:
    def __init__(self, case: Case, stage: int) -> None:
        h, t = case.hidden, case.tp
        self.case, self.first, self.last = case, stage == 0, stage == case.pp - 1
        self.words = parameter(case.vocab // t, h) if self.first or self.last else None
        self.positions = parameter(case.seq_len, h) if self.first else None
        self.layers = [MegatronLayer(case) for _ in range(case.layers // case.pp)]
        self.norm = (parameter(h), parameter(h)) if self.last else ()
        own = [p for p in (self.words, self.positions) if p is not None]
        self.parameters = [*own, *(p for layer in self.layers for p in layer.parameters), *self.norm]

    def __call__(self, x: torch.Tensor | None) -> torch.Tensor:
        case = self.case
        ones = new(1, 1, case.seq_len, case.seq_len, dtype=torch.float)  # get_ltor_masks_and_position_ids
        triangle = new(ones.shape, dtype=torch.float)
        del ones
        mask = new(triangle.shape, dtype=torch.bool)
        del triangle
        if self.first:
            tokens = new(case.micro_batch, case.seq_len, dtype=torch.long)
            embedded = Reduced.apply(embedding(tokens, self.words), case.tp, "forward", True)
            embedded = dropout(embedded + embedding(tokens, self.positions))
            x = embedded.transpose(0, 1).contiguous()
            del embedded
        for layer in self.layers:
            call = functools.partial(masked, layer, mask)  # every layer's graph holds the mask of the micro-batch
            x = Recomputed.apply(call, x) if case.recompute == "full" else call(x)
        if not self.last:
            return x
        x = x.transpose(0, 1).contiguous()
        x = Norm.apply(x, *self.norm)
        logits = linear(Reduced.apply(x, case.tp, "backward", True), self.words)
        loss = VocabParallelCrossEntropy.apply(logits.float())  # fp16 logits live until the loss is there
        del logits
        return loss.float().mean()


def one_forward_one_backward(
    case: Case, stage: int, forward: Callable[[Any], torch.Tensor], recorder: Recorder
) -> None:
    """One step's micro-batches in the order of the pipeline; more of them than stages change nothing."""
    first, last = stage == 0, stage == case.pp - 1
    count = min(case.accumulate, case.pp + 2) if case.pp > 1 else case.accumulate
    shape = (case.seq_len, case.micro_batch, case.hidden)
    ahead = min(case.pp - 1 - stage, count)
    waiting: list[tuple[Any, torch.Tensor]] = []

    def run_forward() -> None:
        x = None if first else new(*shape).requires_grad_()
        waiting.append((x, forward(x)))
        recorder.synchronize()  # the timers of training.py call torch.cuda.synchronize

    def run_backward() -> None:
        x, out = waiting.pop(0)
        if x is not None:
            x.retain_grad()
        if last:
            torch.autograd.backward(out / count)
        else:
            torch.autograd.backward(out, new(*shape))
        recorder.synchronize()

    for _ in range(ahead):
        run_forward()
    for _ in range(count - ahead):
        run_forward()
        run_backward()
    for _ in range(ahead):
        run_backward()


STEPS = 4  # the first two differ (states are made in the first update); from the third on every step is the same


@functools.cache
def megatron_trace(case: Case, contiguous: bool) -> tuple[list[tuple[int, int]], int, int]:
    """Events of STEPS steps on the first stage, where the last step begins, peak bytes alive."""
    recorder = Recorder()
    RECORDER.append(recorder)
    try:
        with recorder:
            stage = MegatronStage(case, 0)
            masters = [p.detach().clone().float() for p in stage.parameters]
            total = sum(p.numel() for p in stage.parameters)
            buffer = new(total) if contiguous else None
            gradients: list[Any] = [None] * len(masters)
            moments: list[Any] = []
            for step in range(STEPS):
                start = len(recorder.events)
                for p in stage.parameters:
                    p.grad = None
                    if contiguous and step == 0:
                        p.register_post_accumulate_grad_hook(forget)
                if contiguous:
                    gradients = [None] * len(masters)
                one_forward_one_backward(case, 0, stage, recorder)
                if not contiguous:
                    flat = torch.cat([p.grad.view(-1) for p in stage.parameters])  # _flatten_dense_tensors
                    del flat
                for i, master in enumerate(masters):
                    if gradients[i] is None:
                        gradients[i] = torch.empty_like(master)
                if not moments:
                    moments = [(torch.empty_like(m), torch.empty_like(m)) for m in masters]
            events, peak = list(recorder.events), recorder.peak
            del buffer
    finally:
        RECORDER.pop()
    return events, start, peak


def forget(p: torch.Tensor) -> None:
    p.grad = None  # added to the buffer (DistributedDataParallel._make_param_hook)


def megatron(case: Case, year: int = 2021) -> Parts:
    """Megatron-LM. 2021: 8aa4619f of the DLPerf report (NGC 20.12, PyTorch 1.8).

    optimizer.py, FP16OptimizerWithFP16Params: fp16 weights, fp32 masters made at the start, fp32 gradients of the
    masters made in the first update and kept, two fp32 moments: 18 bytes a parameter, and 2 of fp16 gradients from the
    backward pass on. distributed.py (no contiguous buffers unless asked for): all fp16 gradients are flattened into
    one more tensor for the all-reduce, also when there is one rank. arguments.py: the fusions are on by default.
    2022: gradients in one contiguous fp16 buffer, the fp32 gradients freed at the start of a step.
    """
    events, last_step, peak = megatron_trace(model_of(case), contiguous=year > 2021)
    nccl = megatron_nccl(case)
    allocator = CachingAllocator("torch", (CARD[case.card] - CONTEXT[case.chip] - nccl) * MIB)
    allocator.play(events[:last_step])
    held = allocator.play(events[last_step:]) / MIB
    n = case.parameters(True, case.pp == 1) / MIB
    states = {"weights": 2 * n, "gradients": (6 if year == 2021 else 2) * n, "optimizer": 12 * n}
    alive = peak / MIB
    return {
        **states,
        "activations": alive - sum(states.values()),
        "held by the allocator": held - alive,
        "NCCL": nccl,
        "context": CONTEXT[case.chip],
    }


def megatron_nccl(case: Case) -> int:
    """mpu/initialize.py: the world, data, tensor, model, pipeline and embedding groups that a step uses."""
    world = case.dp * case.tp * case.pp
    sizes = [
        (world, machines_of(case, world, 1)),
        (case.tp, machines_of(case, case.tp, 1)),
        (case.dp, machines_of(case, case.dp, case.tp)),
        (case.tp * case.pp, machines_of(case, case.tp, 1) if case.pp == 1 else 2),  # found_inf, gradient norm
        (case.pp, 2),
        (2 if case.pp > 1 else 1, 2),
    ]
    return sum(communicator(case, ranks, machines) for ranks, machines in sizes)


# ---------------------------------------------------------------------------------------------------------------------
# OneFlow


class Cast(torch.autograd.Function):
    """auto_mixed_precision.cpp: fp32 variable -> fp16, and its gradient back to fp32; the fp16 one is kept, as the
    update and the norm of clipping (a second consumer, so fuse_update_ops_pass.cpp cannot remove the cast) both wait
    for the last gradient."""

    kept: list[torch.Tensor] = []

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return new(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Cast.kept.append(gradient)
        return new(gradient.shape, dtype=torch.float)


class OneFlowNorm(torch.autograd.Function):
    """layer_norm keeps its normalized output besides y."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(new(x.shape), weight)
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, weight = ctx.saved_tensors
        return new(gradient.shape), new(weight.shape, dtype=torch.float)


class OneFlowScores(torch.autograd.Function):
    """fused_self_attention_query_mul_key_and_value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, heads: int, size: int) -> Any:
        s, b, _ = x.shape
        ctx.save_for_backward(x)
        return new(b, heads, s, s), new(b, heads, s, size)

    @staticmethod
    def backward(ctx: Any, scores: torch.Tensor, value: torch.Tensor) -> Any:
        return new(ctx.saved_tensors[0].shape), None, None


class OneFlowSoftmax(torch.autograd.Function):
    """fused_scale_tril_softmax_mask_scale: mask of one byte, softmax_y and y."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(new(x.shape, dtype=torch.int8), new(x.shape))
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept = ctx.saved_tensors
        out = new(gradient.shape)
        del kept
        return out


class OneFlowDropoutAdd(torch.autograd.Function):
    """fused_bias_add_mask_scale with _add_to_output (enable_fuse_add_to_output): the residual needs no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(new(x.shape, dtype=torch.int8))
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept = ctx.saved_tensors
        out = new(gradient.shape)
        del kept
        return out, gradient


class OneFlowLoss(torch.autograd.Function):
    """One rank: sparse_softmax_cross_entropy in fp16 (the loss goes through amp_white_identity) with a temporary as
    large as the logits (softmax_kernel_util: GetReduceTempStorageSize = n * w * sizeof(T)).
    More: split_sparse_softmax_cross_entropy_op_pass.cpp; reduce_max_device_stage exists for fp32 and fp64 only
    (two_stage_reduce_kernel.cpp), and takes fp32 logits, a mask of one byte and two int32 temporaries: 13 bytes a
    logit; then broadcast_sub, exp, broadcast_div, each with an output of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, words: torch.Tensor, ways: int) -> torch.Tensor:
        ctx.save_for_backward(x, words)
        ctx.ways = ways
        logits = new(*x.shape[:-1], words.shape[0])
        if ways == 1:
            ctx.softmax, temporary = new(logits.shape), new(logits.shape)
            del temporary
        else:
            full = new(logits.shape, dtype=torch.float)
            del logits
            mask, temporary = new(full.shape, dtype=torch.int8), new(2, *full.shape, dtype=torch.int32)
            del mask, temporary
            shifted = new(full.shape, dtype=torch.float)
            del full
            exponent = new(shifted.shape, dtype=torch.float)
            del shifted
            ctx.softmax = new(exponent.shape, dtype=torch.float)
            del exponent
        return new(x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, words = ctx.saved_tensors
        logits = new(ctx.softmax.shape, dtype=ctx.softmax.dtype)
        ctx.softmax = None
        if ctx.ways > 1:
            logits = new(logits.shape)
        return new(x.shape), new(words.shape), None


class OneFlowLayer:
    """OneFlow-Benchmark, LanguageModeling/GPT/oneflow_gpt/model.py with its fusions on."""

    def __init__(self, case: Case) -> None:
        h, t = case.hidden, case.tp
        self.case = case
        shapes = ((h,), (3 * h // t, h), (h, h // t), (h,), (4 * h // t, h), (h, 4 * h // t))
        self.parameters = [parameter(*shape, dtype=torch.float) for shape in shapes]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm1, qkv, out, norm2, up, down = self.parameters
        t, (s, b, h) = self.case.tp, x.shape
        y = OneFlowNorm.apply(x, norm1)
        y = Elementwise.apply(linear(Reduced.apply(y, t, "backward", False), Cast.apply(qkv)), "", 0)  # bias_add
        scores, value = OneFlowScores.apply(y, self.case.heads // t, h // self.case.heads)
        del y
        weights = OneFlowSoftmax.apply(scores)
        del scores
        y = torch.matmul(weights, value)
        del weights, value
        y = y.permute(2, 0, 1, 3).contiguous().view(s, b, -1)
        y = Reduced.apply(linear(y, Cast.apply(out)), t, "forward", False)
        x = OneFlowDropoutAdd.apply(y, x)
        y = OneFlowNorm.apply(x, norm2)
        y = linear(Reduced.apply(y, t, "backward", False), Cast.apply(up))
        y = gelu(y)
        y = Reduced.apply(linear(y, Cast.apply(down)), t, "forward", False)
        return OneFlowDropoutAdd.apply(y, x)


def oneflow(case: Case) -> Parts:
    """OneFlow 0.3.5 (75f11b8): all memory is planned before the first step, so peak = held.

    Variables and both moments are fp32 (12 bytes a parameter). Inside a chain of operations memory is shared by
    lifetime (intra_job_mem_sharing_util.cpp), so a chain costs the most bytes alive in it. Whole layers are
    recomputed; the weights' fp16 casts belong to the layer's scope and are made again too (checkpointing_pass.cpp).
    Data parallel: NCCL writes the reduced fp16 gradients (fp32 ones when accumulating) to a second tensor.
    Pipeline: pipeline_buffer_pass.cpp keeps 2 x stages copies of every tensor that the backward pass reads from the
    forward pass (each layer's input, the mask of the embedding's dropout), and forward and backward are chains of
    their own; a tensor read outside its chain lives to the end of the chain, so the forward chain also holds its
    layers' inputs; the casts of the weights depend on nothing and come first, so it holds all of them as well.
    """
    h, t, s = case.hidden, case.tp, case.seq_len
    n = case.parameters(True, case.pp == 1) / MIB
    layers = [OneFlowLayer(case) for _ in range(case.layers // case.pp)]
    words = parameter(case.vocab // t, h, dtype=torch.float)
    positions = parameter(s, h, dtype=torch.float)
    norm = parameter(h, dtype=torch.float)

    def forward(layer_call: Callable[..., torch.Tensor]) -> torch.Tensor:
        half = Cast.apply(words)
        x = Reduced.apply(embedding(new(case.micro_batch, s, dtype=torch.long), half), t, "forward", False)
        x = dropout(x + Cast.apply(positions))
        x = x.transpose(0, 1).contiguous()
        for layer in layers:
            x = layer_call(layer, x)
        if case.pp > 1:
            return x
        x = OneFlowNorm.apply(x, norm).transpose(0, 1).contiguous()
        return OneFlowLoss.apply(Reduced.apply(x, t, "backward", False), half, t).sum()

    Cast.kept.clear()
    fixed: Parts = {"weights": 4 * n, "optimizer": 8 * n}
    world = case.dp * case.tp * case.pp
    tail: Parts = {"NCCL": oneflow_nccl(case, world), "context": CONTEXT[case.chip]}
    if case.pp == 1:
        with Recorder() as recorder:
            forward(Recomputed.apply).backward()
        Cast.kept.clear()
        reduced = {"reduced gradients": 2 * n} if case.dp > 1 else {}
        return {**fixed, "step (activations, gradients)": recorder.peak / MIB, **reduced, **tail}

    tensor = s * case.micro_batch * h * 2 / MIB
    with Recorder() as ahead, torch.no_grad():
        forward(lambda layer, x: layer(x))
    with Recorder() as back:
        gradient = new(s, case.micro_batch, h)
        for layer in reversed(layers):
            x = new(s, case.micro_batch, h).requires_grad_()
            out = layer(x)
            torch.autograd.backward(out, gradient)
            gradient = x.grad
            del out, x
    Cast.kept.clear()
    copies = 2 * case.pp
    return {
        **fixed,
        "accumulated gradients": 4 * n,
        **({"reduced gradients": 4 * n} if case.dp > 1 else {}),
        "forward chain": ahead.peak / MIB + 2 * n + (len(layers) - 1) * tensor,
        "backward chain (with its gradients)": back.peak / MIB,
        "pipeline buffers": copies * (len(layers) + 0.5) * tensor + 2 * tensor,
        **tail,
    }


def oneflow_nccl(case: Case, world: int) -> int:
    """One communicator for each set of devices: a stage's, and the tensor-parallel groups inside it."""
    stage = world // case.pp
    whole = communicator(case, stage, machines_of(case, stage, 1))
    both = case.dp > 1 and case.tp > 1
    inner = communicator(case, case.tp, machines_of(case, case.tp, 1)) if both and stage > 8 else 0
    return whole + inner


# ---------------------------------------------------------------------------------------------------------------------
# PaddleFleetX


class PaddleLoss(torch.autograd.Function):
    """softmax_with_cross_entropy runs in fp16 under pure fp16 (O2's own black list does not name it, and the YAML adds
    only its tensor-parallel twin, c_softmax_with_cross_entropy): the softmax is one more fp16 tensor, the gradient is
    made in its place. With tensor parallelism both are fp32, after a cast."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ways: int) -> torch.Tensor:
        dtype = torch.half if ways == 1 else torch.float
        cast = new(logits.shape, dtype=dtype) if ways > 1 else None
        ctx.softmax = new(logits.shape, dtype=dtype)
        del cast
        return new(logits.shape[:-1], dtype=torch.float)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        out, ctx.softmax = ctx.softmax, None
        return (out if out.dtype == torch.half else new(out.shape)), None


class FleetXLayer:
    """ppfleetx/models/language_model/gpt/dygraph/single_model.py, fused_linear off (needs CUDA 11.6)."""

    def __init__(self, case: Case) -> None:
        h, t = case.hidden, case.tp
        self.case = case
        self.norm1, self.norm2 = (parameter(h), parameter(h)), (parameter(h), parameter(h))
        self.qkv, self.out = (parameter(3 * h // t, h), parameter(3 * h // t)), (parameter(h, h // t), parameter(h))
        self.up, self.down = (parameter(4 * h // t, h), parameter(4 * h // t)), (parameter(h, 4 * h // t), parameter(h))
        self.parameters = [*self.norm1, *self.qkv, *self.out, *self.norm2, *self.up, *self.down]

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, heads, s, size = q.shape
        product = torch.matmul(q, k.transpose(-1, -2))
        weights = softmax(product)  # softmax_mask_fuse_upper_triangle
        weights = dropout(weights)
        return torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, s, heads * size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        case, t = self.case, self.case.tp
        b, s, h = x.shape
        y = Norm.apply(x, *self.norm1)
        y = Added.apply(linear(Reduced.apply(y, t, "backward", True), self.qkv[0]), self.qkv[1])
        y = y.view(b, s, case.heads // t, -1).transpose(1, 2).contiguous()
        q, k, v = (part.contiguous() for part in torch.split(y, h // case.heads, -1))  # split copies
        del y
        y = Recomputed.apply(self.core, q, k, v) if case.recompute == "core" else self.core(q, k, v)
        del q, k, v
        y = Added.apply(Reduced.apply(linear(y, self.out[0]), t, "forward", True), self.out[1])
        x = Added.apply(x, dropout(y))
        y = Norm.apply(x, *self.norm2)
        y = Added.apply(linear(Reduced.apply(y, t, "backward", True), self.up[0]), self.up[1])
        y = gelu(y)
        y = Added.apply(Reduced.apply(linear(y, self.down[0]), t, "forward", True), self.down[1])
        return Added.apply(x, dropout(y))


@functools.cache
def fleetx_trace(case: Case) -> tuple[list[tuple[int, int]], int, int]:
    recorder = Recorder()  # no tensor waits for another stream: mp_ops._mp_allreduce has use_calc_stream=True
    with recorder:
        h, t, b, s = case.hidden, case.tp, case.micro_batch, case.seq_len
        words, positions = parameter(case.vocab // t, h), parameter(s, h)
        layers = [FleetXLayer(case) for _ in range(case.layers // case.pp)]
        norm = (parameter(h), parameter(h)) if case.pp == 1 else ()
        parameters = [words, positions, *(p for layer in layers for p in layer.parameters), *norm]
        share = case.dp if case.zero else 1
        states = [[new(p.numel() // share + 1, dtype=torch.float) for _ in range(3)] for p in parameters]
        if case.zero == 2:  # GroupShardedStage2: a gradient of another rank is cleared once reduced
            states.append([new(sum(p.numel() for p in parameters) // case.dp)])
            for p in parameters:
                p.register_post_accumulate_grad_hook(forget)

        def forward(_: Any) -> torch.Tensor:
            tokens = new(b, s, dtype=torch.long)
            x = Reduced.apply(embedding(tokens, words), t, "forward", True)
            x = dropout(x + embedding(tokens, positions))
            for layer in layers:
                x = Recomputed.apply(layer, x) if case.recompute == "full" else layer(x)
            if case.pp > 1:
                return x.transpose(0, 1)
            x = Norm.apply(x, *norm)
            logits = torch.matmul(x, words.t())
            loss = PaddleLoss.apply(logits, t)  # the engine holds the logits while it computes the loss
            return loss.sum()

        for step in range(STEPS):
            start = len(recorder.events)
            if step and case.zero != 2:
                for p in parameters:  # clear_grad(set_to_zero=True): the gradients stay
                    p.grad.zero_()
            one_forward_one_backward(case, 0, forward, recorder)
            if case.zero != 2:
                clipped = [new(p.numel() // share + 1) for p in parameters]  # ClipGradByGlobalNorm
                del clipped
        del states
        events, peak = list(recorder.events), recorder.peak
    return events, start, peak


def fleetx(case: Case) -> Parts:
    """PaddleFleetX, pure fp16 (AMP O2): fp16 weights and gradients, fp32 master and moments: 16 bytes a parameter;
    the ZeRO stages of paddle.distributed.sharding divide the fp32 states, stage 2 also the gradients."""
    events, last_step, peak = fleetx_trace(case)
    nccl = megatron_nccl(case)
    allocator = CachingAllocator("paddle", (CARD[case.card] - CONTEXT[case.chip] - nccl) * MIB)
    allocator.play(events[:last_step])
    held = allocator.play(events[last_step:]) / MIB
    n = case.parameters(True, case.pp == 1) / MIB
    share = case.dp if case.zero else 1
    states = {
        "weights": 2 * n,
        "gradients": 2 * n / (case.dp if case.zero == 2 else 1),
        "optimizer": 12 * n / share,
    }
    alive = peak / MIB
    return {
        **states,
        "activations": alive - sum(states.values()),
        "held by the allocator": held - alive,
        "NCCL": nccl,
        "context": CONTEXT[case.chip],
    }


# ---------------------------------------------------------------------------------------------------------------------
# DeepSpeed


def deepspeed(case: Case) -> Parts:
    """DeepSpeed ZeRO 1 and 2 (runtime/zero/stage_1_and_2.py) around Megatron's model; what the allocator holds beyond
    the tensors is not traced.

    fp16 weights; fp32 master, moments and gradient of this rank's part; fp16 gradients: all of them in stage 1, this
    rank's part in stage 2, where two buckets of 5e8 elements collect the rest (reduce_bucket_size, overlap_comm).
    """
    n = case.parameters() / MIB
    with Recorder() as recorder:
        stage = MegatronStage(case, 0)
        if case.zero == 2:
            for p in stage.parameters:
                p.register_post_accumulate_grad_hook(forget)
        stage(None).backward()
    step = recorder.peak / MIB - 2 * n
    shared = {"gradients of the part": 2 * n / case.dp, "buckets": 2 * 5e8 * 2 / MIB} if case.zero == 2 else {}
    return {
        "weights": 2 * n,
        "activations" if case.zero == 2 else "activations and gradients": step,
        **shared,
        "fp32 gradients": 4 * n / case.dp,
        "optimizer": 12 * n / case.dp,
        "NCCL": 2 * communicator(case, case.dp, machines_of(case, case.dp, 1)),
        "context": CONTEXT[case.chip],
    }
