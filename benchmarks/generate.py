"""Claim: on a CPU, gptworks writes text and reads prompts at least as fast as llama.cpp and CTranslate2.

    python benchmarks/generate.py [--shape gpt2 ...] [--task "batch 1" ...] [--rounds 5] [--threads 2] [--only NAME ...]

The shape of GPT-2 124M, of SmolLM2-135M, or both, with random weights, which all have in their own form. Tasks: one
text or eight at a time, prompt of 64 tokens and 128 new ones, greedy, no early end; and a prompt of 512 tokens to the
first new one. Each competitor lives in a process of its own; all take turns, so that the noise of the machine meets
them alike. With two shapes each ratio of the second is divided by that of the first in the same round: not below 1.0x.
A token needs every weight once: the bound is the speed of reading memory, measured here, divided by the bytes of the
matrices. `make bench-generate` makes an environment with the competitors (llama.cpp is built from source: minutes).
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from competitors import Race, machine

from gptworks import child_process, cpu
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

GPT2 = ModelConfig()
SHAPES = {
    "gpt2": GPT2,
    # With the vocabulary of GPT-2 (50,257 instead of 49,152 tokens), whose tokenizer is at hand.
    "smollm2": ModelConfig(
        num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, ffn_size=1536, max_positions=2048, norm="rmsnorm",
        positions="rope", mlp="swiglu", bias="none", rope_theta=100_000.0,
    ),
}  # fmt: skip
Write = Callable[[list[list[int]], int], list[list[int]]]  # prompts, how many new tokens -> those


@dataclass(frozen=True)
class Task:
    batch: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """What its speed is told of: tokens that are written, or read where only one is."""
        return self.batch * (self.prompt if self.new == 1 else self.new)


TASKS = {"batch 1": Task(1, 64, 128), "batch 8": Task(8, 64, 128), "prompt 512": Task(1, 512, 1)}


def prompts_of(task: Task) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, GPT2.vocab_size - 1, (task.batch, task.prompt), generator=generator).tolist()


def gptworks(folder: Path, kind: str) -> Write:
    from gptworks.checkpoint.pretrained import PretrainedGPT
    from gptworks.generate.engine import continue_tokens

    model = PretrainedGPT.from_pretrained(folder / "hf", device="cpu", weights=kind)

    def write(prompts: list[list[int]], new: int) -> list[list[int]]:
        cfg = GenerateConfig(strategy="greedy", max_new_tokens=new, ignore_eod=True)
        return [found[0].tokens for found in continue_tokens(model, prompts, cfg)]

    return write


def transformers(folder: Path, cache: str) -> Write:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    kind = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}

    def write(prompts: list[list[int]], new: int) -> list[list[int]]:
        tokens = torch.tensor(prompts)
        with torch.no_grad():
            found = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=GPT2.vocab_size - 1,
                **kind,
            )
        return found[:, tokens.shape[1] :].tolist()

    return write


def ctranslate2(folder: Path, kind: str) -> Write:
    from ctranslate2 import Generator

    generator = Generator(
        str(folder / f"ct2-{kind}"), device="cpu", compute_type=kind, intra_threads=torch.get_num_threads()
    )
    names = json.loads((folder / f"ct2-{kind}" / "vocabulary.json").read_text(encoding="utf-8"))

    def write(prompts: list[list[int]], new: int) -> list[list[int]]:
        found = generator.generate_batch(
            [[names[token] for token in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in found]

    return write


def llama_cpp(folder: Path, kind: str) -> Write:
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    model = Llama(str(folder / f"{kind}.gguf"), n_ctx=640, n_threads=threads, n_threads_batch=threads, verbose=False)

    def write(prompts: list[list[int]], new: int) -> list[list[int]]:
        model.reset()
        found = []
        for token in model.generate(prompts[0], top_k=1, temp=0.0, repeat_penalty=1.0, reset=True):
            found.append(token)
            if len(found) == new:
                return [found]
        raise AssertionError("ended early")

    return write


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# name -> (how to make it, its argument, tasks, module it needs)
ALL, ONE = tuple(TASKS), ("batch 1", "prompt 512")
PEERS: dict[str, tuple[Callable[[Path, str], Write], str, tuple[str, ...], str]] = {
    "gptworks fp32": (gptworks, "fp32", ALL, "gptworks"),
    "gptworks bf16": (gptworks, "bf16", ALL, "gptworks"),
    "gptworks int8": (gptworks, "int8", ALL, "gptworks"),
    "gptworks int4": (gptworks, "int4", ALL, "gptworks"),
    "llama.cpp f32": (llama_cpp, "f32", ONE, "llama_cpp"),
    "llama.cpp f16": (llama_cpp, "f16", ONE, "llama_cpp"),
    "llama.cpp q8_0": (llama_cpp, "q8_0", ONE, "llama_cpp"),
    "llama.cpp q4_0": (llama_cpp, "q4_0", ONE, "llama_cpp"),
    "CTranslate2 float32": (ctranslate2, "float32", ALL, "ctranslate2"),
    "CTranslate2 int8": (ctranslate2, "int8", ALL, "ctranslate2"),
    "transformers dynamic": (transformers, "dynamic", ALL, "transformers"),
    "transformers static": (transformers, "static", ALL, "transformers"),
}
BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5625}  # of a number of a matrix; beside int4, words have one byte
SAME_WIDTH = {"fp32": "f32", "bf16": "f16", "int8": "q8_0", "int4": "q4_0"}
CLAIMS = [  # ours, theirs, task, target
    *((f"gptworks {ours}", f"llama.cpp {theirs}", task, 1.0) for task in ONE for ours, theirs in SAME_WIDTH.items()),
    ("gptworks fp32", "CTranslate2 float32", "batch 8", 1.5),
    ("gptworks int8", "CTranslate2 int8", "batch 8", 1.5),
    ("gptworks fp32", "transformers dynamic", "batch 1", 1.0),
    ("gptworks fp32", "transformers static", "batch 1", 1.0),
]


def write_models(folder: Path, shape: str, modules: set[str]) -> dict[str, str]:
    """The same weights in everybody's form; module -> why not."""
    cfg = SHAPES[shape]
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(), cfg.num_layers, 1))
    tokenizer = Tokenizer.from_pretrained("gpt2")
    huggingface.save(folder / "hf", cfg, {n: p.detach() for n, p in model.named_parameters()}, eod_id=tokenizer.eod_id)
    tokenizer.save(folder / "hf")
    del model
    # In children: what cannot be written, or dies of it, is left out.
    tried = {name: child_process.run(lambda name=name: FORMS[name](folder), 900) for name in FORMS if name in modules}
    return {name: outcome.failure for name, outcome in tried.items() if outcome.failure}


