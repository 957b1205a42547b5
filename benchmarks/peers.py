"""The other side of every comparison: the same GPT trained by other people's code, and by a plain loop."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config import OptimConfig, ParallelConfig, RunFolderConfig, ScalerConfig
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.data.loader import Batch
from gptworks.launch import process_group
from gptworks.parallel.build import FreshWeights, build
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.step import train_step

Step = Callable[[Tensor, Tensor], float]  # tokens, labels -> loss; one whole optimizer step


@dataclass(frozen=True)
class Peer:
    name: str
    make: Callable[[ModelConfig], Step]


def gptworks_step(cfg: ModelConfig, compile_blocks: bool = False) -> Step:
    """Our own step, exactly as the training loop calls it."""
    world = process_group.start(ParallelConfig(), RunFolderConfig(device="cpu"))
    part = build(
        cfg, world, torch.float32, FreshWeights(InitConfig(), cfg.num_layers, 1), compile_blocks=compile_blocks
    )
    part.train()
    optimizer = optim.build(part, OptimConfig())
    scaler = LossScaler(ScalerConfig(), enabled=False)
    count = 0

    def step(tokens: Tensor, labels: Tensor) -> float:
        nonlocal count
        count += 1
        batch = Batch(tokens, labels, None, None, torch.arange(len(tokens)))
        return train_step(part, optimizer, [batch], world, scaler, clip=1.0, seed=1, step=count).loss

    return step


def transformers_step(cfg: ModelConfig, compiled: bool = False) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2Config(
        vocab_size=cfg.vocab_size,
        n_positions=cfg.max_positions,
        n_embd=cfg.hidden_size,
        n_layer=cfg.num_layers,
        n_head=cfg.num_heads,
        embd_pdrop=cfg.dropout_embed,
        resid_pdrop=cfg.dropout_hidden,
        attn_pdrop=cfg.dropout_attention,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(theirs).train()
    run = torch.compile(model) if compiled else model

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = run(tokens).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    return _plain_loop(model, loss_of)


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
    Peer("transformers", transformers_step),
    Peer("plain loop (nanoGPT style)", plain_step),
]
COMPILED = [
    Peer("gptworks, compiled", lambda cfg: gptworks_step(cfg, compile_blocks=True)),
    Peer("transformers, compiled", lambda cfg: transformers_step(cfg, compiled=True)),
    Peer("plain loop, compiled", lambda cfg: plain_step(cfg, compiled=True)),
]
