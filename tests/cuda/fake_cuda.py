"""A process with eight CUDA devices that do nothing. `load` comes before torch is imported, `settle` after it.

Tensors there are fake: shapes, types and devices without memory. An operator that mixes devices fails as on a GPU;
which kernel runs, what it computes and what NCCL does is not seen.
"""

import contextlib
import ctypes
import importlib.util
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

chosen_devices: list[tuple[str, int | None]] = []  # by torch.cuda.set_device: the name of the thread, the device


def load(library: str) -> None:
    """Torch asks once which devices there are, so they must be there before it does."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def settle() -> None:
    """Streams, events and the choice of a device are of torch's CUDA build: here they do nothing."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    def set_device(device: Any) -> None:
        chosen_devices.append((threading.current_thread().name, torch.device(device).index))

    replaced: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "current_stream": lambda *_: _Stream(),
        "current_device": lambda: 0,
        "set_device": set_device,
        "synchronize": _Stream().synchronize,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    for name, value in replaced.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, value)

    pin_memory = torch.Tensor.pin_memory

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        """What has no memory is only said to be pinned."""
        if isinstance(tensor, FakeTensor):
            copy = tensor.clone()
            copy.is_said_to_be_pinned = True  # type: ignore[attr-defined]
            return copy
        with _disable_current_modes():
            return pin_memory(tensor)

    torch.Tensor.pin_memory = pinned  # type: ignore[assignment, method-assign]


def is_pinned(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # a mode of fake tensors says no of any
        return hasattr(tensor, "is_said_to_be_pinned") or (not isinstance(tensor, FakeTensor) and tensor.is_pinned())


class _Stream:
    """Or an event. Whoever waits for it on the host is seen."""

    device_index, device_type, stream_id = 0, 1, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def synchronize(self, *_: Any) -> None:
        for watch in Watch.open:
            watch.seen.reads.append(f"synchronize at {where()}")

    def record_event(self, *_: Any) -> "_Stream":
        return _Stream()

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True


@dataclass
class Seen:
    """What makes the host wait for the device, each with file and line."""

    reads: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)  # between host and device that block, or would


class Watch:
    """`with Watch() as seen:` around what is watched. A number that is asked for is 2, a whole one 1."""

    open: list["Watch"] = []

    def __init__(self) -> None:
        self.seen = Seen()

    def __enter__(self) -> Seen:
        from torch._subclasses.fake_tensor import FakeTensor

        self.mode = _mode(self.seen)
        self.mode.__enter__()
        self.tolist: Callable[..., Any] = FakeTensor.tolist
        seen, tolist = self.seen, self.tolist

        def one_read(tensor: FakeTensor) -> Any:
            """Of a fake tensor it asks for one number after the other; a GPU's is copied once."""
            before = len(seen.reads)
            found = tolist(tensor)
            if tensor.is_cuda:
                seen.reads[before:] = [f"tolist at {where()}"]
            return found

        FakeTensor.tolist = one_read  # type: ignore[method-assign, assignment]
        Watch.open.append(self)
        return seen

    def __exit__(self, *problem: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        Watch.open.remove(self)
        FakeTensor.tolist = self.tolist  # type: ignore[method-assign]
        self.mode.__exit__(*problem)


def _mode(seen: Seen) -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    reading = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            name = func._schema.name.removeprefix("aten::")
            if name in reading and args[0].is_cuda:
                seen.reads.append(f"{name} at {where()}")
            if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
                kind = args[0].dtype
                return 2.0 if kind.is_floating_point else True if kind is torch.bool else 1
            if name == "_to_copy":
                self.look(args[0], kwargs.get("device") or args[0].device, bool(kwargs.get("non_blocking")))
            if name == "copy_":
                self.look(args[1], args[0].device, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
            return func(*args, **kwargs)

        def look(self, source: torch.Tensor, target: torch.device, non_blocking: bool) -> None:
            if {source.device.type, target.type} != {"cpu", "cuda"}:
                return
            if not non_blocking:
                problem = "blocks"
            elif target.type == "cpu":
                problem = "may be read before it is there"
            elif not is_pinned(source):
                problem = "is of memory that is not pinned"
            else:
                return
            way = f"{source.device.type} -> {target.type}"
            seen.copies.append(f"copy {way} of {list(source.shape)} {problem} at {where()}")

    return Watching()


def where() -> str:
    """The innermost line of the project; of torch, where none of ours is at work."""
    frames = [frame for frame in traceback.extract_stack() if "/tests/cuda/" not in frame.filename]
    ours = [frame for frame in frames if "/gptworks/" in frame.filename]
    last = (ours or [f for f in frames if not f.filename.endswith(("_python_dispatch.py", "_ops.py"))])[-1]
    return f"{last.filename.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{last.lineno}"


@contextlib.contextmanager
def fsdp_allocates_in(memory: Any) -> Iterator[None]:
    """FSDP makes one real tensor on the device for each of its groups; here it is fake like all others."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    init, empty = FSDPParamGroup.__init__, torch.empty

    def empty_in_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        with memory:
            return empty(*args, **kwargs)

    def init_in_memory(self: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        torch.empty = empty_in_memory
        try:
            init(self, *args, **kwargs)
        finally:
            torch.empty = empty

    FSDPParamGroup.__init__ = init_in_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParamGroup.__init__ = init  # type: ignore[method-assign]
