"""The processor: its name, the instruction sets in use, and whether products on it kill the process."""

from gptworks import cpu
from gptworks.doctor.finding import Finding, note, ok, problem

# By Linux' names; those that decide how fast, and whether, small numbers are multiplied.
_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip


def instructions() -> list[Finding]:
    import torch

    verdict = cpu.settle(say=False)
    advertised = [flag for flag in _FLAGS if flag in cpu.flags()]
    used = cpu.instructions_in_use() or "what it finds"
    if not verdict.setting.use_onednn:
        used = "nothing: it is switched off"
    elif verdict.setting.cap or verdict.given_cap:
        used += f" (capped: {cpu.CAP}={verdict.setting.cap or verdict.given_cap})"
    summary = f"{cpu.name()}; torch uses {torch.backends.cpu.get_cpu_capability()}, oneDNN {used}"
    return ok("cpu", f"{summary}; advertised: {', '.join(advertised) or 'none of those we know'}")


def products() -> list[Finding]:
    verdict = cpu.settle(say=False)
    if verdict.unknown and not verdict.deaths:
        return note("products", verdict.unknown)
    if not verdict.deaths:
        return ok("products", f"{', '.join(cpu.TYPES)} can be multiplied here; {_bf16_speed()}")
    if "fp32" in verdict.deadly:
        return problem("products", str(verdict), "Nothing can be computed on this CPU by this torch: use another.")
    if verdict.deadly:
        return note("products", str(verdict), "Use precision.compute=fp32, or another machine.")
    fix = f"Nothing to do: gptworks does it by itself. Other programs: {cpu.CAP}={verdict.setting.cap}."
    if not verdict.setting.cap:
        fix = "Slow: precision.compute=fp32 may be faster."
    return note("products", str(verdict), fix)


def _bf16_speed() -> str:
    ratio = cpu.product_speed("bf16")
    advice = (
        "precision.compute=bf16 trains faster" if ratio >= cpu.WORTHWHILE else "precision.compute=fp32 trains faster"
    )
    return f"bf16 {ratio:.1f}x as fast as fp32: {advice}"
