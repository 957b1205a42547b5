"""PaddleFleetX."""

import functools
from typing import Any

import torch
from torch.nn.functional import embedding, linear

from gptworks.simulate.systems.case import CARD, CONTEXT, Case, Parts
from gptworks.simulate.systems.megatron import megatron_nccl
from gptworks.simulate.systems.operations import (
    Added,
    Norm,
    Recomputed,
    Reduced,
    TensorParallelLayer,
    dropout,
    gelu,
    new,
    parameter,
    softmax,
)
from gptworks.simulate.systems.schedule import STEPS, forget, one_forward_one_backward
from gptworks.simulate.systems.trace import MIB, CachingAllocator, Recorder


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


class FleetXLayer(TensorParallelLayer):
    """ppfleetx/models/language_model/gpt/dygraph/single_model.py, fused_linear off (needs CUDA 11.6)."""

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
    return case.parts(states, peak / MIB, held, nccl)
