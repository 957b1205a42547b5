"""The forward pass through a block, written down as a ledger: one line for each tensor that model/ and parallel/ make,
in their order, and one where it goes. Never imports torch.
"""

from gptworks.plan.block_kinds import HEADS, activation, norm, queries_and_keys
from gptworks.plan.block_shape import BlockShape
from gptworks.plan.ledger import Ledger
from gptworks.plan.sizes import FP32


def cast(ledger: Ledger, s: BlockShape, name: str) -> None:
    if s.casts and s.narrow:
        ledger.keep(**{f"cast_{name}": s.matrix(name) * s.compute})


def gather_tokens(ledger: Ledger, s: BlockShape, name: str) -> None:
    """All tokens of what is split."""
    if s.split:
        ledger.gather(parts=s.whole)
        if s.transposed:
            ledger.gather(**{name: s.whole})
            ledger.drop("parts")


def scatter_sum(ledger: Ledger, s: BlockShape, source: str) -> None:
    """The sum over ranks, of which each has its tokens; `source` goes."""
    ledger.gather(sorted=s.whole if s.transposed else 0)
    if s.narrow:
        ledger.gather(received=s.whole)
        ledger.gather(sum=s.own_tokens * s.hidden * FP32)
    ledger.use(mine=s.stream)
    if s.cpu and not s.narrow:
        ledger.gather(gloo=s.whole)  # which sums in a copy of its own
    ledger.drop("sorted", "received", "sum", "gloo", source)


def row_linear(ledger: Ledger, s: BlockShape, name: str, out: str) -> None:
    """Output of the projections into the stream."""
    cast(ledger, s, name)
    if s.tp == 1:
        ledger.use(**{out: s.stream})
        return
    ledger.use(share=s.whole)
    if s.split:
        scatter_sum(ledger, s, "share")
    else:
        ledger.gather(total=s.tokens * s.hidden * FP32)
        if s.narrow:
            ledger.use(mine=s.stream)
            ledger.drop("total")
        ledger.drop("share")
    ledger.use(**{out: s.stream})
    ledger.drop("mine", "total")


def _dropped(ledger: Ledger, s: BlockShape, name: str, number: int) -> None:
    if s.dropout:
        ledger.keep(**{f"mask{number}": s.mask})
        ledger.use(after_dropout=s.stream)
        ledger.drop(name)


def attend(ledger: Ledger, s: BlockShape) -> None:
    """softmax(QK)V of `qkv`. What it gives is `mixed`, which the projection keeps; written out, another copy of it."""
    if s.repeated:
        ledger.keep(k_repeated=s.in_heads, v_repeated=s.in_heads)
    if s.attention == "fused":
        # The mask of a window as numbers to be added.
        ledger.keep(window=s.length * s.length * s.compute if s.windowed else 0)
        ledger.keep(mixed=s.in_heads, lse=s.tokens * s.heads * FP32)
        return
    # torch's own writing-out, which dropout on a CPU needs, computes in fp32; ours only the softmax.
    wide = FP32 if s.attention == "sdpa_math" else s.compute
    heads, scores = s.in_heads // s.compute * wide, s.scores
    if s.attention == "sdpa_math":
        casts = heads if s.narrow else 0
        ledger.use(q_wide=casts, k_wide=casts, v_wide=casts, q_scaled=heads, bias=s.length * s.length * FP32)
        ledger.use(k_scaled=heads)
        ledger.keep(q_copy=heads, k_copy=heads)
        if not s.copies_heads:
            ledger.drop("q_scaled", "k_scaled")
        ledger.use(product=scores * FP32)
        ledger.drop("k_scaled")
        ledger.use(biased=scores * FP32)
        ledger.drop("product")
        ledger.keep(softmax=scores * FP32)
        ledger.drop("biased")
    else:
        ledger.keep(causal=s.length * s.length)
        ledger.keep(q_copy=heads if s.copies_heads else 0, k_copy=heads if s.copies_heads and not s.repeated else 0)
        ledger.use(product=scores * s.compute)
        ledger.use(scaled=scores * s.compute)
        ledger.drop("product")
        if s.narrow:
            ledger.use(wide_scores=scores * FP32)
            ledger.drop("scaled")
        ledger.keep(inverted=s.length * s.length)
        ledger.use(filled=scores * FP32)
        ledger.drop("scaled", "wide_scores")
        ledger.keep(softmax=scores * FP32)
        ledger.drop("filled")
        if s.narrow:
            ledger.keep(weights=scores * s.compute)
    if s.dropout_attention:
        ledger.keep(attention_mask=scores * (wide if s.cpu else 1))
        ledger.keep(dropped_weights=scores * wide)
        ledger.drop("weights")
    if s.attention == "sdpa_math" and s.narrow:
        ledger.use(also_returned=scores * s.compute)
    ledger.keep(v_copy=heads if (s.copies_heads and not s.repeated) or wide > s.compute else 0)
    ledger.use(mixed_heads=heads)
    ledger.drop("q_wide", "k_wide", "v_wide", "q_scaled", "k_scaled", "bias", "also_returned", "causal")


