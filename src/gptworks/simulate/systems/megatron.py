"""Megatron-LM (PyTorch)."""

import functools
from typing import Any

import torch
from torch.nn.functional import embedding, linear

from gptworks.simulate.systems.case import CARD, CONTEXT, Case, Parts, communicator, machines_of, model_of
from gptworks.simulate.systems.operations import (
    RECORDER,
    Norm,
    Recomputed,
    Reduced,
    TensorParallelLayer,
    dropout,
    new,
    parameter,
    softmax,
)
from gptworks.simulate.systems.schedule import STEPS, forget, one_forward_one_backward
from gptworks.simulate.systems.trace import MIB, CachingAllocator, Recorder


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


class MegatronLayer(TensorParallelLayer):
    """ParallelTransformerLayer with its defaults: fused softmax, bias+GeLU and bias+dropout+add are on."""

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
        self.words: Any = parameter(case.vocab // t, h) if self.first or self.last else None
        self.positions: Any = parameter(case.seq_len, h) if self.first else None
        self.layers = [MegatronLayer(case) for _ in range(case.layers // case.pp)]
        self.norm = (parameter(h), parameter(h)) if self.last else ()
        own = [p for p in (self.words, self.positions) if p is not None]
        self.parameters = [*own, *(p for layer in self.layers for p in layer.parameters), *self.norm]

    def __call__(self, x: Any) -> torch.Tensor:
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
    return case.parts(states, peak / MIB, held, nccl)


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
