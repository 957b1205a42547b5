"""The other side of every comparison: the same GPT trained by other people's code, and by a plain loop.

nanoGPT is its own `model.py`, which is not part of this tree: GPTWORKS_NANOGPT names the file.
"""

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.checkpoint.systems.huggingface_families import family_of
from gptworks.config import OptimConfig, ParallelConfig, RunFolderConfig, ScalerConfig
from gptworks.config.schema import InitConfig, ModelConfig, TrainConfig
from gptworks.data.loader import Batch
from gptworks.launch import process_group
from gptworks.parallel.build import FreshWeights, build
from gptworks.train import native_blocks, optim
from gptworks.train.precision import LossScaler
from gptworks.train.step import train_step

Step = Callable[[Tensor, Tensor], float]  # tokens, labels -> loss; one whole optimizer step


@dataclass(frozen=True)
class Peer:
    name: str
    make: Callable[[ModelConfig], Step]
    is_any_kind: bool = True  # or knows GPT-2 only


def gptworks_step(
    cfg: ModelConfig,
    compile_blocks: bool = False,
    native: bool = True,
    compute_dtype: torch.dtype = torch.float32,
    segments: Tensor | None = None,
) -> Step:
    """Our own step, exactly as the training loop calls it. native: with the C++ function where it knows the blocks.
    segments: of each token the number of its document, which attention does not leave."""
    world = process_group.start(ParallelConfig(), RunFolderConfig(device="cpu"))
    weights = FreshWeights(InitConfig(), cfg.num_layers, 1)
    part = build(cfg, world, compute_dtype, weights, compile_blocks=compile_blocks)
    part.train()
    optimizer = optim.build(part, OptimConfig())
    if native and not compile_blocks:
        compute = "bf16" if compute_dtype == torch.bfloat16 else "fp32"
        print(native_blocks.use_where_known(part, optimizer, TrainConfig(), compute).line, file=sys.stderr)
    scaler = LossScaler(ScalerConfig(), enabled=False)
    count = 0

    def step(tokens: Tensor, labels: Tensor) -> float:
        nonlocal count
        count += 1
        batch = Batch(tokens, labels, None, segments, torch.arange(len(tokens)))
        return train_step(part, optimizer, [batch], world, scaler, clip=1.0, seed=1, step=count).loss

    return step


def transformers_step(cfg: ModelConfig, compiled: bool = False) -> Step:
    from transformers import AutoConfig, AutoModelForCausalLM

    family = family_of(cfg)
    theirs = AutoConfig.for_model(family.model_type, **family.write(cfg), use_cache=False)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa").train()
    run = torch.compile(model) if compiled else model

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = run(tokens).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    return _plain_loop(model, loss_of)


def nanogpt_step(cfg: ModelConfig, compiled: bool = False) -> Step:
    """As its train.py makes it, but with the fused AdamW, which it asks for on a GPU only and which is faster here."""
    theirs = _nanogpt()
    shape = theirs.GPTConfig(
        block_size=cfg.max_positions,
        vocab_size=cfg.vocab_size,
        n_layer=cfg.num_layers,
        n_head=cfg.num_heads,
        n_embd=cfg.hidden_size,
        dropout=cfg.dropout_hidden,
        bias=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it tells the number of its parameters
        model = theirs.GPT(shape).train()
    run = torch.compile(model) if compiled else model
    return _plain_loop(model, lambda tokens, labels: run(tokens, labels)[1])


def _nanogpt() -> Any:
    path = os.environ.get("GPTWORKS_NANOGPT", "")
    if not path:
        sys.exit("GPTWORKS_NANOGPT is not set; needed: the path of nanoGPT's model.py")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if spec is None or spec.loader is None:
        sys.exit(f"GPTWORKS_NANOGPT: {path} is no Python file; needed: nanoGPT's model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def products_alone(cfg: ModelConfig) -> Step:
    """Only the matrix products of the linear layers and the head: forward, gradient of the input and of the weight.
    No step that uses these products can be faster."""
    shapes = {
        "qkv": ((cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_size, cfg.hidden_size),
        "out": (cfg.hidden_size, cfg.num_heads * cfg.head_size),
        "up": (cfg.ffn_size, cfg.hidden_size),
        "down": (cfg.hidden_size, cfg.ffn_size),
    } | ({"gate": (cfg.ffn_size, cfg.hidden_size)} if cfg.mlp == "swiglu" else {})
    layers = [shapes] * cfg.num_layers + [{"head": (cfg.vocab_size, cfg.hidden_size)}]
    weights = [torch.randn(shape) * 0.02 for layer in layers for shape in layer.values()]

    @torch.no_grad()
    def step(tokens: Tensor, labels: Tensor) -> float:
        rows = tokens.numel()
        inputs = {size: torch.ones(rows, size) for size in {n for w in weights for n in w.shape}}
        for weight in weights:
            x, grad = inputs[weight.shape[1]], inputs[weight.shape[0]]
            F.linear(x, weight)
            torch.mm(grad, weight)
            torch.mm(grad.T, x)
        return 0.0

    return step


class _PlainBlock(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        width = cfg.hidden_size
        self.num_heads, self.dropout_attention = cfg.num_heads, cfg.dropout_attention
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(cfg.dropout_hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(rows, length, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        p = self.dropout_attention if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.dropout(self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width)))
        return x + self.dropout(self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")))


class _PlainGPT(nn.Module):
    """A small GPT in the manner of nanoGPT: whole logits, one cross-entropy."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.wpe = nn.Embedding(cfg.max_positions, cfg.hidden_size)
        self.dropout = nn.Dropout(cfg.dropout_embed)
        self.blocks = nn.ModuleList(_PlainBlock(cfg) for _ in range(cfg.num_layers))
        self.ln_f = nn.LayerNorm(cfg.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def plain_step(cfg: ModelConfig, compiled: bool = False) -> Step:
    model = _PlainGPT(cfg)
    return _plain_loop(model, torch.compile(model) if compiled else model)


def _plain_loop(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(tokens: Tensor, labels: Tensor) -> float:
        loss = loss_of(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


EAGER = [
    Peer("gptworks", gptworks_step),
    Peer("gptworks, torch", lambda cfg: gptworks_step(cfg, native=False)),
    Peer("transformers", transformers_step),
    Peer("plain loop (nanoGPT style)", plain_step, is_any_kind=False),
    Peer("nanoGPT", nanogpt_step, is_any_kind=False),
]
COMPILED = [
    Peer("gptworks, torch, compiled", lambda cfg: gptworks_step(cfg, compile_blocks=True, native=False)),
    Peer("transformers, compiled", lambda cfg: transformers_step(cfg, compiled=True)),
    Peer("plain loop, compiled", lambda cfg: plain_step(cfg, compiled=True), is_any_kind=False),
    Peer("nanoGPT, compiled", lambda cfg: nanogpt_step(cfg, compiled=True), is_any_kind=False),
]
BF16 = Peer("gptworks, bf16", lambda cfg: gptworks_step(cfg, compute_dtype=torch.bfloat16))
PRODUCTS = Peer("its products alone", products_alone)