def attention(ledger: Ledger, s: BlockShape, again: bool = False) -> None:
    """`again`: in the backward pass it ends as soon as all that is needed is there."""
    cast(ledger, s, "qkv")
    gather_tokens(ledger, s, "tokens1")
    ledger.keep(qkv=s.qkv)
    ledger.drop("tokens1", "parts")
    queries_and_keys(ledger, s)
    attend(ledger, s)
    if s.recompute == "core_attn":
        ledger.drop(*CORE)
    if s.attention != "fused":
        ledger.keep(mixed=s.in_heads)
    if again and not s.dropout:
        cast(ledger, s, "out")
    else:
        row_linear(ledger, s, "out", "projected")
        _dropped(ledger, s, "projected", 1)
    ledger.drop("mixed_heads")
    if s.repeated and s.recompute != "core_attn":
        ledger.drop("k_turned", "k_normed")
        if not s.head_norms:  # nobody looks into it any more
            ledger.drop("qkv")
    if s.keeps_copies and s.recompute != "core_attn":
        ledger.drop("" if s.head_norms else "qkv", "q_turned", "k_turned", "q_normed", "k_normed")
        if s.attention == "sdpa_math":
            ledger.drop("k_repeated", "v_repeated" if s.narrow else "")


CORE = (
    "k_repeated",
    "v_repeated",
    "lse",
    "window",
    "q_copy",
    "k_copy",
    "v_copy",
    "inverted",
    "softmax",
    "weights",
    "attention_mask",
    "dropped_weights",
)
ATTENTION = (*CORE, *HEADS, "cast_qkv", "qkv", "mixed", "cast_out", "mask1")


def _column_linear(ledger: Ledger, s: BlockShape, name: str, out: str) -> None:
    cast(ledger, s, name)
    gather_tokens(ledger, s, "tokens2")
    ledger.keep(**{out: s.inner})
    ledger.drop("tokens2", "parts")


def feed_forward_up(ledger: Ledger, s: BlockShape) -> None:
    """From what attention has added to the stream to the input of the last matrix, `g`."""
    ledger.keep(x1=s.stream)
    ledger.drop("projected", "after_dropout")
    norm(ledger, s, 2)
    _column_linear(ledger, s, "up", "u")
    if s.mlp == "swiglu":
        _column_linear(ledger, s, "gate", "gated")
    activation(ledger, s)


def block_forward(ledger: Ledger, s: BlockShape) -> None:
    """x is in the ledger as `x`."""
    norm(ledger, s, 1)
    attention(ledger, s)
    if s.recompute == "full_attn":
        ledger.drop(*ATTENTION)
    feed_forward_up(ledger, s)
    row_linear(ledger, s, "down", "projected")
    _dropped(ledger, s, "projected", 2)
    ledger.use(x2=s.stream)
    ledger.drop("projected", "after_dropout")
    if s.narrow and s.norm == "layernorm":  # what is kept of them are their wide copies
        ledger.drop("x", "x1")
    ledger.drop("x2")  # the next block's
