"""The C++ functions that train, built at first use like those that write text (`generate/kernel_library.py`)."""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptworks.generate.kernel_library import OFF, InstructionSet, first_opened, library_of, no_place

SOURCE = Path(__file__).parent / "kernels" / "block.cpp"
# Sums keep their order; products are fused into them where the processor can.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")


@dataclass(frozen=True)
class Functions:
    """The functions of a library that has been opened."""

    instructions: str
    forward: Any  # (block)
    backward: Any  # (block, gradients)
    update: Any  # (update)
    sgemm: int  # the address of the function that torch multiplies with


# What a library that has just been built must survive, in a child.
Trial = Callable[[Functions], Iterator[str]]


@functools.cache
def loaded(trial: Trial) -> tuple[Functions | None, str]:
    """The functions, or None and the reason why there are none."""
    if os.environ.get(OFF) == "off":
        return None, f"{OFF}=off"
    sgemm = _sgemm()
    if not sgemm:
        return None, "this torch does not show the function it multiplies with (sgemm)"
    if reason := no_place():
        return None, reason
    return first_opened(lambda compiler, instructions: _opened(compiler, instructions, sgemm, trial))


def _opened(compiler: str, instructions: InstructionSet, sgemm: int, trial: Trial) -> Functions:
    def try_out(path: Path) -> Iterator[str]:
        torch.set_num_threads(1)  # the threads of the process that was copied are not here
        yield from trial(_open(path, instructions.name, sgemm))

    library = library_of(SOURCE, compiler, instructions, _FLAGS, try_out)
    return _open(library, instructions.name, sgemm)


def _open(path: Path, instructions: str, sgemm: int) -> Functions:
    try:
        library = ctypes.CDLL(str(path))
        forward, backward = library.gptworks_block_forward, library.gptworks_block_backward
        update = library.gptworks_update
    except AttributeError as error:
        raise OSError(f"{path}: {error}") from None
    forward.restype = backward.restype = update.restype = None
    forward.argtypes = update.argtypes = [ctypes.c_void_p]
    backward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return Functions(instructions, forward, backward, update, sgemm)


def _sgemm() -> int:
    """The address of sgemm; 0 where the library of torch has none that others can call."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.sgemm_, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
