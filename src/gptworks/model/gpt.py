"""The model, all of it.   Shapes: B rows, T tokens, S tokens in cache, D hidden, N heads, K heads of keys and values,
G = N / K heads that share one, H head size, V vocabulary.

It knows torch and its own config section, nothing else. Its tensors are listed in `architecture.py`. Parameters are
fp32 masters; every module casts its weight to the type of the activations it is given, and norms, the angles of
positions, softmax and the loss are computed in fp32 or better.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config.schema import ModelConfig
from gptworks.errors import UsageError
from gptworks.model.activation import activate, gated
from gptworks.model.cache import KVCache, LayerCache
from gptworks.model.documents import attend_by_document
from gptworks.model.loss import IGNORED, LinearCrossEntropy
from gptworks.model.masks import attention_mask, causal_mask, real_tokens, require_positions, seen_from
from gptworks.model.rms import normalize_by_rms
from gptworks.model.rope import Turns, turn, turns_of


class GPT(nn.Module):
    """GPT-2/3, Llama, Mistral or Qwen, by its config, as Hugging Face computes them. `forward` gives logits, or with
    labels the sum of the token losses."""

    def __init__(self, cfg: ModelConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.cfg = cfg
        self.compute_dtype = compute_dtype
        self.wte = embedding(cfg.vocab_size, cfg.hidden_size)
        # None where positions are turned or left out, as wte and head are None in a part without them.
        learned = embedding(cfg.max_positions, cfg.hidden_size) if cfg.positions == "learned" else None
        self.wpe: nn.Embedding = learned  # type: ignore[assignment]
        self.dropout = nn.Dropout(cfg.dropout_embed)
        # A dictionary, so that a block keeps its name when others are left out.
        self.blocks = nn.ModuleDict({str(i): Block(cfg) for i in range(cfg.num_layers)})
        self.ln_f = norm_of(cfg)
        self.head = Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.loss_sum = LinearCrossEntropy()
        tie(self)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        labels: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [B, T, V] (with last_only [B, V]); with labels the fp32 sum of the losses where label != -100.

        segments: tokens attend only within their own number. cache: read and extended in place.
        A part without the embeddings takes hidden states [B, T, D] in place of tokens; one without the head gives them.
        """
        # Hidden states may be a cut of the sequence; the positions are those of all tokens.
        T = tokens_BT.shape[1] if positions is None else positions.shape[-1]
        require_positions(T, self.cfg.max_positions)
        mask = attention_mask(T, segments, cache, self.cfg.sliding_window, tokens_BT.device)
        if cache is not None and positions is None:
            positions = cache.positions(T)
        turns = turns_of(self.cfg, T if positions is None else positions, tokens_BT.device)

        x_BTD = tokens_BT if self.wte is None else self.embed(tokens_BT, positions)
        for layer, block in enumerate(self.blocks.values()):
            x_BTD = block(x_BTD, mask, turns, None if cache is None else cache.layer(layer))
        counts_B = None if cache is None else cache.counts_B
        if cache is not None:
            cache.advance(T)
        if self.head is None:
            return x_BTD
        x_BTD = self.ln_f(_last(x_BTD, counts_B) if last_only else x_BTD)
        return self.head(x_BTD) if labels is None else self.loss_sum(x_BTD, self.head.weight, labels)

    def embed(self, tokens_BT: Tensor, positions: Tensor | None) -> Tensor:
        x_BTD = self.wte(tokens_BT)
        if self.wpe is not None:
            if positions is None:
                positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            x_BTD = x_BTD + self.wpe(positions)
        return self.dropout(x_BTD.to(self.compute_dtype))

    def loss(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Mean loss of predicting each token of [B, S + 1] from those before it, in training as in evaluation mode.

        Where `attention_mask` is 0 there is padding, on the right of a row, which is never scored.

        >>> batch = model.tokenizer(["hello world", "hello"], padding=True, return_tensors="pt")   # doctest: +SKIP
        >>> model.loss(batch["input_ids"], batch["attention_mask"])   # doctest: +SKIP
        """
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise UsageError(
                f"loss: got tokens of shape {list(tokens.shape)}; needs [rows, S + 1] with 2 or more in a row."
            )
        labels = tokens[:, 1:]
        if attention_mask is not None:
            labels = labels.masked_fill(~real_tokens(attention_mask, tokens)[:, 1:], IGNORED)
        num_scored = (labels != IGNORED).sum()
        if num_scored == 0:
            raise UsageError("loss: no token is scored, so there is no mean. Needed: a row with 2 tokens or more.")
        loss: Tensor = self(tokens[:, :-1], labels=labels) / num_scored
        return loss

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def new_cache(self, rows: int, length: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for the layers and heads that are here."""
        attention: Attention = next(iter(self.blocks.values())).get_submodule("attn")  # type: ignore[assignment]
        kind = {"dtype": dtype or self.compute_dtype, "device": self.device}
        return KVCache(len(self.blocks), rows, attention.num_kv_heads, length, self.cfg.head_size, **kind)


def embedding(number: int, size: int) -> nn.Embedding:
    """As torch begins it, but where there is nothing to fill: to draw for the meta device torch loads its compiler."""
    weight = torch.empty(number, size)
    return nn.Embedding(number, size, _weight=weight if weight.is_meta else weight.normal_())


def tie(model: GPT) -> None:
    """Let head and word embedding be one parameter. Needed again after anything that replaces parameters."""
    if model.cfg.tied and model.wte is not None and model.head is not None:
        model.head.weight = model.wte.weight


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.ln1 = norm_of(cfg)
        self.attn = Attention(cfg)
        self.ln2 = norm_of(cfg)
        self.mlp = FeedForward(cfg)

    def forward(self, x_BTD: Tensor, mask: Tensor | None, turns: Turns | None, cache: LayerCache | None) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln1(x_BTD), mask, turns, cache)
        return x_BTD + self.mlp(self.ln2(x_BTD))


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.head_size, self.heads_per_kv = cfg.head_size, cfg.heads_per_kv
        # Rows ordered (head of keys and values, [queries of its heads | key | value], head size): a cut between those
        # heads is a plain cut, and the number of heads that arrived is read off the shape, as is that of tokens.
        num_rows = (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_size
        self.qkv = Linear(cfg.hidden_size, num_rows, bias=cfg.bias != "none")
        self.q_norm = RMSNorm(cfg.head_size, eps=cfg.layernorm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_size, eps=cfg.layernorm_eps) if cfg.qk_norm else None
        self.core = CoreAttention(cfg)
        self.out = Linear(cfg.num_heads * cfg.head_size, cfg.hidden_size, bias=cfg.bias == "all")
        self.dropout = nn.Dropout(cfg.dropout_hidden)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values that are here: tensor parallelism cuts between them."""
        return self.qkv.out_features // ((self.heads_per_kv + 2) * self.head_size)

    def forward(self, x_BTD: Tensor, mask: Tensor | None, turns: Turns | None, cache: LayerCache | None) -> Tensor:
        qkv_BTF = self.qkv(x_BTD)
        B, T, _ = qkv_BTF.shape
        G, H = self.heads_per_kv, self.head_size
        q_BTKGH, k_BTK1H, v_BTK1H = qkv_BTF.view(B, T, -1, G + 2, H).split((G, 1, 1), dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTKGH, k_BTK1H = self.q_norm(q_BTKGH), self.k_norm(k_BTK1H)
        if turns is not None:
            q_BTKGH, k_BTK1H = turn(q_BTKGH, turns), turn(k_BTK1H, turns)
        q, k, v = (each.reshape(B, T, -1, H).transpose(1, 2) for each in (q_BTKGH, k_BTK1H, v_BTK1H))
        if cache is not None:
            k, v = cache.extend(k, v)
        mixed_BNTH = self.core(q, k, v, mask)
        return self.dropout(self.out(mixed_BNTH.transpose(1, 2).reshape(B, T, -1)))


class CoreAttention(nn.Module):
    """softmax(QK / sqrt(H)) V. No parameters; a module of its own so that recomputation can wrap just this."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.math = cfg.attention == "math"
        self.dropout = cfg.dropout_attention

    def forward(self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask_BNTS: Tensor | None) -> Tensor:
        dropout, shares = self.dropout if self.training else 0.0, q_BNTH.shape[1] // k_BKSH.shape[1]
        k_BNSH, v_BNSH = (each if shares == 1 else each.repeat_interleave(shares, 1) for each in (k_BKSH, v_BKSH))
        if mask_BNTS is not None and mask_BNTS.dtype != torch.bool:
            if not self.math and not torch.compiler.is_compiling():
                return attend_by_document(q_BNTH, k_BNSH, v_BNSH, mask_BNTS, dropout)
            mask_BNTS = seen_from(mask_BNTS)
        if not self.math:
            return F.scaled_dot_product_attention(
                q_BNTH, k_BNSH, v_BNSH, attn_mask=mask_BNTS, dropout_p=dropout, is_causal=mask_BNTS is None
            )
        if mask_BNTS is None:
            mask_BNTS = causal_mask(q_BNTH.shape[2], q_BNTH.device)
        scores_BNTS = (q_BNTH @ k_BNSH.transpose(-2, -1)) * q_BNTH.shape[-1] ** -0.5
        scores_BNTS = scores_BNTS.to(torch.promote_types(scores_BNTS.dtype, torch.float32))
        weights_BNTS = scores_BNTS.masked_fill(~mask_BNTS, -torch.inf).softmax(-1).to(q_BNTH.dtype)
        return F.dropout(weights_BNTS, dropout, training=dropout > 0) @ v_BNSH


class FeedForward(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.gelu = cfg.gelu
        has_bias = cfg.bias == "all"
        self.gate = Linear(cfg.hidden_size, cfg.ffn_size, bias=has_bias) if cfg.mlp == "swiglu" else None
        self.up = Linear(cfg.hidden_size, cfg.ffn_size, bias=has_bias)
        self.down = Linear(cfg.ffn_size, cfg.hidden_size, bias=has_bias)
        self.dropout = nn.Dropout(cfg.dropout_hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        inner = self.up(x_BTD)
        inner = activate(inner, self.gelu) if self.gate is None else gated(self.gate(x_BTD), inner)
        return self.dropout(self.down(inner))


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    eps: float
    bias = None  # as a LayerNorm that has none

    def forward(self, x: Tensor) -> Tensor:
        return normalize_by_rms(x, self.weight, self.eps)


def norm_of(cfg: ModelConfig) -> LayerNorm | RMSNorm:
    if cfg.norm == "rmsnorm":
        return RMSNorm(cfg.hidden_size, eps=cfg.layernorm_eps)
    return LayerNorm(cfg.hidden_size, eps=cfg.layernorm_eps, bias=cfg.bias == "all")


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    shift = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), shift, eps).to(x.dtype)


def _last(x_BTD: Tensor, counts_B: Tensor | None) -> Tensor:
    """[B, D]: the last token of each row, or the last that is real."""
    if counts_B is None:
        return x_BTD[:, -1]
    return x_BTD[torch.arange(x_BTD.shape[0], device=x_BTD.device), counts_B - 1]
