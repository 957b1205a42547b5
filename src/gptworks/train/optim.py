"""AdamW with the right parameters decayed, its state by parameter name, and clipping by the global norm."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gptworks.architecture import canonical_name, role_of
from gptworks.config.schema import OptimConfig
from gptworks.model import GPT
from gptworks.optimizer_state import state_of
from gptworks.parallel import shard
from gptworks.parallel.parts import Part

_DECAYED = {"weights": ("matrix", "embedding"), "matrices": ("matrix",)}


class AdamW(torch.optim.AdamW):
    """torch's, without what its methods do for a compiled optimizer: they import torch's compiler, which takes most of
    the time that torch itself takes to import."""

    native: Callable[["AdamW", float], None] | None = None  # in place of `step`: see native_update.py
    add_param_group: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)

    def update(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """A step with so much of the gradients of these parameters, which are those that have one."""
        if self.native:
            self.native(self, factor)
        else:
            scale_gradients(parameters, factor)
            self.step()


def is_decayed(name: str, cfg: OptimConfig) -> bool:
    return cfg.decay_params == "all" or role_of(name).kind in _DECAYED[cfg.decay_params]


def build(part: Part | GPT, cfg: OptimConfig) -> AdamW:
    named = [(canonical_name(n, tied=part.cfg.tied), p) for n, p in part.named_parameters()]
    groups = [
        {"params": [p for n, p in named if is_decayed(n, cfg)], "weight_decay": cfg.weight_decay},
        {"params": [p for n, p in named if not is_decayed(n, cfg)], "weight_decay": 0.0},
    ]
    # The fused kernel is several times as fast as the default, on CPU too.
    return AdamW(
        [group for group in groups if group["params"]], lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def moments(part: Part | GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer keeps of each parameter, as TENSOR.PARAMETER; zero before the first update."""
    state_of_all = {}
    for name, parameter in part.named_parameters():
        state = optimizer.state.get(parameter, {})
        for kept in state_of(name):
            state_of_all[f"{kept.name}.{name}"] = (
                state[kept.name] if kept.name in state else torch.zeros_like(parameter.detach())
            )
    return state_of_all


def set_moments(part: Part | GPT, optimizer: torch.optim.Optimizer, values: dict[str, Tensor], updates: int) -> None:
    if updates == 0:
        return
    for name, parameter in part.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(updates), device=parameter.device),
            **{kept.name: values[f"{kept.name}.{name}"] for kept in state_of(name)},
        }


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of the gradients on this rank."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(shard.local_gradients(parameters))))


def share_of_squares(part: Part) -> Tensor:
    """Summed over all ranks, the square of the norm of the whole gradient, however parameters are split or copied."""
    shares = part.gradient_shares()
    squares = torch.stack(torch._foreach_norm([gradient for gradient, _ in shares])).double().square()
    copies = [ranks for _, ranks in shares]
    # By numbers of this process: a tensor of them would have to be copied to the device.
    return torch.stack(torch._foreach_div(squares.unbind(), copies)).sum()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    if factor != 1.0:
        torch._foreach_mul_(shard.local_gradients(parameters), factor)
