"""torch: one file, a program of torch.export. It runs without the code of the model, on any batch and length.

Shapes: L layers, B rows, K heads of keys and values, G heads that share one, P tokens that were read before, T new
ones, H head size, V vocabulary.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks import architecture
from gptworks.config.schema import ModelConfig
from gptworks.export.contract import Source, Written, described
from gptworks.model.rope import attention_factor, frequencies

NAME = "torch"
TITLE = "torch.export program, for torch"
WEIGHTS = ("fp32",)
KNOWN = dict(architecture.LLAMA)
RUNTIME = ("torch",)


class _Program(nn.Module):
    """tokens [B, T], padding [B], past [L, 2, B, K, P, H] -> logits [B, T, V], present [L, 2, B, K, P + T, H].

    With an empty past it reads a prompt, with the present of the last call it goes on from there. `padding` is how many
    tokens on the left of each row mean nothing. (Of a mask of P + T the tracer would note that it is 4 at least.)
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.cfg = source.model
        self.names = set(source.tensors)
        for name, each in source.tensors.items():
            # A dot has a meaning in the names of a module.
            parameter = nn.Parameter(each.read().to(torch.float32).clone(), requires_grad=False)
            self.register_parameter(name.replace(".", "_"), parameter)
        if self.cfg.positions == "rope":
            self.register_buffer("frequencies", frequencies(self.cfg))

    def forward(self, tokens: Tensor, padding: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        cfg = self.cfg
        here = torch.arange(tokens.shape[1]) + past.shape[4]
        keys = torch.arange(past.shape[4] + tokens.shape[1])
        allowed = (keys <= here[:, None]) & (keys >= padding[:, None, None])
        if cfg.sliding_window:
            allowed = allowed & (keys > here[:, None] - cfg.sliding_window)
        # Finite: padding on the left sees nothing at all, and must not become NaN.
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
        positions = (here - padding[:, None]).clamp(min=0)
        x = F.embedding(tokens, self.of("wte.weight"))
        if cfg.positions == "learned":
            x = x + F.embedding(positions, self.of("wpe.weight"))
        present = []
        for layer in range(cfg.num_layers):
            block = f"blocks.{layer}"
            q, new = self.queries(f"{block}.attn", self.norm(f"{block}.ln1", x), positions)
            keys_values = torch.cat([past[layer], new], dim=3)
            present.append(keys_values)
            k, v = keys_values if cfg.heads_per_kv == 1 else keys_values.repeat_interleave(cfg.heads_per_kv, dim=2)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + self.linear(f"{block}.attn.out", mixed.transpose(1, 2).flatten(2))
            x = x + self.feed_forward(f"{block}.mlp", self.norm(f"{block}.ln2", x))
        head = self.of("wte.weight" if cfg.tied else "head.weight")
        return F.linear(self.norm("ln_f", x), head), torch.stack(present)

    def queries(self, name: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, K x G, T, H]; keys and values [2, B, K, T, H]."""
        cfg, (B, T, _) = self.cfg, x.shape
        heads = self.linear(f"{name}.qkv", x).view(B, T, cfg.num_kv_heads, cfg.heads_per_kv + 2, cfg.head_size)
        q, k, v = heads.split((cfg.heads_per_kv, 1, 1), dim=3)
        if cfg.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        if cfg.positions == "rope":
            q, k = self.turn(q, positions), self.turn(k, positions)
        return q.flatten(2, 3).transpose(1, 2), torch.stack([k, v]).squeeze(4).transpose(2, 3)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, K, any number, H]: number i and number i + H/2 of a head are a pair."""
        angles = (positions[..., None].float() * self.get_buffer("frequencies"))[:, :, None, None]
        strength = attention_factor(self.cfg.rope_scaling)
        cos, sin = angles.cos() * strength, angles.sin() * strength
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        inner = self.linear(f"{name}.up", x)
        if self.cfg.mlp == "swiglu":
            return self.linear(f"{name}.down", F.silu(self.linear(f"{name}.gate", x)) * inner)
        return self.linear(f"{name}.down", self.activate(inner))

    def of(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "_"))

    def bias_of(self, name: str) -> Tensor | None:
        return self.of(f"{name}.bias") if f"{name}.bias" in self.names else None

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.of(f"{name}.weight"), self.bias_of(name))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, eps = self.of(f"{name}.weight"), self.cfg.layernorm_eps
        if self.cfg.norm == "rmsnorm" or name.endswith(("q_norm", "k_norm")):
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.layer_norm(x, weight.shape, weight, self.bias_of(name), eps)

    def activate(self, x: Tensor) -> Tensor:
        if self.cfg.gelu == "sigmoid":
            return x * torch.sigmoid(1.702 * x)
        return F.gelu(x, approximate="tanh" if self.cfg.gelu == "tanh" else "none")


def require() -> None:
    """Nothing beside torch."""


def write(folder: Path, stem: str, source: Source, weights: str) -> Written:
    program = _Program(source).eval()
    cfg = source.model
    B, P, T = 2, 5, 3  # not 0 or 1, which the tracer would take for constants
    example = (
        torch.zeros(B, T, dtype=torch.long),
        torch.zeros(B, dtype=torch.long),
        torch.zeros(cfg.num_layers, 2, B, cfg.num_kv_heads, P, cfg.head_size),
    )
    dim = torch.export.Dim.DYNAMIC
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        exported = torch.export.export(program, example, dynamic_shapes=({0: dim, 1: dim}, {0: dim}, {2: dim, 4: dim}))
        torch.export.save(exported, folder / f"{stem}.pt2")
    cache = f"[{cfg.num_layers}, 2, batch, {cfg.num_kv_heads}, PAST, {cfg.head_size}]"
    return Written(
        [described(name, each.shape, each.dtype) for name, each in program.named_parameters()],
        {
            "tokens": "int64 [batch, length]",
            "padding": "int64 [batch], tokens on the left of each row that mean nothing",
            "past": "float32 " + cache.replace("PAST", "past"),
        },
        {
            "logits": f"float32 [batch, length, {cfg.vocab_size}]",
            "present": "float32 " + cache.replace("PAST", "past + length"),
        },
    )


def script(stem: str, source: Source) -> tuple[list[str], list[str]]:
    cfg = source.model
    return (
        ["import torch"],
        [
            f'model = torch.export.load("{stem}.pt2").module()',
            f"new, now, past = [], ids, torch.zeros({cfg.num_layers}, 2, 1, {cfg.num_kv_heads}, 0, {cfg.head_size})",
            f"while len(new) < count and new[-1:] != [{source.tokenizer.eod_id}]:",
            "    logits, past = model(torch.tensor([now]), torch.tensor([0]), past)",
            "    now = [int(logits[0, -1].argmax())]",
            "    new += now",
        ],
    )


def recognise(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.pt2"))), None)


def open(file: Path, model: ModelConfig) -> "_Runner":
    return _Runner(file, model)


class _Runner:
    def __init__(self, file: Path, cfg: ModelConfig) -> None:
        self.program: Any = torch.export.load(file).module()
        self.empty = torch.zeros(cfg.num_layers, 2, 1, cfg.num_kv_heads, 0, cfg.head_size)

    @torch.no_grad()
    def continue_greedily(self, tokens: Sequence[int], max_new_tokens: int, eod_id: int | None) -> list[int]:
        new: list[int] = []
        now, past = list(tokens), self.empty
        while len(new) < max_new_tokens and (not new or new[-1] != eod_id):
            logits, past = self.program(torch.tensor([now]), torch.tensor([0]), past)
            now = [int(logits[0, -1].argmax())]
            new += now
        return new
