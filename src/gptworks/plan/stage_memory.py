"""What a pipeline stage of a rank holds while a step runs: between passes, and at the fullest moments of each pass."""

from dataclasses import dataclass

from gptworks.architecture import TensorSpec
from gptworks.plan import activations
from gptworks.plan.activations import Loss
from gptworks.plan.block_shape import BlockShape
from gptworks.plan.ledger import NOTHING, Bytes
from gptworks.plan.rank_parameters import Stage, padded
from gptworks.plan.sizes import FP32
from gptworks.plan.workload import LayoutChoice, Workload


class Fullest:
    """The fullest moment that was seen."""

    def __init__(self) -> None:
        self.name, self.most = "update", NOTHING

    def see(self, name: str, held: Bytes) -> None:
        if held.total > self.most.total:
            self.name, self.most = name, held


@dataclass(frozen=True)
class StageSizes:
    """Sizes of one stage of the rank, in bytes. Shards are padded, as FSDP pads them."""

    blocks: int  # how many
    block: int  # fp32, of one
    around: int  # fp32, of all that is not in a block
    table: int  # fp32, word embedding or head; the larger where both are here
    words: int  # rows of it
    positions: int
    block_here: int  # fp32, what this rank updates of a block
    around_here: int
    gathered_block: int  # in the type of computation
    reduced_block: int  # in the type of reduction
    reduced_around: int

    @classmethod
    def measure(cls, stage: Stage, shards: int, compute: int, reduce: int) -> "StageSizes":
        def numbers(group: list[TensorSpec]) -> int:
            return sum(padded(parameter, shards) for parameter in group)

        block, around = numbers(stage.blocks[0]), numbers(stage.around)
        tables = stage.of("vocabulary")
        return cls(
            len(stage.blocks),
            block * FP32,
            around * FP32,
            max((table.size for table in tables), default=0) * FP32,
            max((table.shape[0] for table in tables), default=0),
            sum(table.size for table in stage.of("positions")) * FP32,
            block // shards * FP32,
            around // shards * FP32,
            block * compute,
            block * reduce,
            around * reduce,
        )

    @property
    def here(self) -> int:
        return self.blocks * self.block_here + self.around_here


@dataclass(frozen=True)
class _Turn:
    """One backward pass."""

    fresh: bool  # no gradients of an earlier micro-batch are there
    sync: bool  # FSDP reduces the gradients
    resharding: bool  # FSDP gives the parameters of a block back after it
    last_buffer: int  # bytes that FSDP has sent last, and lets go of when it sends the next

    def adds_to_whole(self, zero: int) -> bool:
        """Whether gradients of earlier micro-batches are whole so far, and are reduced with this one."""
        return zero == 1 and self.sync and not self.fresh


