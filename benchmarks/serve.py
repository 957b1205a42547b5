"""Claim: `gptworks serve` writes tokens for many clients at least as fast as llama-server and `transformers serve`.

    python benchmarks/serve.py [--weights int8 fp32] [--clients 1 8 32] [--rounds 3] [--llama-server PATH]
                               [--transformers PATH] [--folder DIR]

GPT-2's 124M shape with random weights, the same for all (llama-server: q8_0 beside int8, f32 beside fp32). Prompts of
32 to 512 tokens, 64 new ones, greedy, streamed, no two prompts alike. Servers are started before and take turns, so
that the noise of the machine meets them alike; each client sends its next request when it has its answer. "engine" is
our scheduler without a server, given the same rows at once: what the server adds is the rest, of time with what the
clients took of the same cores, of processor time alone. A peer whose path is not given, or that does not start, is
named and left out.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from competitors import machine

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.generate.row_request import RowRequest
from gptworks.generate.sampler import rows_of
from gptworks.generate.scheduler import Scheduler
from gptworks.generate.token_reader import reader_of
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

MODEL = ModelConfig()
NEW = 64
SLOTS, CONTEXT = 32, 640  # of every server: the longest prompt, what is new, and some more
START_SECONDS = 180


@dataclass(frozen=True)
class Figures:
    tokens_per_second: float
    first_token: list[float]  # seconds, of each request
    processor_ms: float  # of the server, or of the engine, per token


@dataclass(frozen=True)
class Peer:
    name: str
    port: int
    pid: int
    model: str = "it"
    knows_ignore_eos: bool = True  # random weights hardly ever say it


def texts_of(tokenizer: Tokenizer, number: int, seed: int) -> list[str]:
    """Words of one token each, so that all servers count the same."""
    draw = random.Random(seed)
    words = [i for i in range(tokenizer.vocab_size - 1) if re.fullmatch(r" [a-z]{3,9}", tokenizer.decode([i]))]
    found = []
    while len(found) < number:
        tokens = draw.choices(words, k=draw.randint(32, 512))
        text = tokenizer.decode(tokens)
        if tokenizer.encode(text) == tokens:
            found.append(text)
    return found


_TEXT = re.compile(rb'"(?:text|content)": ?"[^"]')  # of an event that brings some
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


class Asking(asyncio.Protocol):
    """One request and its answer. It looks at as little as it can: who measures shares the cores with the measured."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.answer, self.first = raw, bytearray(), 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.raw)

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if not self.first and _TEXT.search(self.answer):
            self.first = time.perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def ask(peer: Peer, text: str) -> tuple[float, int]:
    """Seconds to the first token, and the number of tokens."""
    body: dict[str, Any] = {"model": peer.model, "max_tokens": NEW, "temperature": 0, "stream": True}
    body |= {"prompt": text, "stream_options": {"include_usage": True}}
    if peer.knows_ignore_eos:
        body["ignore_eos"] = True
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    whole = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    began = time.perf_counter()
    _, asking = await asyncio.get_running_loop().create_connection(lambda: Asking(whole), "127.0.0.1", peer.port)
    await asking.ended
    answer = asking.answer
    if not asking.first or b" 200 " not in answer[:20]:
        raise RuntimeError(f"{peer.name}: no token in its answer: {answer[:300].decode(errors='replace')}")
    usage = _USAGE.findall(answer)
    return asking.first - began, int(usage[-1]) if usage else len(_TEXT.findall(answer))


async def measure(peer: Peer, texts: list[str], clients: int) -> Figures:
    waiting, firsts, tokens = list(texts), list[float](), 0

    async def client() -> None:
        nonlocal tokens
        while waiting:
            first, number = await ask(peer, waiting.pop())
            firsts.append(first)
            tokens += number

    began, worked = time.perf_counter(), processor_seconds(peer.pid)
    await asyncio.gather(*(client() for _ in range(clients)))
    took, worked = time.perf_counter() - began, processor_seconds(peer.pid) - worked
    return Figures(tokens / took, firsts, 1000 * worked / tokens)


def processor_seconds(pid: int) -> float:
    """Of a process and its threads so far; nan where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Engine:
    """The scheduler alone, in this process."""

    def __init__(self, folder: Path, weights: str) -> None:
        self.model = PretrainedGPT.from_pretrained(folder, device="cpu", weights=weights)
        self.reader = reader_of(self.model)
        self.cache = self.model.new_cache(SLOTS, CONTEXT)

    def measure(self, tokenizer: Tokenizer, texts: list[str], clients: int) -> Figures:
        cfg = GenerateConfig(strategy="greedy", max_new_tokens=NEW, ignore_eod=True)
        scheduler = Scheduler(self.reader, self.cache, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id)
        prompts = [tokenizer.encode(text) for text in texts]
        waiting = [RowRequest(row, cfg) for row in rows_of(prompts, [NEW] * len(prompts), cfg)]
        sent: dict[int, float] = {}
        firsts: list[float] = []
        began, worked = time.perf_counter(), time.process_time()
        while waiting or scheduler.has_work:
            while waiting and scheduler.num_active + scheduler.num_waiting < clients:
                request = waiting.pop()
                sent[id(request)] = time.perf_counter()
                scheduler.submit(request)
            before = {id(each) for each in scheduler._active if each.row.tokens}
            active = list(scheduler._active)
            scheduler.step()
            for each in {id(each): each for each in (*active, *scheduler._active)}.values():
                if each.row.tokens and id(each) not in before and id(each) in sent:
                    firsts.append(time.perf_counter() - sent.pop(id(each)))
        tokens, took, worked = len(texts) * NEW, time.perf_counter() - began, time.process_time() - worked
        return Figures(tokens / took, firsts, 1000 * worked / tokens)


# Servers


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def started(name: str, command: list[str], port: int, log: Path) -> Iterator[int]:
    """The number of its process, 0 if it does not answer; ended with the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                        connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
                        if b" 200 " in connection.recv(100):
                            break
                except OSError:
                    pass
                time.sleep(0.3)
            else:
                last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
                print(f"{name}: left out, it does not start: {last[0][:200]}", file=sys.stderr)
                yield 0
                return
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def write_model(folder: Path) -> None:
    tokenizer = Tokenizer.from_pretrained("gpt2")
    fresh = FreshWeights(InitConfig(), MODEL.num_layers, seed=1)
    model = build_gpt(MODEL, World(torch.device("cpu")), torch.float32, fresh)
    huggingface.save(folder / "it", MODEL, dict(model.named_parameters()), eod_id=tokenizer.eod_id)
    tokenizer.save(folder / "it")


