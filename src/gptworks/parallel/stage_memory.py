"""A pipeline stage that holds a received tensor only while something needs it.

torch's own stage makes one receive buffer per micro-batch and direction at the first step and keeps them all: with
many micro-batches more than the activations of the schedule itself. Here a buffer is made when its receive is posted
and let go with the micro-batch, so that as many live at a time as the order of the schedule asks for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.stage import _RecvInfo

from gptworks.launch import heartbeat
from gptworks.model.loss import SampleLosses

__all__ = ["LeanStage"]


class LeanStage(PipelineStage):
    """A stage that also seeds dropout before each micro-batch, and keeps what the last stage found."""

    knows_shapes = False  # of what it receives and gives; else the ranks tell each other in the first step
    gives_parameters_back = False  # between the passes of a micro-batch
    loss_sums: list[Tensor]
    of_samples: SampleLosses  # as the loss of this stage leaves them, and those of all micro-batches
    sample_losses: list[Tensor]
    seed_dropout: Callable[[int, int], None] | None = None

    @property
    def takes_all(self) -> bool:
        """All gradients in one turn. With zero 3 the parameters are given back after the first: gradients of the second
        would be nobody's."""
        return bool(self.is_last) or self.gives_parameters_back

    def begin(self, seed_dropout: Callable[[int, int], None] | None) -> None:
        """Before the micro-batches of a step."""
        self.seed_dropout = seed_dropout
        self.loss_sums, self.sample_losses = [], []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        heartbeat.moved()
        if self.seed_dropout is not None:
            # Drawn for this micro-batch and stage, whatever the schedule did before; recomputation restores the state.
            self.seed_dropout(fwd_chunk_id, self.stage_index)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            self.loss_sums.append(output.detach())
            if self.of_samples.means_B is not None:
                self.sample_losses.append(self.of_samples.means_B)
        # What backward needs of the input is held by the stage's own record of the micro-batch until then.
        _let_go(self.args_recv_info[fwd_chunk_id])
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = super().forward_maybe_with_nosync(*args, **kwargs)
        return hidden.contiguous()  # a cut of the sequence need not be, and only such tensors can be sent

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Tensor:
        hidden: Tensor = module(*args, **kwargs)
        return hidden.contiguous()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        # A zero-bubble schedule runs a node that leads to a weight twice, for its input and later for the weight. The
        # loss gives its gradients away at the first time, as they are its largest memory: the last stage takes all.
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self.takes_all, last_backward)
        self.bwd_cache[bwd_chunk_id] = tuple(
            None if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
        )
        if not self.is_last:
            _let_go(self.grad_recv_info[bwd_chunk_id])
        if loss is not None:
            loss.detach_()  # the schedule keeps it until the end of the step, and with it the graph down to the input

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.takes_all:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        _make_room(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        if self.has_backward and not self.is_last:
            _make_room(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        if self.knows_shapes:
            return torch.ones(1, dtype=torch.int32, device=self.device)
        return super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        if self.knows_shapes:
            return torch.ones(1, dtype=torch.int32, device=self.device)
        return super()._warmup_backward_result(received_result)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        pattern = self.args_recv_info[0]
        _let_go(pattern)
        for number in range(1, num_microbatches):
            self.args_recv_info[number] = tuple(
                _RecvInfo(info.input_name, info.source, None, info.tensor_meta, is_root_arg=info.is_root_arg)
                for info in pattern
            )

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[_RecvInfo, ...]:
        infos = super()._create_grad_recv_info(act_send_info)
        _let_go(infos)
        return infos


def _make_room(infos: tuple[_RecvInfo, ...], device: torch.device) -> None:
    for info in infos:
        if not info.is_root_arg and info.tensor_meta is not None:
            info.buffer = _make_tensor_from_meta(info.tensor_meta, device).contiguous()


def _let_go(infos: tuple[_RecvInfo, ...]) -> None:
    for info in infos:
        info.buffer = None
