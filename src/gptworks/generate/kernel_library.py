"""The C++ function that reads tokens on a CPU: built at first use, for the best instruction set that works here.

Each instruction set is a library of its own from the same source (`kernels/`). What a processor advertises it may not
have: a library that has just been built is tried in a child, and where it dies the next instruction set is taken.
"""

import ctypes
import functools
import hashlib
import os
import platform
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch  # noqa: F401  its OpenMP is the one that the libraries use

from gptworks import child_process, cpu, file_errors, model_hub, staging_folder
from gptworks.compilers import cxx_compilers
from gptworks.durable import sync
from gptworks.errors import UsageError

OFF = "GPTWORKS_KERNELS"  # in the environment: an instruction set, or "off" for torch alone
SOURCES = Path(__file__).parent / "kernels"
_SEAL_BYTES = hashlib.sha256().digest_size
# Not linked with OpenMP: the function shares the threads of the OpenMP that torch has loaded. Nothing is fused that the
# source does not fuse, so that the numbers of a token do not depend on how a loop was compiled.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC")


@dataclass(frozen=True)
class InstructionSet:
    name: str
    machines: tuple[str, ...]  # () = any
    advertised: tuple[str, ...]  # flags of the processor
    compiler_flags: tuple[str, ...]


_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX2 = ("avx2", "fma")
_BASE = (*_AVX512, *_AVX2)
INSTRUCTION_SETS = (  # the fastest first
    InstructionSet("avx512-vnni", _X86, ("avx512_vnni", *_BASE), ("-mavx512vnni", *(f"-m{flag}" for flag in _BASE))),
    InstructionSet("avx512", _X86, _BASE, tuple(f"-m{flag}" for flag in _BASE)),
    InstructionSet("avx2", _X86, _AVX2, tuple(f"-m{flag}" for flag in _AVX2)),
    InstructionSet("neon", _ARM, (), ()),
    InstructionSet("portable", (), (), ()),
)


@dataclass(frozen=True)
class Functions:
    """The functions of a library that has been opened."""

    instructions: str
    read: Any  # (model, batch) -> place of the first token that cannot be read, or -1
    work_size: Any  # (model, batch) -> bytes


T = TypeVar("T")
# What a library that has just been built must survive, in a child.
Trial = Callable[[Functions], Iterator[str]]


def possible() -> list[InstructionSet]:
    """The instruction sets that this processor advertises, or the one that the environment names."""
    asked = os.environ.get(OFF, "")
    if asked:
        chosen = [each for each in INSTRUCTION_SETS if each.name == asked]
        if not chosen:
            known = ", ".join(["off", *(each.name for each in INSTRUCTION_SETS)])
            raise UsageError(f"{OFF}: got {asked!r}; needs one of {known}.")
        return chosen
    flags = set(cpu.flags())
    return [
        each
        for each in INSTRUCTION_SETS
        if (not each.machines or platform.machine() in each.machines) and flags.issuperset(each.advertised)
    ]


@functools.cache
def loaded(trial: Trial) -> tuple[Functions | None, str | None]:
    """The functions, or the reason why there are none."""
    if os.environ.get(OFF) == "off":
        return None, f"{OFF}=off"
    if reason := no_place():
        return None, reason
    functions, reason = first_opened(lambda compiler, instructions: opened(compiler, instructions, trial))
    return functions, reason or None


def first_opened(open_with: Callable[[str, InstructionSet], T]) -> tuple[T | None, str]:
    """By the first compiler and the best instruction set that work; or the reason why none does."""
    reasons = []
    for compiler in cxx_compilers():
        for instructions in possible():
            try:
                return open_with(compiler, instructions), ""
            except (OSError, subprocess.SubprocessError) as error:
                reasons.append(f"{compiler} ({instructions.name}): {reason_of(error)}")
    return None, "; ".join(reasons) or "no C++ compiler found (g++)"


def opened(compiler: str, instructions: InstructionSet, trial: Trial) -> Functions:
    return _open(built(compiler, instructions, trial))


def built(compiler: str, instructions: InstructionSet, trial: Trial) -> Path:
    return library_of(SOURCES / "read.cpp", compiler, instructions, _FLAGS, lambda path: trial(_open(path)))


def library_of(
    source: Path,
    compiler: str,
    instructions: InstructionSet,
    flags: tuple[str, ...],
    try_out: Callable[[Path], Iterator[str]],
) -> Path:
    """The library of that source file and those beside it, from $GPTWORKS_HOME/kernels or built anew (some seconds)."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    sources = [path.read_text(encoding="utf-8") for path in sorted(source.parent.iterdir())]
    # The processor too: home folders are shared between machines, and what was tried was tried on one.
    key = "\n".join([*sources, *flags, *instructions.compiler_flags, version, " ".join(cpu.flags()) or cpu.name()])
    library = _folder() / f"{source.stem}-{instructions.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    refused = library.with_suffix(".refused")
    if _is_whole(library):
        return library
    if refused.is_file() and (reason := refused.read_text(encoding="utf-8", errors="replace").strip()):
        raise OSError(reason)
    with staging_folder.beside(library) as work:
        compiled, linked = work / "a.o", work / "a.so"
        compile_one = [*flags, *instructions.compiler_flags, "-c", source, "-o", compiled]
        for command in (compile_one, ["-shared", compiled, "-o", linked]):
            subprocess.run([compiler, *map(str, command)], capture_output=True, text=True, check=True, timeout=300)
        if died := child_process.run(lambda: try_out(linked)).ended_by:
            # Written down: the next process need not build it again to know.
            refused.write_text(f"what it builds dies of {died} on {cpu.name()}", encoding="utf-8")
            raise OSError(refused.read_text(encoding="utf-8"))
        _seal(linked)
        linked.replace(library)  # in one go: another process may be waiting for it
    return library


def no_place() -> str | None:
    """Why no library can be kept here, or None."""
    try:
        _folder()
    except OSError as error:
        return file_errors.explain(error) or str(error)
    return None


def _folder() -> Path:
    folder = model_hub.home() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_ours(folder)  # what lies there is run
    return folder


def _seal(library: Path) -> None:
    """Puts the hash of a library behind it, where no loader looks, and syncs it: to load one that was cut short, as a
    power failure or a full disk leaves it, would end the process."""
    with library.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(digest)
    sync(library)


def _is_whole(library: Path) -> bool:
    try:
        sealed = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(sealed[:-_SEAL_BYTES]).digest() == sealed[-_SEAL_BYTES:]


def _require_ours(folder: Path) -> None:
    """Nobody else may put a library there."""
    if not hasattr(os, "getuid"):
        return  # not a POSIX system
    about = folder.stat()
    if about.st_uid not in (os.getuid(), 0) or about.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise PermissionError(
            f"{folder} belongs to user {about.st_uid} and has mode {stat.filemode(about.st_mode)}: others could have "
            "put a library there. Needed: a folder that only you can write (chmod go-w), or another GPTWORKS_HOME"
        )


def _open(path: Path) -> Functions:
    try:
        library = ctypes.CDLL(str(path))
        read, work_size, instructions = (
            getattr(library, f"gptworks_{name}") for name in ("read", "work_size", "instructions")
        )
    except AttributeError as error:
        raise OSError(f"{path}: {error}") from None
    for function in (read, work_size):
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_void_p]
    instructions.restype = ctypes.c_char_p
    return Functions(instructions().decode(), read, work_size)


def reason_of(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
