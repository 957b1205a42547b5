"""Layers cut into stages, one rank or more apart: micro-batches run through them in the order of a schedule.

Tokens, labels, positions and segments are small integers that every pipeline rank reads itself; only hidden states, and
their gradients on the way back, travel from stage to stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

from gptworks.architecture import EMBEDDING, HEAD, modules_of
from gptworks.config.stages import assign_layers, check_micro_batches, stages_of
from gptworks.errors import ConfigError, UsageError
from gptworks.launch.world import World
from gptworks.model import GPT, KVCache
from gptworks.model.masks import require_positions
from gptworks.parallel.parts import MicroBatch, Part, SeedDropout
from gptworks.parallel.shard import NOT_SHARDED, ShardPolicy
from gptworks.parallel.stage_memory import LeanStage

__all__ = ["Pipeline", "StageCaches", "keep_stage", "stages_of"]

_SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def keep_stage(model: GPT, stage: int, num_stages: int) -> None:
    """Leave out of the model what other stages hold. What stays keeps its name."""
    kept = {str(layer) for layer in assign_layers(model.cfg.num_layers, num_stages)[stage]}
    for name in [name for name in model.blocks if name not in kept]:
        del model.blocks[name]
    absent = [] if stage == 0 else modules_of(EMBEDDING)
    absent += [] if stage == num_stages - 1 else modules_of(HEAD)
    for name in absent:
        setattr(model, name, None)


class StageCaches:
    """The KV caches of the stages of this rank, handled as one."""

    def __init__(self, caches: list[KVCache]) -> None:
        self.caches = caches

    @property
    def used(self) -> int:
        return self.caches[0].used

    @used.setter
    def used(self, value: int) -> None:
        for cache in self.caches:
            cache.used = value

    @property
    def counts_B(self) -> Tensor | None:
        return self.caches[0].counts_B

    @counts_B.setter
    def counts_B(self, value: Tensor | None) -> None:
        for cache in self.caches:
            cache.counts_B = value

    def positions(self, num_tokens: int) -> Tensor:
        return self.caches[0].positions(num_tokens)

    def select(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.select(rows)


class Pipeline(Part):
    """The stages of this rank among those of all. Called like a GPT it reads forward and answers on every rank.

    parts: in the order of `stages_of`. Every rank of the pipeline makes each call, with the same integers.
    """

    def __init__(
        self, parts: Sequence[GPT], world: World, sharding: ShardPolicy = NOT_SHARDED, *, schedule: str = "1f1b"
    ) -> None:
        super().__init__(parts, world, sharding)
        axis = world.axis("pp")
        if axis is None:
            raise UsageError(f"a pipeline needs 2 ranks or more in pp, but the layout is {world.layout}.")
        self.schedule = schedule
        self.pp = world.layout.pp
        self.group = axis.get_group()
        self.pp_rank = axis.get_local_rank()
        self.stages = stages_of(self.pp_rank, self.pp, len(self.parts), schedule)
        self.num_stages = self.pp * len(self.parts)
        if schedule == "zero_bubble" and any(_is_compiled(part) for part in self.parts):
            raise ConfigError(
                "train",
                [
                    f"train.compile: with parallel.schedule: {schedule}, which computes the gradients of inputs and of "
                    "weights at different times; compiled blocks give both at once. Set train.compile: false, or use "
                    "parallel.schedule: interleaved or 1f1b."
                ],
            )
        # Tokens in a row of what stages send. None: they tell each other in the first step, by a pass for nothing. Said
        # where nobody would answer.
        self.hidden_len: int | None = None
        self._prepared: tuple[tuple[int, ...], Any, list[LeanStage]] | None = None
        self._scale: float | Tensor = 1.0

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    def step(
        self, micro_batches: Sequence[MicroBatch], scale: float | Tensor, *, seed_dropout: SeedDropout | None = None
    ) -> list[Tensor]:
        check_micro_batches(self.schedule, len(micro_batches), self.pp)
        schedule, stages = self._prepare(micro_batches)
        self._scale = scale
        for stage in stages:
            stage.begin(seed_dropout)
        tokens, keywords = self._joined(micro_batches)
        # The schedule cuts what it is given into as many pieces as there are micro-batches: they all have one shape.
        schedule.step(
            *([tokens] if self.has_first else []),
            target=keywords["labels"] if self.has_last else None,
            return_outputs=False,
            **keywords,
        )
        self.sample_losses = [losses for stage in stages for losses in stage.sample_losses]
        return [loss_sum for stage in stages for loss_sum in stage.loss_sums]

    def sum_gradients(self) -> None:
        super().sum_gradients()
        self.sum_tied_gradients()

    def sum_tied_gradients(self) -> None:
        """Add up what the first and the last stage found for a tied embedding, so that both copies stay equal.

        After `step`, before the norm. It works on the local shards, which are cut alike on both.
        """
        if not self.cfg.tied or not (self.has_first or self.has_last):
            return
        mine = _local_gradient(self.parts[0].wte.weight if self.has_first else self.parts[-1].head.weight)
        if mine.numel() == 0:  # more shards than rows: the other end has none either
            return
        other = self.pp - 1 if self.has_first else 0
        sent = mine.to(self.device).contiguous()  # an offloaded gradient is elsewhere
        theirs = torch.empty_like(sent)
        swap = [
            distributed.P2POp(distributed.isend, sent, group=self.group, group_peer=other),
            distributed.P2POp(distributed.irecv, theirs, group=self.group, group_peer=other),
        ]
        for work in distributed.batch_isend_irecv(swap):
            work.wait()
        mine.add_(theirs.to(mine.device))

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: StageCaches | None = None,
        labels: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """As GPT.forward, without gradients; the answer is the same on every rank of the pipeline."""
        if cache is not None and positions is None:
            positions = cache.positions(tokens.shape[1])
        keywords = {"positions": positions, "segments": segments, "labels": labels, "last_only": last_only}
        caches = [None] * len(self.parts) if cache is None else cache.caches
        answer = self._forward(tokens, [{**keywords, "cache": one} for one in caches])
        # A stage that stays gathered would show its whole parameters to whoever asks next.
        self.reshard_all()
        return self._spread(answer)

    def new_cache(self, rows: int, length: int, dtype: torch.dtype | None = None) -> StageCaches:
        return StageCaches([part.new_cache(rows, length, dtype) for part in self.parts])

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> tuple[Any, list[LeanStage]]:
        """The schedule and its stages. Buffers and order are for one number and shape of micro-batches."""
        require_positions(micro_batches[0].tokens.shape[1], self.cfg.max_positions)
        shapes = {tuple(batch.tokens.shape) for batch in micro_batches}
        if len(shapes) > 1:
            raise UsageError(f"micro-batches of shapes {sorted(shapes)} in one step; a pipeline needs one shape.")
        kind = (len(micro_batches), *shapes.pop())
        if self._prepared is None or self._prepared[0] != kind:
            stages = [
                self._new_stage(stage, part, micro_batches[0].tokens)
                for stage, part in zip(self.stages, self.parts, strict=True)
            ]
            # One object for a schedule of one stage per rank, a list for the others.
            local = stages[0] if self.schedule in {"gpipe", "1f1b"} else stages
            schedule = _SCHEDULES[self.schedule](local, len(micro_batches), loss_fn=self._scaled, scale_grads=False)
            self._prepared = (kind, schedule, stages)
        return self._prepared[1], self._prepared[2]

    def _new_stage(self, stage: int, part: GPT, tokens: Tensor) -> LeanStage:
        shapes = {} if self.hidden_len is None else self._known_shapes(stage, part, tokens, self.hidden_len)
        made = LeanStage(part, stage, self.num_stages, self.device, group=self.group, **shapes)
        made.knows_shapes = bool(shapes)
        made.of_samples = part.loss_sum.of_samples
        made.gives_parameters_back = self.sharding.gives_parameters_back
        return made

    def _known_shapes(self, stage: int, part: GPT, tokens: Tensor, hidden_len: int) -> dict[str, Any]:
        """What the stage takes and gives, on tensors without memory."""

        def like(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

        hidden = like(tokens.shape[0], hidden_len, self.cfg.hidden_size, dtype=part.compute_dtype)
        loss = like(dtype=torch.promote_types(part.compute_dtype, torch.float32))
        return {
            "input_args": hidden if stage else tokens,
            "output_args": hidden if stage + 1 < self.num_stages else loss,
        }

    def _joined(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Tokens and keywords of all micro-batches, one after the other, on the device."""
        keywords: dict[str, Tensor | None] = {}
        # Joined there: what is copied must be the pinned memory that the batches were read into.
        on_device = [batch.to(self.device) for batch in micro_batches]
        every = [batch.keywords() for batch in on_device]
        for name in every[0]:
            tensors = [tensor for one in every if (tensor := one[name]) is not None]
            if tensors and len(tensors) < len(every):
                raise UsageError(
                    f"{len(tensors)} of {len(every)} micro-batches of a step have {name}; "
                    "a pipeline needs all or none to."
                )
            keywords[name] = torch.cat(tensors) if tensors else None
        tokens = torch.cat([batch.tokens for batch in on_device])
        if keywords.get("positions") is None and (self.cfg.positions != "learned" or self.cfg.sliding_window):
            # Every stage needs them in attention, and hidden states may be a cut of the sequence.
            keywords["positions"] = torch.arange(tokens.shape[1], device=self.device).expand(tokens.shape)
        return tokens, keywords

    def _scaled(self, loss_sum: Tensor, _labels: Tensor) -> Tensor:
        return loss_sum * self._scale

    def _forward(self, tokens: Tensor, keywords: list[dict[str, Any]]) -> Tensor | None:
        """One batch through the stages of this rank. The output where the last stage is, None elsewhere."""
        # On every rank: if the first stage alone refused, the others would wait for it.
        require_positions(tokens.shape[1], self.cfg.max_positions)
        x, before, after = tokens, (self.pp_rank - 1) % self.pp, (self.pp_rank + 1) % self.pp
        for stage, part, keyword_tensors in zip(self.stages, self.parts, keywords, strict=True):
            if stage > 0:
                x = self._receive(before)
            x = part(x, **keyword_tensors)
            if stage + 1 < self.num_stages:
                for tensor in (_header(x), x.contiguous()):
                    distributed.send(tensor, group=self.group, group_dst=after)
        return x if self.has_last else None

    def _receive(self, source: int) -> Tensor:
        header = _no_header(self.device)
        distributed.recv(header, group=self.group, group_src=source)
        x = _announced(header)
        distributed.recv(x, group=self.group, group_src=source)
        return x

    def _spread(self, answer: Tensor | None) -> Tensor:
        """From the last stage to all."""
        source = self.pp - 1
        header = _no_header(self.device) if answer is None else _header(answer)
        distributed.broadcast(header, group=self.group, group_src=source)
        answer = _announced(header) if answer is None else answer.contiguous()
        distributed.broadcast(answer, group=self.group, group_src=source)
        return answer


