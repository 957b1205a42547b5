"""The model, all of it.   Shapes: B rows, T tokens, S tokens in cache, D hidden, N heads, H head size, V vocabulary.

It knows torch and its own config section, nothing else. Its tensors are listed in `architecture.py`. Parameters are
fp32 masters; every module casts its weight to the type of the activations it is given, and LayerNorm, softmax and the
loss are computed in fp32 or better.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config.schema import ModelConfig
from gptworks.errors import UsageError
from gptworks.model.activation import activate
from gptworks.model.cache import KVCache, LayerCache
from gptworks.model.loss import IGNORED, LinearCrossEntropy
from gptworks.model.masks import attention_mask, causal_mask, real_tokens, require_positions


class GPT(nn.Module):
    """GPT-2/3 as Hugging Face computes it. `forward` gives logits, or with labels the sum of the token losses."""

    def __init__(self, cfg: ModelConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.cfg = cfg
        self.compute_dtype = compute_dtype
        self.wte = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.wpe = nn.Embedding(cfg.max_positions, cfg.hidden_size)
        self.dropout = nn.Dropout(cfg.dropout_embed)
        # A dictionary, so that a block keeps its name when others are left out.
        self.blocks = nn.ModuleDict({str(i): Block(cfg) for i in range(cfg.num_layers)})
        self.ln_f = LayerNorm(cfg.hidden_size, eps=cfg.layernorm_eps)
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
        mask = attention_mask(T, segments, cache)
        if cache is not None and positions is None:
            positions = cache.positions(T)

        x_BTD = tokens_BT if self.wte is None else self.embed(tokens_BT, positions)
        for layer, block in enumerate(self.blocks.values()):
            x_BTD = block(x_BTD, mask, None if cache is None else cache.layer(layer))
        counts_B = None if cache is None else cache.counts_B
        if cache is not None:
            cache.advance(T)
        if self.head is None:
            return x_BTD
        x_BTD = self.ln_f(_last(x_BTD, counts_B) if last_only else x_BTD)
        return self.head(x_BTD) if labels is None else self.loss_sum(x_BTD, self.head.weight, labels)

    def embed(self, tokens_BT: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.dropout((self.wte(tokens_BT) + self.wpe(positions)).to(self.compute_dtype))

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
        return KVCache(len(self.blocks), rows, attention.num_heads, length, self.cfg.head_size, **kind)


def tie(model: GPT) -> None:
    """Let head and word embedding be one parameter. Needed again after anything that replaces parameters."""
    if model.cfg.tied and model.wte is not None and model.head is not None:
        model.head.weight = model.wte.weight


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.ln1 = LayerNorm(cfg.hidden_size, eps=cfg.layernorm_eps)
        self.attn = Attention(cfg)
        self.ln2 = LayerNorm(cfg.hidden_size, eps=cfg.layernorm_eps)
        self.mlp = FeedForward(cfg)

    def forward(self, x_BTD: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln1(x_BTD), mask, cache)
        return x_BTD + self.mlp(self.ln2(x_BTD))


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.head_size = cfg.head_size
        # Rows ordered (head, q|k|v, head size): a cut between heads is a plain cut, and the number of heads that
        # arrived is read off the shape, as is that of tokens.
        self.qkv = Linear(cfg.hidden_size, 3 * cfg.hidden_size)
        self.core = CoreAttention(cfg)
        self.out = Linear(cfg.hidden_size, cfg.hidden_size)
        self.dropout = nn.Dropout(cfg.dropout_hidden)

    @property
    def num_heads(self) -> int:
        """Those that are here: tensor parallelism cuts between heads."""
        return self.qkv.out_features // (3 * self.head_size)

    def forward(self, x_BTD: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        qkv_BTF = self.qkv(x_BTD)
        B, T, _ = qkv_BTF.shape
        q_BTNH, k_BTNH, v_BTNH = qkv_BTF.view(B, T, -1, 3, self.head_size).unbind(3)
        q, k, v = q_BTNH.transpose(1, 2), k_BTNH.transpose(1, 2), v_BTNH.transpose(1, 2)
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

    def forward(self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, mask_BNTS: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
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
        self.up = Linear(cfg.hidden_size, cfg.ffn_size)
        self.down = Linear(cfg.ffn_size, cfg.hidden_size)
        self.dropout = nn.Dropout(cfg.dropout_hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.down(activate(self.up(x_BTD), self.gelu)))


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.bias, self.eps)


def normalize(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(x.dtype)


def _last(x_BTD: Tensor, counts_B: Tensor | None) -> Tensor:
    """[B, D]: the last token of each row, or the last that is real."""
    if counts_B is None:
        return x_BTD[:, -1]
    return x_BTD[torch.arange(x_BTD.shape[0], device=x_BTD.device), counts_B - 1]
