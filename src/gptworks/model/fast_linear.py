"""The product of a few rows with a large matrix on the CPU, in a small C++ function that is built at first use.

torch multiplies one row at half the speed of the memory (it uses one thread). Where there is no compiler, or the result
is not what torch computes, the function is not used; `why_not()` tells the reason.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks import names

# Above this many rows torch's own product is as fast.
MAX_ROWS = 16
OFF = "GPTWORKS_KERNELS"  # "off" in the environment: torch alone
# Not linked with OpenMP: the function shares the threads of the OpenMP that torch has loaded.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC")
_SOURCE = Path(__file__).with_suffix(".cpp")
_KINDS = (torch.float32, torch.bfloat16, torch.int8)


def linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x weight^T, times the scale of each output, plus bias; x in fp32, weight in fp32, bf16 or int8."""
    function = _function()
    assert function is not None
    outputs, depth = weight.shape
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    function(
        x.data_ptr(),
        weight.data_ptr(),
        weight.element_size(),
        None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // depth,
        depth,
        outputs,
    )
    return y


def suits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() <= MAX_ROWS * weight.shape[1]
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
        and _function() is not None
    )


def why_not() -> str | None:
    """The reason why torch multiplies alone; None where the function is in use."""
    return _loaded()[1]


def _function() -> "ctypes._NamedFuncPointer | None":
    return _loaded()[0]


@functools.cache
def _loaded() -> "tuple[ctypes._NamedFuncPointer | None, str | None]":
    if os.environ.get(OFF) == "off":
        return None, f"{OFF}=off"
    reasons = []
    for compiler in _compilers():
        try:
            function = _open(_built(compiler))
            _check(function)
            return function, None
        except (OSError, subprocess.SubprocessError, ArithmeticError) as error:
            reasons.append(f"{compiler}: {_reason(error)}")
    return None, "; ".join(reasons) or "no C++ compiler (g++ or clang++) found"


def _compilers() -> list[str]:
    """Each once: c++ is most often another name of g++."""
    found = (shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return list({os.path.realpath(path): path for path in found if path}.values())


def _built(compiler: str) -> Path:
    """The library, from $GPTWORKS_HOME/kernels or built anew (about a second)."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    key = "\n".join([_SOURCE.read_text(encoding="utf-8"), *_FLAGS, version, _processor()])
    folder = names.home() / "kernels"
    library = folder / f"fast_linear-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        compiled, linked = Path(work) / "a.o", Path(work) / "a.so"
        for command in ([*_FLAGS, "-c", _SOURCE, "-o", compiled], ["-shared", compiled, "-o", linked]):
            subprocess.run([compiler, *map(str, command)], capture_output=True, text=True, check=True, timeout=300)
        linked.replace(library)  # in one go: another process may be waiting for it
    return library


def _processor() -> str:
    """-march=native means another program on another processor, and home folders are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def _open(library: Path) -> "ctypes._NamedFuncPointer":
    try:
        function = ctypes.CDLL(str(library)).gptworks_linear
    except AttributeError as error:
        raise OSError(f"{library}: {error}") from None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, ctypes.c_int, pointer, pointer, pointer, number, number, number]
    function.restype = None
    return function


def _check(function: "ctypes._NamedFuncPointer") -> None:
    """Odd sizes, every type and number of rows that has a loop of its own: as torch computes it."""
    generator = torch.Generator().manual_seed(0)
    for rows, outputs, depth in ((1, 5, 19), (7, 6, 40)):
        x = torch.randn(rows, depth, generator=generator)
        bias, scale = torch.randn(2, outputs, generator=generator)
        for kind in _KINDS:
            weight = (torch.randn(outputs, depth, generator=generator) * 20).to(kind)
            y = torch.empty(rows, outputs)
            pointers = (x.data_ptr(), weight.data_ptr(), weight.element_size(), scale.data_ptr(), bias.data_ptr())
            function(*pointers, y.data_ptr(), rows, depth, outputs)
            expected = F.linear(x, weight.float()) * scale + bias
            if not torch.allclose(y, expected, rtol=1e-4, atol=1e-3):
                raise ArithmeticError("a test product came out wrong")


def _reason(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
