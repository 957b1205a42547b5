"""OneFlow."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import embedding, linear

from gptworks.simulate.systems.case import CONTEXT, Case, Parts, communicator, machines_of
from gptworks.simulate.systems.operations import Elementwise, Recomputed, Reduced, dropout, gelu, new, parameter
from gptworks.simulate.systems.trace import MIB, Recorder


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
        gradient: Any = new(s, case.micro_batch, h)
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