def write_ctranslate2(folder: Path) -> Iterator[str]:
    from ctranslate2.converters import TransformersConverter

    torch.set_num_threads(1)
    for kind in ("float32", "int8"):
        TransformersConverter(str(folder / "hf")).convert(str(folder / f"ct2-{kind}"), quantization=kind)
        yield kind


def write_llama_cpp(folder: Path) -> Iterator[str]:
    for kind, options in {
        "f32": ["gguf"], "f16": ["gguf", "--dtype", "fp16"], "q8_0": ["gguf-q8_0"], "q4_0": ["gguf-q4_0"]
    }.items():  # fmt: skip
        command = ["-m", "gptworks", "convert", str(folder / "hf"), str(folder / f"{kind}.gguf"), "--to", *options]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        yield kind


FORMS = {"ctranslate2": write_ctranslate2, "llama_cpp": write_llama_cpp}


def work(name: str, folder: Path, threads: int, clock: Callable[[], float]) -> None:
    """A competitor: for each task on standard input one turn; answers seconds and the tokens."""
    torch.set_num_threads(threads)
    cpu.settle()
    make, kind, _, _ = PEERS[name]
    write = make(folder, kind)
    write(prompts_of(TASKS["batch 1"]), 8)
    print("ready", flush=True)
    for line in sys.stdin:
        task = TASKS[line.strip()]
        prompts = prompts_of(task)
        before = clock()
        found = write(prompts, task.new)
        print(json.dumps([clock() - before, found]), flush=True)


def read_speed(threads: int, clock: Callable[[], float]) -> float:
    """GB/s of reading memory that is in no cache."""
    torch.set_num_threads(threads)
    data = torch.ones(128 * 2**20)
    best = 0.0
    for _ in range(7):
        before = clock()
        data.sum()
        best = max(best, data.nbytes / 1e9 / (clock() - before))
    return best


def compare(args: argparse.Namespace, folders: dict[str, Path], left_out: dict[str, str]) -> None:
    command = [sys.executable, __file__, "--threads", str(args.threads), "--clock", args.clock, "--work"]
    racers = {
        f"{shape}: {peer}": (shape, peer)
        for peer in args.only
        for shape in args.shape
        if set(PEERS[peer][2]) & set(args.task)
    }
    commands = {name: [*command, peer, str(folders[shape])] for name, (shape, peer) in racers.items()}
    race = Race({name: line for name, line in commands.items() if name not in left_out}, left_out)
    for task in args.task:
        times: dict[str, list[float]] = {name: [] for name in race.names if task in PEERS[racers[name][1]][2]}
        tokens: dict[str, list[list[int]]] = {}
        speed = read_speed(args.threads, CLOCKS[args.clock])
        for _ in range(args.rounds):
            for name in [name for name in times if name in race.names]:
                if (answer := race.ask(name, task)) is not None:
                    seconds, tokens[name] = json.loads(answer)
                    times[name].append(seconds)
        ratios: dict[str, dict[str, list[float]]] = {}
        for shape in args.shape:
            here = {name: racers[name][1] for name in times if name in race.names and racers[name][0] == shape}
            measured = {peer: times[name] for name, peer in here.items()}
            ratios[shape] = report(task, shape, measured, {peer: tokens[name] for name, peer in here.items()}, speed)
        for shape in args.shape[1:]:
            report_beside(task, shape, ratios[shape], args.shape[0], ratios[args.shape[0]])
    print()
    race.show_left_out()
    race.close()


