"""AdamW by a C++ function, for training in one process on a CPU: what torch's fused kernel computes, within rounding.

Gradients are clipped in the same pass, so they are read once and written never; nothing is done tensor by tensor.
"""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor, nn

from gptworks.optimizer_state import ADAMW
from gptworks.train.block_library import Functions

_MOMENTS = tuple(tensor.name for tensor in ADAMW)
_LISTS = ("parameters", "gradients", "means", "squares")
_NUMBERS = ("factor", "beta2", "new_mean", "new_square", "eps", "step_size", "correction")


class _Update(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (*_LISTS, "sizes", "kept")),
        *((name, ctypes.c_float) for name in _NUMBERS),
    )


class NativeUpdate:
    """In place of the steps of an optimizer. Its state stays where torch has it."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        for group in optimizer.param_groups:
            by_updates: dict[int, list[nn.Parameter]] = {}  # one that had no gradient before is behind the others
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_updates.setdefault(int(_state(optimizer, parameter)["step"]), []).append(parameter)
            for updates, parameters in by_updates.items():
                self._update_some(optimizer, group, parameters, updates + 1, factor)

    def _update_some(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        parameters: list[nn.Parameter],
        updates: int,
        factor: float,
    ) -> None:
        """The update of parameters that have had as many."""
        states = [_state(optimizer, each) for each in parameters]
        for state in states:
            state["step"].fill_(updates)
        (beta1, beta2), lr = group["betas"], group["lr"]
        lists: list[list[Tensor]] = [parameters, [_gradient(each) for each in parameters]]  # type: ignore[list-item]
        lists += [[state[name] for state in states] for name in _MOMENTS]
        addresses = {name: _addresses(tensors) for name, tensors in zip(_LISTS, lists, strict=True)}
        count = len(parameters)
        update = _Update(
            count=count,
            **{name: ctypes.addressof(array) for name, array in addresses.items()},
            sizes=ctypes.addressof(sizes := (ctypes.c_int64 * count)(*(each.numel() for each in parameters))),
            kept=ctypes.addressof(kept := (ctypes.c_float * count)(*[1 - lr * group["weight_decay"]] * count)),
            factor=factor,
            beta2=beta2,
            new_mean=1 - beta1,
            new_square=1 - beta2,
            eps=group["eps"],
            step_size=lr / (1 - beta1**updates),
            correction=math.sqrt(1 - beta2**updates),
        )
        self.functions.update(ctypes.byref(update))
        del sizes, kept, lists  # until now their memory was read


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros(())
        state |= {name: torch.zeros_like(parameter) for name in _MOMENTS}
    return state


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.contiguous()


def _addresses(tensors: list[Tensor]) -> Any:
    assert all(each.is_contiguous() and each.dtype == torch.float32 for each in tensors)
    return (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))
