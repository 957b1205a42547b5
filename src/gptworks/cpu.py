"""The processor, and whether products on it kill the process.

Some virtual machines advertise matrix instructions (AMX) that they do not have. oneDNN, which multiplies bf16, fp16 and
int8 for torch, believes them, and the first such product ends the process with SIGILL. Which instructions oneDNN uses
is decided by ONEDNN_MAX_CPU_ISA when it is first used in a process, be it for one small fp32 GELU, and never again. So
`settle` multiplies a little in a copy of this process before this process does. The copy inherits a decision that was
already made: a cap that helps it helps here too, and where none does, torch can still multiply without oneDNN.
"""

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gptworks import child_process
from gptworks.errors import DeviceError

if TYPE_CHECKING:
    import torch

CAP = "ONEDNN_MAX_CPU_ISA"
_OLD_CAP = "DNNL_MAX_CPU_ISA"  # which oneDNN reads where the other is not set
CPUINFO = Path("/proc/cpuinfo")
TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}  # of torch
# Instruction sets by oneDNN's names, each a part of the next where that matters here.
_INSTRUCTION_SETS = (
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
    "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16",
)  # fmt: skip
_CAPS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")  # tried in this order
_SECONDS = 10.0  # a copy that takes longer is stuck


@dataclass(frozen=True)
class Setting:
    """How oneDNN may multiply: up to which instruction set ("" = whatever it finds), or not at all."""

    cap: str = ""
    use_onednn: bool = True

    def __str__(self) -> str:
        if not self.use_onednn:
            return "without oneDNN"
        return f"with {CAP}={self.cap}" if self.cap else "as it is"

    def apply(self) -> None:
        if self.cap:
            os.environ[CAP] = self.cap  # processes that are started from here have it too
        if not self.use_onednn:
            import torch

            torch.backends.mkldnn.set_flags(_enabled=False)


@dataclass(frozen=True)
class Verdict:
    setting: Setting = field(default_factory=Setting)
    # Type -> the signal that a product of it ended the process with ...
    deaths: dict[str, str] = field(default_factory=dict)  # ... as the process was found
    deadly: dict[str, str] = field(default_factory=dict)  # ... with everything that was tried
    given_cap: str = ""  # by the user
    unknown: str = ""  # why products could not be tried

    def __str__(self) -> str:
        """One line; empty where all is well."""
        if not self.deaths:
            return ""
        died = ", ".join(f"{kind} ({signal})" for kind, signal in self.deaths.items())
        text = f"products of {died} would kill this process on {name()}"
        if not self.setting.use_onednn:
            text += (
                f"; oneDNN is switched off, which is slow. If torch was used before gptworks here: {CAP}={_CAPS[0]} "
            )
            text += "in the environment, before Python starts, is fast"
        elif self.setting.cap:
            instead = f" instead of {self.given_cap}" if self.given_cap else ""
            text += f"; {CAP}={self.setting.cap} is set{instead}, which cures it"
        if self.deadly:
            text += f"; nothing helps {', '.join(self.deadly)}, which will be refused"
        return f"{text}."


_verdict: Verdict | None = None
_lock = threading.Lock()


def settle(*, say: bool = True) -> Verdict:
    """Once per process, before its first product: make sure that products do not kill it.

    say: what was changed, in a line on standard error; of the ranks of a run only the first one does.
    """
    global _verdict
    with _lock:
        if _verdict is None:
            verdict = examine()
            if say and str(verdict) and _is_first_rank():
                print(f"note: {verdict}", file=sys.stderr, flush=True)
            verdict.setting.apply()
            _verdict = verdict
        return _verdict


def _is_first_rank() -> bool:
    """As torchrun or srun tell it; also of a process that starts the ranks of one of several machines."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def require(dtype: "torch.dtype") -> None:
    """Refuse a type whose products would kill this process."""
    verdict = settle()
    kind = next((each for each, full in TYPES.items() if str(dtype) == f"torch.{full}"), "")
    if kind in verdict.deadly:
        tried = ", ".join(str(setting) for setting in (Setting(), *_settings()))
        # Masters and sums are fp32: where that is deadly nothing else helps.
        others = [each for each in ("fp32", "bf16", "fp16") if not {each, "fp32"} & verdict.deadly.keys()]
        advice = f"Use precision.compute={others[0]} (dtype=torch.{TYPES[others[0]]})" if others else "Use a GPU"
        raise DeviceError(
            f"{kind} on this CPU ({name()}): a product kills the process with {verdict.deadly[kind]}. "
            f"oneDNN was tried {tried}. {advice}, or another machine; `gptworks doctor` shows what this one can."
        )


def examine() -> Verdict:
    """Try products in copies of this process, as it is and then with less and less of the instruction sets."""
    if not child_process.POSSIBLE:
        return Verdict(unknown=f"not tried: processes cannot be copied safely on {platform.system()}")
    deaths, unknown = _deaths(Setting())
    best, deadly = Setting(), deaths
    for setting in _settings():
        if not deadly:
            break
        left, _ = _deaths(setting)
        if len(left) < len(deadly):
            best, deadly = setting, left
    return Verdict(best, deaths, deadly, user_cap(), unknown)


def _settings() -> Iterator[Setting]:
    """What can be tried where products die. A cap of the user's is only ever lowered."""
    if platform.machine() in ("x86_64", "AMD64"):
        below = _INSTRUCTION_SETS.index(user_cap()) if user_cap() in _INSTRUCTION_SETS else len(_INSTRUCTION_SETS)
        yield from (Setting(cap) for cap in _CAPS if _INSTRUCTION_SETS.index(cap) < below)
    yield Setting(use_onednn=False)