def write_gguf(folder: Path, weights: str) -> Path:
    """The same weights as llama.cpp keeps them beside ours."""
    file = folder / f"it-{weights}.gguf"
    kind = {"int8": "gguf-q8_0", "fp32": "gguf"}[weights]
    if not file.exists():
        command = [sys.executable, "-m", "gptworks", "convert", str(folder / "it"), str(file), "--to", kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return file


def ours(folder: Path, weights: str, port: int) -> list[str]:
    model = ["--model", f"it={folder / 'it'}", "--weights", weights, "--device", "cpu"]
    slots = ["--max-batch", str(SLOTS), "--context", str(CONTEXT)]
    return [sys.executable, "-m", "gptworks", "serve", *model, "--port", str(port), *slots]


def llama_server(program: str, folder: Path, weights: str, port: int, threads: int) -> list[str]:
    """What it would keep of former prompts in memory beside its slots is off, as it costs time."""
    place = ["--model", str(write_gguf(folder, weights)), "--host", "127.0.0.1", "--port", str(port)]
    slots = ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT), "--cont-batching", "--cache-ram", "0"]
    return [program, *place, *slots, "--threads", str(threads), "--threads-batch", str(threads)]


def transformers_serve(program: str, model: str, port: int) -> list[str]:
    place = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    return [program, "serve", model, *place, "--continuous-batching"]


def peers_of(args: argparse.Namespace, folder: Path, weights: str, stack: ExitStack) -> list[Peer]:
    """Those that have started."""
    found = []
    for name in ("gptworks", "llama-server", "transformers serve"):
        port, model, is_transformers = free_port(), "it", name == "transformers serve"
        if name == "gptworks":
            command = ours(folder, weights, port)
        elif name == "llama-server" and args.llama_server:
            command = llama_server(args.llama_server, folder, weights, port, args.threads)
        elif is_transformers and args.transformers and weights == "fp32":
            model = str(folder / "it")
            command = transformers_serve(args.transformers, model, port)
        else:
            continue
        if pid := stack.enter_context(started(name, command, port, folder / f"{name}.log")):
            found.append(Peer(name, port, pid, model, knows_ignore_eos=not is_transformers))
    return found


def race(args: argparse.Namespace, folder: Path, tokenizer: Tokenizer, weights: str) -> None:
    with ExitStack() as stack:
        peers = peers_of(args, folder, weights, stack)
        engine = Engine(folder / "it", weights)
        for clients in args.clients:
            found: dict[str, list[Figures]] = {}
            for round_ in range(-1, args.rounds):  # the first is for warming up
                texts = texts_of(tokenizer, max(args.requests, clients), seed=1000 * clients + round_)
                some = texts[:2] if round_ < 0 else texts
                for peer in [*peers, None]:
                    name = peer.name if peer else "engine"
                    figures = (
                        asyncio.run(measure(peer, some, clients)) if peer else engine.measure(tokenizer, some, clients)
                    )
                    if round_ >= 0:
                        found.setdefault(name, []).append(figures)
                        print(
                            f"round {round_ + 1}: {name} {figures.tokens_per_second:.1f}", file=sys.stderr, flush=True
                        )
            show(weights, clients, found)


def show(weights: str, clients: int, found: dict[str, list[Figures]]) -> None:
    ours = statistics.median(each.tokens_per_second for each in found["gptworks"])
    for name, rounds in found.items():
        rates = sorted(each.tokens_per_second for each in rounds)
        rate = statistics.median(rates)
        firsts = sorted(first for each in rounds for first in each.first_token)
        p50, p95 = firsts[len(firsts) // 2], firsts[int(len(firsts) * 0.95)]
        print(
            f"{weights} {clients:>2} clients  {name:<18} {rate:7.1f} tokens/s ({rates[0]:.1f} to {rates[-1]:.1f})  "
            f"first token p50 {p50:.2f} s, p95 {p95:.2f} s  gptworks is {ours / rate:.2f}x  "
            f"{statistics.median(each.processor_ms for each in rounds):.2f} ms of processor time a token",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=["int8", "fp32"], choices=["int8", "fp32"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=32, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", metavar="DIR", help="keep the models there, for the next run")
    parser.add_argument("--llama-server", metavar="PATH", help="the program, built from llama.cpp's sources")
    parser.add_argument("--transformers", metavar="PATH", help="the command, with what `transformers serve` needs")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as work:
        folder = Path(args.folder or work)
        if not (folder / "it").exists():
            write_model(folder)
        tokenizer = Tokenizer.from_pretrained("gpt2")
        for weights in args.weights:
            race(args, folder, tokenizer, weights)


if __name__ == "__main__":
    main()
