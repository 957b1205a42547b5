"""Data parallel: replicas and shards. Gradients are summed over data ranks, never averaged: the loss is already divided
by the number of tokens that all of them score.

Shards are FSDP2's, one group per block and one for all around the blocks, so that tied weights are in one group:
zero 1  parameters are gathered once per step; gradients meet after the last micro-batch
zero 2  parameters are gathered once per step; each micro-batch leaves only this rank's shard of the gradient
zero 3  parameters are gathered for each pass of each block and given back after it

Replicas (the dp axis alone, or zero 0) stay plain tensors, and their gradients meet once, after the last backward
pass: the forward pass is that of one process, hooks and wrappers cost nothing, and the same line serves tensor parallel
and pipeline parts. What is given up is the overlap of that sum with the backward pass.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gptworks.config.schema import ParallelConfig
from gptworks.launch import heartbeat
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel import slices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule

# A gradient of this size is summed where it lies; smaller ones are copied together and travel as one.
ALONE = 256 * 1024


@dataclass(frozen=True)
class ShardPolicy:
    """How the gradients of a rank's part meet those of the other data ranks."""

    zero: int
    reduce_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, world: World, parallel: ParallelConfig, reduce_dtype: torch.dtype) -> "ShardPolicy":
        return cls(parallel.zero if world.layout.fsdp > 1 else 0, reduce_dtype)

    @property
    def gives_parameters_back(self) -> bool:
        """After each pass: between two of them a module has its shards only."""
        return self.zero == 3

    def before_micro_batch(self, part: GPT, *, is_last: bool) -> None:
        """Say what the backward pass of this micro-batch does with gradients and gathered parameters."""
        heartbeat.moved()
        if self.zero == 0:
            return
        part.set_requires_gradient_sync(is_last or self.zero > 1)  # type: ignore[operator]
        part.set_reshard_after_backward(is_last or self.zero == 3)  # type: ignore[operator]
        # With replicas of the shards, the sum over replicas waits for the last.
        part.set_requires_all_reduce(is_last)  # type: ignore[operator]
        part.set_is_last_backward(is_last)  # type: ignore[operator]


NOT_SHARDED = ShardPolicy(zero=0)


def apply(
    part: GPT, world: World, policy: ShardPolicy, compute_dtype: torch.dtype, *, offload_to_cpu: bool = False
) -> None:
    """Shard a part on the meta device; its parameters may be tensor-parallel already, and its blocks may be few."""
    if policy.zero == 0:
        return
    assert world.mesh is not None
    zero, reduce_dtype = policy.zero, policy.reduce_dtype
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = world.mesh["dp", "fsdp"] if world.layout.dp > 1 else world.mesh["fsdp"]
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload_to_cpu else OffloadPolicy()
    # The cast that modules make of their weights happens before they are sent. (The gains of the norms in a block are
    # rounded with them: a group has one type.)
    in_compute = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
    # Embeddings are added and their gradients summed in fp32, as in one process: nothing is rounded on the way.
    in_fp32 = MixedPrecisionPolicy(None, reduce_dtype, cast_forward_inputs=False)
    for block in part.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=in_compute, offload_policy=offload)
    # The backward pass begins with the head, so what is around the blocks is kept from the forward pass.
    fully_shard(part, mesh=mesh, reshard_after_forward=False, mp_policy=in_fp32, offload_policy=offload)
    for module in sharded_modules(part, policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if world.layout.pp > 1 and zero > 1:
        _keep_stage_in_pipeline(part, zero)


@torch.no_grad()
def finish_gradients(part: GPT, world: World, policy: ShardPolicy) -> None:
    """After the last backward pass: what FSDP has not summed over data ranks already."""
    if policy.zero > 0:
        return
    groups = [mesh.get_group() for mesh in (world.axis("dp"), world.axis("fsdp")) if mesh is not None]
    if groups:
        _sum_in_place(local_gradients(part.parameters()), groups, policy.reduce_dtype)


def reshard_all(part: GPT, policy: ShardPolicy) -> None:
    """Give back what a forward pass without a backward pass left gathered: parameters are shards again."""
    for module in sharded_modules(part, policy):
        module.reshard()


def beside_shards(part: GPT, policy: ShardPolicy) -> tuple[list[Tensor], list[Tensor]]:
    """What FSDP holds now: parameters that are put together, and whole gradients that wait for later micro-batches."""
    parameters, gradients = [], []
    for module in sharded_modules(part, policy):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in [] if group is None else group.fsdp_params:
            parameters += parameter.all_gather_outputs
            whole = getattr(parameter, "_unsharded_param", None)  # there is none before the first forward pass
            waiting = (parameter.unsharded_accumulated_grad, None if whole is None else whole.grad)
            gradients += [gradient for gradient in waiting if gradient is not None]
    return parameters, gradients


def note(parallel: ParallelConfig) -> str | None:
    """What the user should know about the stage and the rest of the layout."""
    if parallel.zero == 3 and parallel.pp != 1:
        return (
            f"parallel.zero: 3 with pp={parallel.pp}: every micro-batch gathers the parameters of its stage twice. "
            "zero: 1 gathers them once per step."
            + (" zero_bubble gains nothing with it." if parallel.schedule == "zero_bubble" else "")
        )
    if parallel.zero == 0 and parallel.fsdp != 1:
        return (
            f"parallel.zero: 0 with fsdp={parallel.fsdp}: nothing is sharded, each rank holds all parameters of its "
            f"part. zero: 1, 2 or 3 shards them."
        )
    return None


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local(p.grad) for p in parameters if p.grad is not None]


