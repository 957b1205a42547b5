"""What the passes through one block, the embeddings and the loss hold.

Three of these are peaks that nothing shows from the shapes alone: what autograd keeps, what is there on the way, and
what the backward pass needs on top. So each pass is followed tensor by tensor (block_forward.py, block_backward.py),
not summed up. Never imports torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from gptworks.plan.block_backward import block_backward
from gptworks.plan.block_forward import block_forward, gather_tokens, scatter_sum
from gptworks.plan.block_kinds import norm
from gptworks.plan.block_shape import BlockShape
from gptworks.plan.ledger import Bytes, Ledger
from gptworks.plan.sizes import FP32

CHUNK_ELEMENTS = 16 * 1024 * 1024  # model/loss.py: logits held at a time


@dataclass(frozen=True)
class Passes:
    """The memory of one block, without what lies below it. `again`: gradients of an earlier micro-batch are there."""

    kept: Bytes  # at the end of the forward pass; the stream that comes in belongs to it, the one that goes out not
    forward: Bytes  # the most on the way
    backward: Bytes  # the most, of what is kept too
    backward_again: Bytes


@lru_cache(maxsize=4096)
def block(s: BlockShape) -> Passes:
    ledger = Ledger()
    ledger.keep(x=s.stream)
    forward = ledger.highest(lambda book: block_forward(book, s))
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
        return book.highest(lambda one: block_backward(one, s, fresh))

    return Passes(kept, forward, backward(True), backward(False))


# Around the blocks


@dataclass(frozen=True)
class Loss:
    kept: Bytes
    forward: Bytes  # the most, the final norm included


@lru_cache(maxsize=4096)
def loss(s: BlockShape, words: int) -> Loss:
    """Final norm, head and cross-entropy. `words`: of the vocabulary that are here."""
    ledger = Ledger()
    chunks = max(1, ceil(s.tokens * words / CHUNK_ELEMENTS))
    chunk = ceil(s.tokens / chunks)
    table = words * s.hidden

    def run(book: Ledger) -> None:
        book.keep(x=s.stream)
        norm(book, s, 1)
        if s.narrow:
            book.drop("x")
            book.use(cast=table * s.compute)
        gather_tokens(book, s, "gathered")
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
            scatter_sum(book, s, "grad_x")
            book.drop("mine")
            book.keep(grad_x=s.stream)
        elif s.tp > 1:
            book.gather(total=s.whole // s.compute * FP32)
            book.drop("total")
        book.drop("buffer", "logits", "gradient", "cast")
        book.drop("gathered", "parts", "y1")

    most = ledger.highest(run)
    return Loss(ledger.snapshot(), most)
