"""The backward pass through a block, written down as a ledger in the same way as the forward pass."""

from dataclasses import replace

from gptworks.plan.block_forward import attend, attention, cast, feed_forward_up, row_linear, scatter_sum
from gptworks.plan.block_kinds import gelu_backward, norm, norm_backward, queries_and_keys_backward
from gptworks.plan.block_shape import BlockShape
from gptworks.plan.ledger import Ledger
from gptworks.plan.sizes import FP32


def _weight_gradient(ledger: Ledger, s: BlockShape, name: str, fresh: bool, *done: str) -> None:
    """`done`: what goes as soon as the product is there."""
    size = s.matrix(name)
    ledger.use(product=size * s.compute)
    ledger.drop(*done, f"cast_{name}")
    if not s.casts:  # FSDP's, until the block is done
        ledger.drop("product")
        ledger.grow(**{f"grad_{name}": size * s.compute})
        return
    if s.narrow:
        ledger.use(wide_gradient=size * FP32)
    ledger.drop("product", "wide_gradient")
    if fresh:
        ledger.grow(**{f"grad_{name}": size * FP32})


def _row_backward(ledger: Ledger, s: BlockShape, name: str, inner: int, saved: str, fresh: bool) -> None:
    """Gradient of the input as `inner_gradient`; the residual stream goes on with the one that came."""
    if s.split:
        ledger.gather(parts=s.whole)
        if s.transposed:
            ledger.gather(all_gradient=s.whole)
            ledger.drop("parts")
    ledger.use(inner_gradient=inner)
    _weight_gradient(ledger, s, name, fresh, "parts", "all_gradient", saved, "incoming")


def _column_backward(ledger: Ledger, s: BlockShape, name: str, saved: str, fresh: bool) -> None:
    """From `inner_gradient` to `y_gradient`."""
    if s.split:
        ledger.use(all_gradient=s.whole)
        scatter_sum(ledger, s, "all_gradient")
        ledger.gather(parts=s.whole)
        if s.transposed:
            ledger.gather(tokens=s.whole)
            ledger.drop("parts")
        _weight_gradient(ledger, s, name, fresh, "parts", "tokens", "mine", "inner_gradient", saved)
        ledger.use(y_gradient=s.stream)
        return
    ledger.use(y_gradient=s.stream)
    _weight_gradient(ledger, s, name, fresh, "inner_gradient", saved)
    if s.tp > 1:
        ledger.gather(total=s.tokens * s.hidden * FP32)
        if s.narrow:
            ledger.use(mine=s.stream)
        ledger.drop("y_gradient", "mine", "total")
        ledger.use(y_gradient=s.stream)


def _swiglu_backward(ledger: Ledger, s: BlockShape, fresh: bool) -> None:
    """From `inner_gradient`, of the product, through both matrices to `y_gradient`."""
    ledger.use(times_up=s.inner)
    ledger.use(of_gate=s.inner)
    ledger.drop("times_up")
    ledger.use(of_up=s.inner)
    ledger.drop("inner_gradient", "gated", "u", "of_gate")
    ledger.use(inner_gradient=s.inner)
    _column_backward(ledger, s, "gate", "nothing", fresh)
    ledger.drop("y_gradient")
    ledger.use(through_gate=s.stream)
    ledger.drop("of_up")
    ledger.use(inner_gradient=s.inner)
    _column_backward(ledger, s, "up", "y2", fresh)
    ledger.use(both=s.stream)
    ledger.drop("y_gradient", "through_gate", "both")
    ledger.use(y_gradient=s.stream)


def _core_backward(ledger: Ledger, s: BlockShape) -> None:
    """From `inner_gradient`, of what the heads gave, to that of qkv."""
    heads, scores = s.in_heads, s.scores
    if s.attention == "fused":
        ledger.use(q_gradient=heads, k_gradient=heads, v_gradient=heads)
        ledger.drop("inner_gradient", "lse", "mixed", "" if s.head_norms else "qkv", "window")
    else:
        wide = FP32 if s.attention == "sdpa_math" else s.compute
        in_wide = heads // s.compute * wide
        ledger.drop("mixed")
        ledger.use(mixed_gradient=in_wide)
        ledger.drop("inner_gradient")
        if s.recompute == "core_attn":
            attend(ledger, s)
            ledger.drop("mixed_heads", "mixed")
        ledger.use(v_gradient=in_wide)
        ledger.use(weights_gradient=scores * wide)
        ledger.drop("mixed_gradient", "v_copy", "dropped_weights", "weights")
        if s.dropout_attention:
            ledger.use(before_dropout=scores * wide)
            ledger.drop("weights_gradient", "attention_mask")
        if wide < FP32:
            ledger.use(wide_weights=scores * FP32)
            ledger.drop("before_dropout", "weights_gradient")
        ledger.use(score_gradient=scores * FP32)
        ledger.drop("wide_weights", "before_dropout", "weights_gradient", "softmax")
        if s.attention == "math":
            ledger.use(filled=scores * FP32)
            ledger.drop("score_gradient", "inverted", "filled")
            ledger.use(scaled=scores * s.compute, score_gradient=scores * s.compute)
            ledger.drop("scaled")
        ledger.use(q_gradient=in_wide, k_gradient=in_wide)
        ledger.drop("score_gradient", "q_copy", "k_copy", "q_gradient", "k_gradient", "v_gradient")
        ledger.drop("" if s.head_norms else "qkv")
        ledger.use(q_gradient=heads, k_gradient=heads, v_gradient=heads)
    queries_and_keys_backward(ledger, s)
    ledger.use(qkv_gradient=s.qkv)
    ledger.drop("q_gradient", "k_gradient", "v_gradient", "qkv_gradient")
    ledger.use(inner_gradient=s.qkv)


def block_backward(ledger: Ledger, s: BlockShape, fresh: bool) -> None:
    """The gradient of the stream that goes out is in the ledger as `stream_gradient`."""
    if s.recompute == "full":
        _again(ledger, replace(s, recompute="none"))
    if s.dropout:
        ledger.use(incoming=s.stream)
        ledger.drop("mask2")
    _row_backward(ledger, s, "down", s.inner, "g", fresh)
    if s.mlp == "swiglu":
        _swiglu_backward(ledger, s, fresh)
    else:
        gelu_backward(ledger, s)
        _column_backward(ledger, s, "up", "y2", fresh)
    norm_backward(ledger, s, 2)
    ledger.drop("x1")
    if s.recompute == "full_attn":
        attention(ledger, replace(s, recompute="none"), again=True)
        ledger.drop("projected", "after_dropout")
    if s.dropout:
        ledger.use(incoming=s.stream)
        ledger.drop("mask1")
    _row_backward(ledger, s, "out", s.in_heads, "nothing", fresh)
    if s.recompute == "core_attn" and s.attention == "fused":
        ledger.drop("mixed")
        attend(ledger, s)
    _core_backward(ledger, s)
    _column_backward(ledger, s, "qkv", "y1", fresh)
    norm_backward(ledger, s, 1)
    ledger.drop("x")


def _again(ledger: Ledger, s: BlockShape) -> None:
    """The forward pass in the backward pass, up to the last tensor that is needed."""
    norm(ledger, s, 1)
    attention(ledger, s)
    feed_forward_up(ledger, s)
    if s.dropout:
        row_linear(ledger, s, "down", "projected")
        ledger.keep(mask2=s.mask)
        ledger.drop("projected")
    else:
        cast(ledger, s, "down")
    if s.narrow:
        ledger.drop("x1")
