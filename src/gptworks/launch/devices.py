"""The device of a process: by its name, and by the number of the process among those of its machine."""

import os
from collections.abc import Sequence

import torch

from gptworks.errors import ConfigError


def pick_device(name: str, local_rank: int | None = None, local_size: int = 1) -> torch.device:
    """auto = cuda, then mps, then cpu. A CUDA device always has a number. What is asked for and not there is refused.

    local_rank: which of the `local_size` processes of this machine asks; None = the only one, as the user set it up.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in present.items() if there)
    if name not in present:
        raise ConfigError("device", [f"device: got {name!r}; needs auto, {', '.join(present)}."])
    if not present[name]:
        have = ", ".join(kind for kind, there in present.items() if there)
        hidden = f" (CUDA_VISIBLE_DEVICES={_visible()})" if name == "cuda" and _visible() is not None else ""
        is_built = name != "cuda" or torch.version.cuda or torch.version.hip
        why = "" if is_built else f" torch {torch.__version__} is built without CUDA: for a GPU install another."
        raise ConfigError(
            "run.device",
            [
                f"run.device: {name} is not available here{hidden}. Available: {have}.{why} "
                f"Use --device {have.split(', ')[0]}."
            ],
        )
    return torch.device("cuda", _index(local_rank, local_size)) if name == "cuda" else torch.device(name)


def require(num_processes: int, numbers: Sequence[int]) -> None:
    """Before processes start that see the same devices as this one: those with `numbers`, or as they come."""
    pick_device("cuda")
    count = torch.cuda.device_count()
    absent = [number for number in numbers if number >= count] if _visible() is None else []
    if absent:
        raise ConfigError(
            "run.device",
            [
                f"run.device: the rank table names device {absent[0]} of this machine, which has {count} (0 to "
                f"{count - 1}). Fix the table: gptworks launch --make-rank-table makes one."
            ],
        )
    if not numbers and count < num_processes:
        raise ConfigError(
            "run.device",
            [
                f"run.device: process {count} of this machine has no device: there are {count}. "
                f"Start at most so many processes here, not {num_processes}."
            ],
        )


def _index(local_rank: int | None, local_size: int) -> int:
    count = torch.cuda.device_count()
    _refuse_absent(count)
    if local_rank is None:
        return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if count == 1 and local_size > 1:
        # A device for each process (srun --gpus-per-task=1), each of which sees its own as the first. That they are
        # different ones, the processes find out together: see rendezvous.agree.
        return 0
    if local_rank >= count:
        # Those before it have one each: that this one has none, they hear in rendezvous.agree. How many there are on
        # this machine not every launcher says, so it proves nothing.
        seen = "" if _visible() is None else f" (CUDA_VISIBLE_DEVICES={_visible()})"
        raise ConfigError(
            "run.device",
            [
                f"run.device: {local_rank + 1} or more processes on this machine, and each sees {count} "
                f"devices{seen}. Needed: all devices visible to all processes, at least one for each; or exactly one "
                "visible to each (srun --gpus-per-task=1). Start fewer processes, or let them see more."
            ],
        )
    return local_rank


def _refuse_absent(count: int) -> None:
    """CUDA ends its list at the first device that is not there, and says nothing."""
    names = []
    for name in (_visible() or "").split(","):
        if not name.strip() or name.strip().startswith("-"):  # a negative number ends the list on purpose
            break
        names.append(name.strip())
    if len(names) > count:
        raise ConfigError(
            "run.device",
            [
                f"run.device: CUDA_VISIBLE_DEVICES={_visible()} names {len(names)} devices, but only {count} of them "
                f"can be used: {names[count]} is not there. Name devices that nvidia-smi shows."
            ],
        )


def identity(device: torch.device) -> str:
    """The name of a CUDA device, the same in every process, whatever number it has there; empty for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def use_device(device: torch.device | None) -> None:
    """First thing in a thread of ours. The choice of a GPU is a thread's own: a new one would begin with the first of
    them, and open a context there that takes hundreds of MB."""
    if device is not None and device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
