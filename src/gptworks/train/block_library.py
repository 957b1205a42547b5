"""The C++ functions that train, built at first use like those that write text (`generate/kernel_library.py`)."""

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptworks import cpu
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
    head_loss: Any  # (head)
    update: Any  # (update)
    product: Any  # (product)
    size_of: Any  # (which) -> bytes of a structure
    knows_bf16: bool  # as factors of products of our own
    sgemm: int | None  # the address of the function that torch multiplies with; None for products of our own


# What a library that has just been built must survive, in a child.
Trial = Callable[[Functions], Iterator[str]]


@functools.cache
def loaded(trial: Trial) -> tuple[Functions | None, str]:
    """The functions, or None and the reason why there are none."""
    if os.environ.get(OFF) == "off":
        return None, f"{OFF}=off"
    if reason := no_place():
        return None, reason
    return first_opened(lambda compiler, instructions: _opened(compiler, instructions, trial))


def _opened(compiler: str, instructions: InstructionSet, trial: Trial) -> Functions:
    def try_out(path: Path) -> Iterator[str]:
        torch.set_num_threads(1)  # the threads of the process that was copied are not here
        yield from trial(_open(path, instructions))

    if "avx512f" in instructions.advertised and "avx512_bf16" in cpu.flags():
        with suppress(OSError, subprocess.SubprocessError):  # an old compiler does not know it, or it kills a process
            return _open(library_of(SOURCE, compiler, instructions, (*_FLAGS, "-mavx512bf16"), try_out), instructions)
    return _open(library_of(SOURCE, compiler, instructions, _FLAGS, try_out), instructions)


def _open(path: Path, instructions: InstructionSet) -> Functions:
    try:
        library = ctypes.CDLL(str(path))
        forward, backward = library.gptworks_block_forward, library.gptworks_block_backward
        head_loss, update, product = (
            getattr(library, f"gptworks_{name}") for name in ("head_loss", "update", "product")
        )
    except AttributeError as error:
        raise OSError(f"{path}: {error}") from None
    for function in (forward, backward, head_loss, update, product):
        function.restype, function.argtypes = None, [ctypes.c_void_p]
    backward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    sgemm = _sgemm(instructions)
    knows_bf16 = sgemm is None and bool(library.gptworks_knows_bf16())
    return Functions(
        instructions.name, forward, backward, head_loss, update, product, library.gptworks_size_of, knows_bf16, sgemm
    )


def _sgemm(instructions: InstructionSet) -> int | None:
    """torch's where it is as fast as the processor allows: MKL uses AVX-512 on Intel's only."""
    if "avx512f" in instructions.advertised and not cpu.is_intel():
        return None
    return torchs_sgemm()


def torchs_sgemm() -> int | None:
    """The address of the function; None where torch has none that others can call."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
