"""NCCL over RDMA instead of TCP."""

import os
from pathlib import Path

from gptworks.errors import UsageError

# IB and RoCE only: where they cannot be used NCCL stops, instead of falling back to TCP unseen.
TRANSPORT = {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}
_DEVICES = Path("/sys/class/infiniband")


def require(device: str) -> list[str]:
    """The RDMA cards of this machine, or what stands in the way of using one."""
    if device != "cuda":
        raise UsageError(
            f"--rdma: the device is {device}, where processes talk through gloo, which knows TCP only. "
            "RDMA needs NCCL: use --device cuda, or leave --rdma out."
        )
    cards = sorted(path.name for path in _DEVICES.iterdir()) if _DEVICES.is_dir() else []
    if not cards:
        raise UsageError(
            f"--rdma: no RDMA card on this machine ({_DEVICES} is empty or missing). "
            "Load its driver, or leave --rdma out."
        )
    return cards


def enable(device: str) -> str:
    """Set the environment of the processes that start from here; what to tell the user."""
    cards = require(device)
    os.environ.update(TRANSPORT)
    settings = ", ".join(f"{name}={value}" for name, value in TRANSPORT.items())
    return f"rdma: {settings}; cards {', '.join(cards)}. NCCL_IB_HCA and NCCL_IB_GID_INDEX choose among them."