def bytes_multiplied(cfg: ModelConfig, kind: str) -> float:
    """Of the matrices, the embedding of positions aside."""
    from gptworks.model import GPT

    with torch.device("meta"):
        sizes = {n: p.numel() for n, p in GPT(cfg).named_parameters() if p.ndim == 2 and n != "wpe.weight"}
    words = sum(size for name, size in sizes.items() if name in ("wte.weight", "head.weight"))
    return (sum(sizes.values()) - words) * BYTES[kind] + words * max(BYTES[kind], 1)


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def report_beside(
    task: str, shape: str, ratios: dict[str, list[float]], first: str, those: dict[str, list[float]]
) -> None:
    """Is a shape as good against the others as the first one is? Each round by itself."""
    print(f"\n{task}: the ratios of {shape} divided by those of {first}, target 1.0x")
    for claim in [claim for claim in ratios if claim in those]:
        print(f"  {claim}: {spread([a / b for a, b in zip(ratios[claim], those[claim], strict=True)])}")


def report(
    name: str, shape: str, times: dict[str, list[float]], tokens: dict[str, list[list[int]]], speed: float
) -> dict[str, list[float]]:
    """Prints what was measured; claim -> the ratio of each round."""
    task, cfg = TASKS[name], SHAPES[shape]
    rate = {peer: task.tokens / statistics.median(measured) for peer, measured in times.items()}
    rounds = max((len(measured) for measured in times.values()), default=0)
    print(f"\n{shape}, {name}: prompt of {task.prompt}, {task.new} new, {rounds} rounds, tokens/s")
    bound = {kind: task.batch * speed * 1e9 / bytes_multiplied(cfg, kind) for kind in BYTES}
    if task.new > 1:
        told = ", ".join(f"{kind} {value:,.0f}" for kind, value in bound.items())
        print(f"  memory is read at {speed:.1f} GB/s; the bound of weights read once per step: {told}")
    print(f"  {'':<24}{'median':>8}{'best':>8}{'worst':>8}   same tokens as gptworks fp32")
    for peer, measured in times.items():
        low, high = task.tokens / max(measured), task.tokens / min(measured)
        same = ""
        if "gptworks fp32" in tokens:
            pairs = zip(tokens[peer], tokens["gptworks fp32"], strict=True)
            equal = sum(a == b for mine, ours in pairs for a, b in zip(mine, ours, strict=True))
            same = f"{equal} of {task.batch * task.new}"
        print(f"  {peer:<24}{rate[peer]:>8.1f}{high:>8.1f}{low:>8.1f}   {same}")
    found = {}
    for ours, theirs, at, target in CLAIMS:
        if at == name and ours in rate and theirs in rate:
            ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
            found[f"{ours} / {theirs}"] = ratios
            part = f"; {rate[ours] / bound[ours.split()[1]]:.0%} of the bound" if task.new > 1 else ""
            print(f"  {ours} / {theirs}: {spread(ratios)}, target {target}x{part}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["gpt2"])
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: for one thread on a machine that others use too"
    )
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME")
    parser.add_argument("--folder", type=Path, help="keep the written models here, or use those that are here")
    parser.add_argument("--only-write", action="store_true", help="write the models into --folder and end")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], Path(args.work[1]), args.threads, CLOCKS[args.clock])
        return
    if args.clock == "cpu" and args.threads > 1:
        parser.error("--clock cpu: adds up the seconds of all threads; needs --threads 1")
    print(machine())
    print(f"the shape of {' and of '.join(args.shape)}, {args.threads} threads, seconds of the {args.clock}")
    missing = {
        name: f"{PEERS[name][3]} is not installed"
        for name in args.only
        if importlib.util.find_spec(PEERS[name][3]) is None
    }
    modules = {PEERS[name][3] for name in args.only if name not in missing}
    left_out = {f"{shape}: {name}": why for shape in args.shape for name, why in missing.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {shape: (args.folder or Path(temporary)) / shape for shape in args.shape}
        for shape, folder in folders.items():
            failures = {} if (folder / "hf").exists() else write_models(folder, shape, modules)
            at_fault = {name: failures[PEERS[name][3]] for name in args.only if PEERS[name][3] in failures}
            left_out |= {f"{shape}: {name}": why for name, why in at_fault.items()}
        if args.only_write:
            print(left_out or "written")
            return
        compare(args, folders, left_out)


if __name__ == "__main__":
    main()
