"""The model, all of it.   Shapes: B rows, T tokens, S tokens in cache, D hidden, N heads, H head size, V vocabulary.

It knows torch and its own config section, nothing else. Parameters are fp32 masters; every module casts its weight to
the type of the activations it is given, and LayerNorm, softmax and the loss are computed in fp32 or better.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config.schema import ModelConfig
from gptworks.errors import UsageError
from gptworks.model.activation import activate
from gptworks.model.loss import IGNORED, LinearCrossEntropy

__all__ = ["GPT", "IGNORED", "KVCache", "tie"]


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


class KVCache:
    """Keys and values of what each row has read so far: fixed shapes, updated in place, one length per row."""

    def __init__(self, num_layers: int, rows: int, num_heads: int, length: int, head_size: int, **kind: object) -> None:
        shape = (num_layers, rows, num_heads, length, head_size)
        self.keys_LBNSH = torch.zeros(shape, **kind)  # type: ignore[call-overload]
        self.values_LBNSH = torch.zeros(shape, **kind)  # type: ignore[call-overload]
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=self.keys_LBNSH.device)
        self.length = length
        # Upper bound of lengths_B, known without asking the device: attention looks no further.
        self.used = 0
        # How many tokens of the next forward are real, per row (the rest is padding on the right); None = all.
        self.counts_B: Tensor | None = None

    def positions(self, num_tokens: int) -> Tensor:
        return self.lengths_B[:, None] + torch.arange(num_tokens, device=self.lengths_B.device)

    def mask(self, num_tokens: int) -> Tensor:
        """[B, 1, T, S]: which stored tokens each new token may look at."""
        visible = torch.arange(self.used + num_tokens, device=self.lengths_B.device)
        return (visible <= self.positions(num_tokens)[:, :, None])[:, None]

    def layer(self, number: int) -> "LayerCache":
        return LayerCache(self, self.keys_LBNSH[number], self.values_LBNSH[number])

    def advance(self, num_tokens: int) -> None:
        self.lengths_B += num_tokens if self.counts_B is None else self.counts_B
        self.used += num_tokens
        self.counts_B = None

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was: beams change places, rows are copied or left out."""
        at = torch.tensor(rows, dtype=torch.long, device=self.lengths_B.device)
        self.lengths_B = self.lengths_B[at]
        for name in ("keys_LBNSH", "values_LBNSH"):
            old = getattr(self, name)
            new = old if len(rows) == old.shape[1] else old.new_zeros(old.shape[0], len(rows), *old.shape[2:])
            new[:, :, :, : self.used] = old[:, at, :, : self.used]
            setattr(self, name, new)


