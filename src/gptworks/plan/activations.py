"""What the passes through one block, the embeddings and the loss hold, written down as a ledger: one line for each
tensor that model/ and parallel/ make, in their order, and one where it goes.

Three of these are peaks that nothing shows from the shapes alone: what autograd keeps, what is there on the way, and
what the backward pass needs on top. So each pass is followed, not summed up. Never imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

CHUNK_ELEMENTS = 16 * 1024 * 1024  # model/loss.py: logits held at a time
FP32 = 4


class Bytes:
    """By what they are for. (Not a dataclass: a search makes many thousands of them.)"""

    __slots__ = ("activations", "communication", "gradients", "temporaries")

    def __init__(self, activations: int = 0, temporaries: int = 0, gradients: int = 0, communication: int = 0) -> None:
        self.activations = activations  # kept for the backward pass
        self.temporaries = temporaries
        self.gradients = gradients
        self.communication = communication

    @property
    def total(self) -> int:
        return self.activations + self.temporaries + self.gradients + self.communication

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            self.activations + other.activations,
            self.temporaries + other.temporaries,
            self.gradients + other.gradients,
            self.communication + other.communication,
        )

    def __sub__(self, other: "Bytes") -> "Bytes":
        return self + -1 * other

    def __rmul__(self, times: int) -> "Bytes":
        return Bytes(
            times * self.activations, times * self.temporaries, times * self.gradients, times * self.communication
        )


NOTHING = Bytes()


class Ledger:
    """Tensors by name, and the moment when they were most."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, int]] = {}
        self.now = 0
        self.high = 0
        self.most = NOTHING

    def _take(self, kind: str, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            if not size:
                continue
            assert name not in self.held, name
            self.held[name] = (kind, size)
            self.now += size
        if self.now > self.high:
            self.high, self.most = self.now, self.snapshot()

    def keep(self, **sizes: int) -> None:
        """For the backward pass."""
        self._take("activations", sizes)

    def use(self, **sizes: int) -> None:
        """For a while."""
        self._take("temporaries", sizes)

    def grow(self, **sizes: int) -> None:
        """Gradients."""
        self._take("gradients", sizes)

    def gather(self, **sizes: int) -> None:
        self._take("communication", sizes)

    def drop(self, *names: str) -> None:
        for name in names:
            if name in self.held:
                self.now -= self.held.pop(name)[1]

    def snapshot(self) -> Bytes:
        sums: dict[str, int] = {}
        for kind, size in self.held.values():
            sums[kind] = sums.get(kind, 0) + size
        return Bytes(**sums)

    def highest(self, run: Callable[["Ledger"], None]) -> Bytes:
        """The most there is during what `run` writes down."""
        self.high, self.most = self.now, self.snapshot()
        run(self)
        return self.most


@dataclass(frozen=True)
class Shape:
    """All that decides what a block holds: sizes here, after tensor parallelism has cut them."""

    rows: int
    length: int
    hidden: int
    ffn: int
    heads: int
    tp: int = 1
    split: bool = False  # tokens between the matrices are split over tp
    compute: int = 4  # bytes
    attention: str = "fused"  # fused, sdpa_math (torch's own, with dropout on a CPU) or math
    gelu: str = "tanh"
    dropout: bool = False
    dropout_attention: bool = False
    cpu: bool = True
    recompute: str = "none"
    casts: bool = True  # modules cast their weights; False where FSDP has done it before

    @property
    def narrow(self) -> bool:
        return self.compute < FP32

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def own_tokens(self) -> int:
        return self.tokens // self.tp if self.split else self.tokens

    @property
    def stream(self) -> int:
        """The residual stream."""
        return self.own_tokens * self.hidden * self.compute

    @property
    def whole(self) -> int:
        """The same of all tokens."""
        return self.tokens * self.hidden * self.compute

    @property
    def in_heads(self) -> int:
        """Queries, keys, values or what they give: one of the four."""
        return self.tokens * self.hidden // self.tp * self.compute

    @property
    def inner(self) -> int:
        return self.tokens * self.ffn * self.compute

    @property
    def scores(self) -> int:
        """Elements of the attention matrices."""
        return self.rows * self.heads * self.length * self.length

    @property
    def copies_heads(self) -> bool:
        """Whether batched products need queries, keys and values in an order of their own."""
        return self.rows > 1 and self.heads > 1

    @property
    def keeps_copies(self) -> bool:
        """Instead of qkv itself."""
        return self.attention != "fused" and (self.copies_heads or (self.attention == "sdpa_math" and self.narrow))

    @property
    def mask(self) -> int:
        """What dropout keeps of one stream: on a CPU the factors themselves."""
        if not self.dropout:
            return 0
        return self.stream if self.cpu else self.own_tokens * self.hidden

    @property
    def transposed(self) -> int:
        """1 where tokens of several rows change their order when they are gathered or scattered."""
        return 1 if self.rows > 1 else 0

    def matrices(self) -> dict[str, int]:
        """Elements of the weights of a block."""
        across = self.hidden // self.tp
        return {
            "qkv": 3 * across * self.hidden,
            "out": across * self.hidden,
            "up": self.ffn * self.hidden,
            "down": self.ffn * self.hidden,
        }


@dataclass(frozen=True)
class Passes:
    """Of one block; what lies below it is not counted. `again`: gradients of an earlier micro-batch are there."""

    kept: Bytes  # at the end of the forward pass; the stream that comes in belongs to it, the one that goes out not
    forward: Bytes  # the most on the way
    backward: Bytes  # the most, of what is kept too
    backward_again: Bytes


# Forward


def _norm(ledger: Ledger, s: Shape, number: int) -> None:
    """x is there already; what is kept is its fp32 copy in a narrow type, itself else."""
    wide = s.own_tokens * s.hidden * FP32 if s.narrow else 0
    ledger.keep(**{f"wide{number}": wide, f"stats{number}": 2 * s.own_tokens * FP32})
    ledger.use(wide_out=wide)
    ledger.keep(**{f"y{number}": s.stream})
    ledger.drop("wide_out")


def _cast(ledger: Ledger, s: Shape, name: str) -> None:
    if s.casts and s.narrow:
        ledger.keep(**{f"cast_{name}": s.matrices()[name] * s.compute})


def _gathered(ledger: Ledger, s: Shape, name: str) -> None:
    """All tokens of what is split."""
    if s.split:
        ledger.gather(parts=s.whole)
        if s.transposed:
            ledger.gather(**{name: s.whole})
            ledger.drop("parts")


def _scattered(ledger: Ledger, s: Shape, source: str) -> None:
    """The sum over ranks, of which each has its tokens; `source` goes."""
    ledger.gather(sorted=s.whole if s.transposed else 0)
    if s.narrow:
        ledger.gather(received=s.whole)
        ledger.gather(sum=s.own_tokens * s.hidden * FP32)
    ledger.use(mine=s.stream)
    if s.cpu and not s.narrow:
        ledger.gather(gloo=s.whole)  # which sums in a copy of its own
    ledger.drop("sorted", "received", "sum", "gloo", source)


def _row_linear(ledger: Ledger, s: Shape, name: str, out: str) -> None:
    """Output of the projections into the stream."""
    _cast(ledger, s, name)
    if s.tp == 1:
        ledger.use(**{out: s.stream})
        return
    ledger.use(share=s.whole)
    if s.split:
        _scattered(ledger, s, "share")
    else:
        ledger.gather(total=s.tokens * s.hidden * FP32)
        if s.narrow:
            ledger.use(mine=s.stream)
            ledger.drop("total")
        ledger.drop("share")
    ledger.use(**{out: s.stream})
    ledger.drop("mine", "total")


def _dropped(ledger: Ledger, s: Shape, name: str, number: int) -> None:
    if s.dropout:
        ledger.keep(**{f"mask{number}": s.mask})
        ledger.use(after_dropout=s.stream)
        ledger.drop(name)


def _core(ledger: Ledger, s: Shape) -> None:
    """softmax(QK)V of `qkv`. What it gives is `mixed`, which the projection keeps; written out, another copy of it."""
    if s.attention == "fused":
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
        ledger.keep(q_copy=heads if s.copies_heads else 0, k_copy=heads if s.copies_heads else 0)
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
    ledger.keep(v_copy=heads if s.copies_heads or wide > s.compute else 0)
    ledger.use(mixed_heads=heads)
    ledger.drop("q_wide", "k_wide", "v_wide", "q_scaled", "k_scaled", "bias", "also_returned", "causal")


def _attention(ledger: Ledger, s: Shape, again: bool = False) -> None:
    """`again`: in the backward pass it ends as soon as all that is needed is there."""
    _cast(ledger, s, "qkv")
    _gathered(ledger, s, "tokens1")
    ledger.keep(qkv=3 * s.in_heads)
    ledger.drop("tokens1", "parts")
    _core(ledger, s)
    if s.recompute == "core_attn":
        ledger.drop(*CORE)
    if s.attention != "fused":
        ledger.keep(mixed=s.in_heads)
    if again and not s.dropout:
        _cast(ledger, s, "out")
    else:
        _row_linear(ledger, s, "out", "projected")
        _dropped(ledger, s, "projected", 1)
    ledger.drop("mixed_heads")
    if s.keeps_copies and s.recompute != "core_attn":
        ledger.drop("qkv")


CORE = ("lse", "q_copy", "k_copy", "v_copy", "inverted", "softmax", "weights", "attention_mask", "dropped_weights")
ATTENTION = (*CORE, "cast_qkv", "qkv", "mixed", "cast_out", "mask1")


def _block_forward(ledger: Ledger, s: Shape) -> None:
    """x is in the ledger as `x`."""
    _norm(ledger, s, 1)
    _attention(ledger, s)
    if s.recompute == "full_attn":
        ledger.drop(*ATTENTION)
    ledger.keep(x1=s.stream)
    ledger.drop("projected", "after_dropout")
    _norm(ledger, s, 2)
    _cast(ledger, s, "up")
    _gathered(ledger, s, "tokens2")
    ledger.keep(u=s.inner)
    ledger.drop("tokens2", "parts")
    if s.gelu == "sigmoid":
        ledger.use(scaled=s.inner)
        ledger.keep(sigmoid=s.inner)
        ledger.drop("scaled")
    ledger.keep(g=s.inner)
    _row_linear(ledger, s, "down", "projected")
    _dropped(ledger, s, "projected", 2)
    ledger.use(x2=s.stream)
    ledger.drop("projected", "after_dropout")
    if s.narrow:  # what is kept of them are their wide copies
        ledger.drop("x", "x1")
    ledger.drop("x2")  # the next block's


# Backward


def _weight_gradient(ledger: Ledger, s: Shape, name: str, fresh: bool, *done: str) -> None:
    """`done`: what goes as soon as the product is there."""
    size = s.matrices()[name]
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


def _row_backward(ledger: Ledger, s: Shape, name: str, inner: int, saved: str, fresh: bool) -> None:
    """Gradient of the input as `inner_gradient`; the residual stream goes on with the one that came."""
    if s.split:
        ledger.gather(parts=s.whole)
        if s.transposed:
            ledger.gather(all_gradient=s.whole)
            ledger.drop("parts")
    ledger.use(inner_gradient=inner)
    _weight_gradient(ledger, s, name, fresh, "parts", "all_gradient", saved, "incoming")


def _column_backward(ledger: Ledger, s: Shape, name: str, saved: str, fresh: bool) -> None:
    """From `inner_gradient` to `y_gradient`."""
    if s.split:
        ledger.use(all_gradient=s.whole)
        _scattered(ledger, s, "all_gradient")
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


def _norm_backward(ledger: Ledger, s: Shape, number: int) -> None:
    wide = s.own_tokens * s.hidden * FP32 if s.narrow else 0
    if s.narrow:
        ledger.use(wide_in=wide)
        ledger.drop("y_gradient")
        ledger.use(wide_x=wide)
        ledger.drop("wide_in", f"wide{number}", f"stats{number}")
        ledger.use(x_gradient=s.stream)
        ledger.drop("wide_x")
    else:
        ledger.use(x_gradient=s.stream)
        ledger.drop("y_gradient", f"stats{number}")
    ledger.use(summed=s.stream)
    ledger.drop("x_gradient", "stream_gradient", "summed")
    ledger.use(stream_gradient=s.stream)


def _gelu_backward(ledger: Ledger, s: Shape) -> None:
    if s.gelu == "sigmoid" or (s.gelu == "tanh" and s.cpu and not s.narrow):
        ledger.use(a=s.inner, b=s.inner)
        ledger.drop("a")
    else:
        ledger.use(b=s.inner)
    ledger.drop("inner_gradient", "u", "b", "sigmoid")
    ledger.use(inner_gradient=s.inner)


def _core_backward(ledger: Ledger, s: Shape) -> None:
    """From `inner_gradient`, of what the heads gave, to that of qkv."""
    heads, scores = s.in_heads, s.scores
    if s.attention == "fused":
        ledger.use(q_gradient=heads, k_gradient=heads, v_gradient=heads)
        ledger.drop("inner_gradient", "lse", "mixed", "qkv")
    else:
        wide = FP32 if s.attention == "sdpa_math" else s.compute
        in_wide = heads // s.compute * wide
        ledger.drop("mixed")
        ledger.use(mixed_gradient=in_wide)
        ledger.drop("inner_gradient")
        if s.recompute == "core_attn":
            _core(ledger, s)
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
        ledger.drop("score_gradient", "q_copy", "k_copy", "qkv", "q_gradient", "k_gradient", "v_gradient")
        ledger.use(q_gradient=heads, k_gradient=heads, v_gradient=heads)
    ledger.use(qkv_gradient=3 * heads)
    ledger.drop("q_gradient", "k_gradient", "v_gradient", "qkv_gradient")
    ledger.use(inner_gradient=3 * heads)


def _block_backward(ledger: Ledger, s: Shape, fresh: bool) -> None:
    """The gradient of the stream that goes out is in the ledger as `stream_gradient`."""
    if s.recompute == "full":
        _again(ledger, replace(s, recompute="none"))
    if s.dropout:
        ledger.use(incoming=s.stream)
        ledger.drop("mask2")
    _row_backward(ledger, s, "down", s.inner, "g", fresh)
    _gelu_backward(ledger, s)
    _column_backward(ledger, s, "up", "y2", fresh)
    _norm_backward(ledger, s, 2)
    ledger.drop("x1")
    if s.recompute == "full_attn":
        _attention(ledger, replace(s, recompute="none"), again=True)
        ledger.drop("projected", "after_dropout")
    if s.dropout:
        ledger.use(incoming=s.stream)
        ledger.drop("mask1")
    _row_backward(ledger, s, "out", s.in_heads, "nothing", fresh)
    if s.recompute == "core_attn" and s.attention == "fused":
        ledger.drop("mixed")
        _core(ledger, s)
    _core_backward(ledger, s)
    _column_backward(ledger, s, "qkv", "y1", fresh)
    _norm_backward(ledger, s, 1)
    ledger.drop("x")


def _again(ledger: Ledger, s: Shape) -> None:
    """The forward pass in the backward pass, up to the last tensor that is needed."""
    _norm(ledger, s, 1)
    _attention(ledger, s)
    ledger.keep(x1=s.stream)
    ledger.drop("projected", "after_dropout")
    _norm(ledger, s, 2)
    _cast(ledger, s, "up")
    _gathered(ledger, s, "tokens2")
    ledger.keep(u=s.inner)
    ledger.drop("tokens2", "parts")
    if s.gelu == "sigmoid":
        ledger.use(scaled=s.inner)
        ledger.keep(sigmoid=s.inner)
        ledger.drop("scaled")
    ledger.keep(g=s.inner)
    if s.dropout:
        _row_linear(ledger, s, "down", "projected")
        ledger.keep(mask2=s.mask)
        ledger.drop("projected")
    else:
        _cast(ledger, s, "down")
    if s.narrow:
        ledger.drop("x1")


@lru_cache(maxsize=4096)
def block(s: Shape) -> Passes:
    ledger = Ledger()
    ledger.keep(x=s.stream)
    forward = ledger.highest(lambda book: _block_forward(book, s))
    if s.recompute == "full":
        for name in [name for name in ledger.held if name != "x"]:
            ledger.drop(name)
        if "x" not in ledger.held:
            ledger.keep(x=s.stream)
    kept = ledger.snapshot()

    def backward(fresh: bool) -> Bytes:
        book = Ledger()
        book.held, book.now = dict(ledger.held), ledger.now
        book.use(stream_gradient=s.stream)
        return book.highest(lambda one: _block_backward(one, s, fresh))

    return Passes(kept, forward, backward(True), backward(False))


# Around the blocks


@dataclass(frozen=True)
class Loss:
    kept: Bytes
    forward: Bytes  # the most, the final norm included


@lru_cache(maxsize=4096)
def loss(s: Shape, words: int) -> Loss:
    """Final norm, head and cross-entropy. `words`: of the vocabulary that are here."""
    ledger = Ledger()
    chunks = max(1, ceil(s.tokens * words / CHUNK_ELEMENTS))
    chunk = ceil(s.tokens / chunks)
    table = words * s.hidden

    def run(book: Ledger) -> None:
        book.keep(x=s.stream)
        _norm(book, s, 1)
        if s.narrow:
            book.drop("x")
            book.use(cast=table * s.compute)
        _gathered(book, s, "gathered")
        book.keep(grad_x=s.whole)
        book.keep(grad_weight=table * FP32)
        logits = chunk * words
        book.use(buffer=logits * s.compute)
        if s.narrow:
            book.use(logits=logits * FP32, gradient=logits * s.compute)
            if s.cpu:
                book.use(wide=logits * FP32, wide_x=chunk * s.hidden * FP32)
            else:
                book.use(product=table * FP32)
        book.drop("wide", "wide_x", "product")
        if s.split:  # the chunk is still there while ranks add up
            _scattered(book, s, "grad_x")
            book.drop("mine")
            book.keep(grad_x=s.stream)
        elif s.tp > 1:
            book.gather(total=s.whole // s.compute * FP32)
            book.drop("total")
        book.drop("buffer", "logits", "gradient", "cast")
        book.drop("gathered", "parts", "y1")

    most = ledger.highest(run)
    return Loss(ledger.snapshot(), most)