def num_copies(parameter: Tensor, world: World) -> int:
    """On how many ranks of its pipeline stage the same numbers lie."""
    ranks = world.layout.data_parallel * world.layout.tp
    for _, size in slices.splits(parameter):
        ranks //= size
    return ranks


def num_gathered(parameter: Tensor) -> int:
    """Numbers of it that this rank has while FSDP has put the shards together: all that tensor parallelism left."""
    if not hasattr(parameter, "device_mesh"):
        return parameter.numel()
    shape, names = list(parameter.shape), parameter.device_mesh.mesh_dim_names
    for axis, size in slices.splits(parameter):
        if names[axis] == "tp":
            dim = parameter.placements[axis].dim  # type: ignore[attr-defined]
            each = -(-shape[dim] // size)
            before = each * parameter.device_mesh.get_coordinate()[axis]
            shape[dim] = max(0, min(each, shape[dim] - before))
    return math.prod(shape)


def sharded_modules(part: nn.Module, policy: ShardPolicy) -> Iterator["FSDPModule"]:
    if policy.zero:
        from torch.distributed.fsdp import FSDPModule

        yield from (module for module in part.modules() if isinstance(module, FSDPModule))


def _keep_stage_in_pipeline(part: GPT, zero: int) -> None:
    """torch's pipeline stage asks FSDP for stage 1 before each backward pass. Stages 2 and 3 do not listen."""
    sync, reshard = part.set_requires_gradient_sync, part.set_reshard_after_backward
    part.set_requires_gradient_sync = lambda _, **kind: sync(True, **kind)  # type: ignore
    if zero == 3:
        part.set_reshard_after_backward = lambda _, **kind: reshard(True, **kind)  # type: ignore


def _sum_in_place(gradients: list[Tensor], groups: list["ProcessGroup"], dtype: torch.dtype) -> None:
    from torch import distributed

    small = [g for g in gradients if g.numel() < ALONE]
    together = [torch.cat([g.reshape(-1) for g in small])] if small else []
    travelling = [g if g.is_contiguous() else g.contiguous() for g in gradients if g.numel() >= ALONE] + together
    sums = [tensor.to(dtype) for tensor in travelling]
    for group in groups:
        started = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in sums]
        for work in started:
            work.wait()
    if small:
        pieces = sums.pop().split([g.numel() for g in small])
        torch._foreach_copy_(small, [piece.view_as(g) for piece, g in zip(pieces, small, strict=True)])
    for gradient, total in zip((g for g in gradients if g.numel() >= ALONE), sums, strict=True):
        if gradient is not total:
            gradient.copy_(total)