class LayerCache:
    """What one block sees of the cache."""

    def __init__(self, whole: KVCache, keys_BNSH: Tensor, values_BNSH: Tensor) -> None:
        self.whole, self.keys_BNSH, self.values_BNSH = whole, keys_BNSH, values_BNSH

    def extend(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values behind the old ones; return all of them."""
        num_tokens = k_BNTH.shape[2]
        rows = torch.arange(k_BNTH.shape[0], device=k_BNTH.device)[:, None]
        at_BT = self.whole.positions(num_tokens)
        self.keys_BNSH[rows, :, at_BT] = k_BNTH.transpose(1, 2).to(self.keys_BNSH.dtype)
        self.values_BNSH[rows, :, at_BT] = v_BNTH.transpose(1, 2).to(self.values_BNSH.dtype)
        end = self.whole.used + num_tokens
        return self.keys_BNSH[:, :, :end].to(k_BNTH.dtype), self.values_BNSH[:, :, :end].to(v_BNTH.dtype)


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

    def forward(self, x_BTD: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        qkv_BTF = self.qkv(x_BTD)
        B, T, _ = qkv_BTF.shape
        q_BTNH, k_BTNH, v_BTNH = qkv_BTF.view(B, T, -1, 3, self.head_size).unbind(3)
        q, k, v = q_BTNH.transpose(1, 2), k_BTNH.transpose(1, 2), v_BTNH.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(k, v)
        mixed_BNTH = self.core(q, k, v, mask)
        return self.dropout(self.out(mixed_BNTH.transpose(1, 2).reshape(B, T, -1)))


class FeedForward(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.gelu = cfg.gelu
        self.up = Linear(cfg.hidden_size, cfg.ffn_size)
        self.down = Linear(cfg.ffn_size, cfg.hidden_size)
        self.dropout = nn.Dropout(cfg.dropout_hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.down(activate(self.up(x_BTD), self.gelu)))


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
        if self.cfg.max_positions < T:
            raise UsageError(
                f"{T} tokens in a row, but the model has {self.cfg.max_positions} positions. Give it fewer."
            )
        if cache is not None and segments is not None:
            raise UsageError("segments and cache cannot be used together: a cache holds one document per row.")
        mask = None
        if cache is not None:
            positions = cache.positions(T) if positions is None else positions
            # The first chunk of an empty cache is plain causal attention, which has the fastest kernel.
            mask = None if cache.used == 0 else cache.mask(T)
        elif segments is not None:
            causal = causal_mask(segments.shape[1], tokens_BT.device)
            mask = (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]

        x_BTD = tokens_BT
        if self.wte is not None:
            if positions is None:
                positions = torch.arange(T, device=tokens_BT.device)
            x_BTD = self.dropout((self.wte(tokens_BT) + self.wpe(positions)).to(self.compute_dtype))
        for layer, block in enumerate(self.blocks.values()):
            x_BTD = block(x_BTD, mask, None if cache is None else cache.layer(layer))
        counts_B = None
        if cache is not None:
            counts_B = cache.counts_B
            cache.advance(T)
        if self.head is None:
            return x_BTD
        x_BTD = self.ln_f(self._last(x_BTD, counts_B) if last_only else x_BTD)
        if labels is None:
            return self.head(x_BTD)
        return self.loss_sum(x_BTD, self.head.weight, labels)

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
            labels = labels.masked_fill(~_real_tokens(attention_mask, tokens)[:, 1:], IGNORED)
        num_scored = (labels != IGNORED).sum()
        if num_scored == 0:
            raise UsageError("loss: no token is scored, so there is no mean. Needed: a row with 2 tokens or more.")
        loss: Tensor = self(tokens[:, :-1], labels=labels) / num_scored
        return loss

    @staticmethod
    def _last(x_BTD: Tensor, counts_B: Tensor | None) -> Tensor:
        if counts_B is None:
            return x_BTD[:, -1]
        return x_BTD[torch.arange(x_BTD.shape[0], device=x_BTD.device), counts_B - 1]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def new_cache(self, rows: int, length: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for the layers and heads that are here."""
        qkv: Linear = next(iter(self.blocks.values())).get_submodule("attn.qkv")  # type: ignore[assignment]
        num_heads = qkv.out_features // (3 * self.cfg.head_size)
        kind = {"dtype": dtype or self.compute_dtype, "device": self.device}
        return KVCache(len(self.blocks), rows, num_heads, length, self.cfg.head_size, **kind)


def tie(model: GPT) -> None:
    """Let head and word embedding be one parameter. Needed again after anything that replaces parameters."""
    if model.cfg.tied and model.wte is not None and model.head is not None:
        model.head.weight = model.wte.weight


def _real_tokens(attention_mask: Tensor, tokens_BT: Tensor) -> Tensor:
    """The mask as booleans. Padding before or between tokens would give them other positions than they have alone."""
    if attention_mask.shape != tokens_BT.shape:
        raise UsageError(
            f"attention_mask: got shape {list(attention_mask.shape)}; needs {list(tokens_BT.shape)}, as the tokens."
        )
    real_BT = attention_mask != 0
    for row in (real_BT[:, 1:] & ~real_BT[:, :-1]).any(1).nonzero().flatten().tolist():
        raise UsageError(
            f"attention_mask: row {row} is {attention_mask[row].tolist()[:16]}; needs padding on the right only, "
            "as Tokenizer(..., padding=True) makes it."
        )
    return real_BT


def causal_mask(num_tokens: int, device: torch.device) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