class StageMemory:
    """One stage of the rank while a step runs."""

    def __init__(
        self, workload: Workload, choice: LayoutChoice, shape: BlockShape, stage: Stage, sizes: StageSizes
    ) -> None:
        model = workload.model
        self.stage, self.sizes, self.shape, self.zero = stage, sizes, shape, choice.zero
        self.schedule = choice.parallel.schedule if choice.layout.pp > 1 else ""
        self.passes = activations.block(shape)
        self.loss: Loss | None = activations.loss(shape, sizes.words) if stage.is_last else None
        # Head and word embedding in one place are one parameter, whose two gradients wait for each other.
        self.waits = model.tied and stage.is_first and stage.is_last
        self.in_pipeline = choice.layout.pp > 1
        # A pipeline stage keeps a record of what came in and what went out; the first is often kept anyway.
        self.came = shape.stream if self.in_pipeline and not stage.is_first and shape.narrow else 0
        self.went = shape.stream if self.in_pipeline and not stage.is_last else 0
        embed_mask = 0
        if stage.is_first and model.dropout_embed > 0:
            embed_mask = shape.stream if shape.cpu else shape.own_tokens * shape.hidden
        self.edges = Bytes(activations=self.came + self.went + embed_mask)
        self.kept = sizes.blocks * self.passes.kept + self.edges
        if self.loss is not None:
            self.kept += self.loss.kept
        self.left_in_sending = self._left_in_sending()
        self.flying = 0
        self.waiting_for_weights = 0  # zero bubble: gradients of inputs are done
        self.backwards = 0  # so many are done
        self.gathered = False  # parameters, with zero 1 and 2
        self.sent = 0  # bytes of hidden states and gradients that a schedule holds until its end

    # What is there between passes

    @property
    def resting(self) -> Bytes:
        held = self.flying * self.kept
        if self.waiting_for_weights:
            held += self.waiting_for_weights * self.between
        # FSDP lets go of what it has sent when it sends the next.
        buffer = self.sizes.reduced_around if self.zero > 1 and self.backwards else 0
        return held + self._gradients() + self._gathered() + Bytes(communication=self.sent + buffer)

    def set(self, state: tuple[int, ...], before: int = 0) -> None:
        """As a pass of plan/schedule.py finds it. `before`: micro-batches that were left out, as they repeat others."""
        self.flying, self.waiting_for_weights, self.backwards, gathered, sends = state
        self.gathered = gathered > 0
        self.sent = self.left_in_sending * (min(1, sends + before) if self.schedule == "1f1b" else sends + before)

    def amounts(self) -> tuple[int, ...]:
        """Bytes of a micro-batch in flight, of one that waits for the gradients of weights, of gradients, of what is
        gathered, and of what has been sent."""
        totals = [self.kept.total, self.between.total]
        for number in (2, 3, 4):
            self.set(tuple(int(at == number) for at in range(5)))
            totals.append(self.resting.total)
        return tuple(totals)

    def _left_in_sending(self) -> int:
        """What a backward pass leaves in sending. 1f1b remembers the last gradient it sent; the schedules of several
        stages remember all they have sent, the hidden states too."""
        stream = self.shape.stream
        gradient = 0 if self.stage.is_first else stream
        if self.schedule == "1f1b":
            return gradient
        if self.schedule in {"interleaved", "zero_bubble"}:
            return gradient + (0 if self.stage.is_last else stream)
        return 0

    @property
    def between(self) -> Bytes:
        """Zero bubble: what the gradients of inputs leave for those of weights, beside what was kept before."""
        if self.stage.is_first:
            return Bytes(activations=self.shape.stream)
        s = self.shape
        return Bytes(activations=self.sizes.blocks * (s.inner + 3 * s.in_heads + 4 * s.stream))

    def _gradients(self) -> Bytes:
        if not self.backwards:
            return NOTHING
        if self.zero == 1:  # whole until the last micro-batch is done
            return Bytes(gradients=self.sizes.blocks * self.sizes.reduced_block + self.sizes.reduced_around)
        return Bytes(gradients=self.sizes.here)

    def _gathered(self) -> Bytes:
        if self.zero in {1, 2} and self.gathered:
            return Bytes(communication=self.sizes.blocks * self.sizes.gathered_block + self.sizes.around)
        return NOTHING

    # Passes

    def forward(self, others: Bytes, moments: Fullest) -> None:
        size, passes, zero = self.sizes, self.passes, self.zero
        held = others + self.resting
        fresh = zero > 0 and not self.gathered
        top = size.blocks - 1
        if self.stage.is_first:
            looked_up = 2 * self.shape.own_tokens * self.shape.hidden * FP32
            moments.see("forward", held + Bytes(temporaries=looked_up, communication=2 * size.around if fresh else 0))
        lower = held + top * passes.kept + self.edges
        moments.see("forward", lower + passes.forward + self._for_forward(fresh))
        if self.loss is not None:
            gathered = Bytes(communication=size.around + size.gathered_block * (1 if zero == 3 else size.blocks + 1))
            held += size.blocks * passes.kept + self.edges
            moments.see("loss", held + self.loss.forward + (gathered if fresh else NOTHING))
        self.flying += 1
        self.gathered = zero in {1, 2}

    def _for_forward(self, fresh: bool) -> Bytes:
        """What FSDP has beside what rests, at the last block: it, and the buffer it came in."""
        if not fresh:
            return NOTHING
        blocks = 1 if self.zero == 3 else self.sizes.blocks
        return Bytes(communication=self.sizes.around + (blocks + 1) * self.sizes.gathered_block)

    def backward(self, others: Bytes, moments: Fullest, is_last: bool, sync: bool) -> None:
        """`sync`: FSDP reduces the gradients now."""
        size, zero = self.sizes, self.zero
        fresh = not self.backwards
        resharding = zero == 3 or (zero > 0 and is_last and not self.in_pipeline)
        turn = _Turn(fresh, sync, resharding, size.reduced_around if zero > 1 and not fresh else 0)
        held = others + self.resting - self.kept - self._gathered() - Bytes(communication=turn.last_buffer)
        if turn.adds_to_whole(zero):
            held -= self._gradients()
        head = self._gradient_of_head(fresh)
        self._through_blocks(held + head, turn, moments)
        if zero:
            held += Bytes(communication=size.around if resharding else size.around + size.blocks * size.gathered_block)
        done = self._gradients_of_blocks(turn)
        if self.stage.is_first:
            self._embeddings(held + done + head, moments, bool(zero and sync))
        if zero and sync:
            freed = size.around if resharding else 0
            once = Bytes(
                gradients=size.around_here + (0 if turn.adds_to_whole(zero) else size.around),
                communication=self._sums * size.reduced_around - freed,
            )
            moments.see("backward", held + done + once)
        self.flying -= 1
        self.backwards += 1
        if resharding:
            self.gathered = False

    @property
    def _sums(self) -> int:
        """How often what is reduced is there: gloo reduces in a copy of its own."""
        return 2 if self.shape.cpu else 1

    def _gradient_of_head(self, fresh: bool) -> Bytes:
        if self.loss is None:
            return NOTHING
        if self.waits:
            return Bytes(temporaries=self.sizes.table)
        return Bytes(gradients=self.sizes.table) if fresh or self.zero else NOTHING

    def _through_blocks(self, held: Bytes, turn: "_Turn", moments: Fullest) -> None:
        """The fullest is at the last block, the second or the first. `held`: all that is there beside the activations
        of this micro-batch."""
        size, passes, zero, shape = self.sizes, self.passes, self.zero, self.shape
        held += Bytes(communication=shape.stream if self.went else 0) + self.edges
        through = passes.backward if turn.fresh or zero else passes.backward_again
        reduces = zero > 0 and turn.sync
        for block in {0, min(1, size.blocks - 1), size.blocks - 1}:
            done = size.blocks - 1 - block
            gathered = self._gathered_at(block, turn.resharding)
            buffer = (size.reduced_block if done else turn.last_buffer) if reduces else 0
            below = held + block * passes.kept + self._grown(done, turn)
            moments.see("backward", below + through + Bytes(communication=gathered + buffer))
            if reduces:  # the block is done: its gradients are copied together, summed and cut
                given_back = size.gathered_block if turn.resharding else 0
                ready = Bytes(
                    temporaries=shape.stream,
                    gradients=size.block_here + (0 if turn.adds_to_whole(zero) else size.gathered_block),
                    communication=gathered - given_back + self._sums * size.reduced_block,
                )
                moments.see("backward", below + ready)

    def _gathered_at(self, block: int, resharding: bool) -> int:
        """Bytes that FSDP has put together when the backward pass is at this block."""
        size = self.sizes
        if self.zero == 3:
            return size.around + (2 if block else 1) * size.gathered_block
        if self.zero:
            return size.around + (block + 1 if resharding else size.blocks) * size.gathered_block
        return 0

    def _grown(self, done: int, turn: "_Turn") -> Bytes:
        """Gradients that this pass has made when so many blocks are done."""
        size, zero = self.sizes, self.zero
        if turn.adds_to_whole(zero):
            left = (size.blocks - done) * size.reduced_block + size.reduced_around
            return Bytes(gradients=done * size.block_here, communication=left)
        if zero == 1 and not turn.sync and turn.fresh:
            return Bytes(communication=done * size.reduced_block)
        return Bytes(gradients=done * size.block_here if turn.fresh and (zero != 1 or turn.sync) else 0)

    def _gradients_of_blocks(self, turn: "_Turn") -> Bytes:
        """Gradients that this pass has made when all blocks are done."""
        size, zero = self.sizes, self.zero
        if zero == 1 and not turn.sync and turn.fresh:
            return Bytes(communication=size.blocks * size.reduced_block)
        kept = size.blocks * size.block_here if turn.fresh or (zero == 1 and turn.sync) else 0
        return Bytes(gradients=kept, communication=size.reduced_around if turn.adds_to_whole(zero) else 0)

    def _embeddings(self, held: Bytes, moments: Fullest, sync: bool) -> None:
        """Their gradients come last."""
        size, shape = self.sizes, self.shape
        wide = shape.own_tokens * shape.hidden * FP32
        if shape.tp > 1:  # once more with the words of other ranks set to zero; with all tokens
            wide += shape.tokens * shape.hidden * FP32 * (3 if shape.split and shape.transposed else 2)
        buffer = size.reduced_block if sync else 0
        new = Bytes(temporaries=wide + size.table, gradients=size.positions, communication=buffer)
        moments.see("backward", held + new)
        if self.waits:
            moments.see("backward", held + Bytes(temporaries=2 * size.table, communication=buffer))

    def inputs(self, others: Bytes, moments: Fullest) -> None:
        """Zero bubble: the first half. Nothing is freed; the gradient at each matrix and norm is remembered."""
        shape, each = self.shape, self.between.activations // self.sizes.blocks
        widest = max(each + 2 * shape.stream, shape.stream + (2 if shape.narrow else 3) * shape.inner)
        held = others + self.resting + Bytes(activations=(self.sizes.blocks - 1) * each)
        moments.see("backward", held + Bytes(temporaries=widest, communication=shape.stream))

    def weights(self, others: Bytes, moments: Fullest) -> None:
        """Zero bubble: the second half of a backward pass."""
        through = self.passes.backward if not self.backwards else self.passes.backward_again
        beside = through - self.passes.kept
        held = others + self.resting
        moments.see(
            "backward", held + Bytes(temporaries=beside.total if self.stage.is_first else self.sizes.block // 3)
        )
        self.flying -= 1
        self.waiting_for_weights -= 1
        self.backwards += 1

    def reduce(self, others: Bytes, moments: Fullest) -> None:
        """zero 1 in a pipeline: after the last backward pass, one group after the other."""
        size = self.sizes
        if self.zero == 1:
            once = Bytes(gradients=size.around_here, communication=self._sums * size.reduced_around - size.around)
            moments.see("backward", others + self.resting + once)
        self.gathered = False