@contextmanager
def messages_hold_tensors() -> Iterator[None]:
    """For an imagined world: while a schedule remembers a message, its tensor stays, as that of a real one does."""
    send = schedules._batch_p2p

    def remembered(operations: list[distributed.P2POp], desc: str | None = None) -> list[Any]:
        tensors = [operation.tensor for operation in operations]
        return [_Message(work, tensors) for work in send(operations, desc)]

    schedules._batch_p2p = remembered  # type: ignore[assignment]
    try:
        yield
    finally:
        schedules._batch_p2p = send


@dataclass(frozen=True)
class _Message:
    work: distributed.Work
    tensors: list[Tensor]

    def wait(self) -> None:
        self.work.wait()


def _header(x: Tensor) -> Tensor:
    """Number type, number of dims, up to three sizes: what of the sequence arrives is the sender's affair."""
    return torch.tensor([_DTYPES.index(x.dtype), x.ndim, *x.shape, *[0] * (3 - x.ndim)], device=x.device)


def _no_header(device: torch.device) -> Tensor:
    return torch.zeros(5, dtype=torch.long, device=device)


def _announced(header: Tensor) -> Tensor:
    """Room for what the header is of."""
    dtype, num_dims, *sizes = header.tolist()
    return torch.empty(sizes[:num_dims], dtype=_DTYPES[dtype], device=header.device)


def _is_compiled(part: GPT) -> bool:
    """By either way: the method replaced, or the module's own mark."""
    return any(
        hasattr(block.forward, "_torchdynamo_orig_callable") or block._compiled_call_impl is not None
        for block in part.blocks.values()
    )


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        raise UsageError("the embedding has no gradient; sum_tied_gradients comes after step.")
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