def _deaths(setting: Setting) -> tuple[dict[str, str], str]:
    """Type -> the signal that a product of it died of; and why some were not tried to the end."""

    def product(kind: str) -> str:
        import torch

        setting.apply()
        torch.set_num_threads(1)  # the threads of the process that was copied are not here
        multiply(getattr(torch, TYPES[kind]))
        return kind

    outcomes = dict(zip(TYPES, child_process.run_each(list(TYPES), product, _SECONDS), strict=True))
    deaths = {kind: outcome.ended_by for kind, outcome in outcomes.items() if outcome.ended_by}
    # Raised or stuck there, this process may still do it.
    others = [
        f"{kind}: {outcome.failure}" for kind, outcome in outcomes.items() if outcome.error and kind not in deaths
    ]
    return deaths, "; ".join(others)


def multiply(dtype: "torch.dtype") -> None:
    """The products of a training step: forward, for both gradients, and within attention."""
    import torch
    import torch.nn.functional as F

    # Plain tensors, whatever mode the caller is in. Fewer than 16 x 16 x 16 are not given to oneDNN.
    with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
        a = torch.ones(64, 64, dtype=dtype, device="cpu")
        if dtype == torch.int8:
            torch._int_mm(a, a)
            return
        F.linear(a, a)
        F.gelu(torch.mm(a.T, a))
        heads = a.view(1, 1, 64, 64)
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


# Casts of weights and activations, and the fp32 blocks in C++, are worth about so much of a product's speed.
WORTHWHILE = 1.5


def product_speed(kind: str) -> float:
    """How many times as fast as in fp32 a product of this type is here: measured, about 20 ms."""
    import torch

    with torch.no_grad():
        pairs = {each: torch.ones(768, 512, dtype=getattr(torch, TYPES[each]), device="cpu") for each in ("fp32", kind)}
        best = dict.fromkeys(pairs, float("inf"))
        for _ in range(5):  # in turns, so that whatever else runs here meets both
            for each, matrix in pairs.items():
                before = time.perf_counter()
                torch.mm(matrix, matrix[:512].T)
                best[each] = min(best[each], time.perf_counter() - before)
    return best["fp32"] / best[kind]


def about_speed(kind: str) -> str:
    """A sentence for who would compute in this type, where that is no gain here; else nothing."""
    if kind == "fp32" or (ratio := product_speed(kind)) >= WORTHWHILE:
        return ""
    return (
        f"precision.compute: {kind}: its products are {ratio:.1f}x as fast as those of fp32 on this CPU; below "
        f"{WORTHWHILE}x a step in fp32 is faster: precision.compute=fp32"
    )


def user_cap() -> str:
    return os.environ.get(CAP, os.environ.get(_OLD_CAP, "")).upper()


def name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def is_intel() -> bool:
    return _cpuinfo("vendor_id") == "GenuineIntel"


def flags() -> list[str]:
    """What the processor advertises. It may not have it."""
    return (_cpuinfo("flags") or _cpuinfo("Features")).split()


def _cpuinfo(key: str) -> str:
    with contextlib.suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")
    return ""


def instructions_in_use() -> str:
    """Which instructions oneDNN uses in this process, in its own words; empty where it does not tell."""

    def ask() -> Iterator[str]:
        import torch

        reader, writer = os.pipe()
        os.dup2(writer, 1)
        torch.set_num_threads(1)
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            torch.nn.functional.gelu(torch.ones(64, 64))
        os.dup2(2, 1)
        os.close(writer)  # where oneDNN is switched off, nothing was written: the reader sees an end
        yield os.read(reader, 65536).decode()

    if not child_process.POSSIBLE:  # it would be told to the user
        return ""
    log = "".join(child_process.run(ask, _SECONDS).answers)
    return next((line.partition("isa:")[2].strip() for line in log.splitlines() if ",cpu,isa:" in line), "")
