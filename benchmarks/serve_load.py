"""Claim: under load and abuse `gptworks serve` loses no request, answers none wrongly, and does not grow.

    python benchmarks/serve_load.py --model runs/quickstart [--requests 10000] [--clients 64] [--minutes 20]

Starts a server on loopback and asks it 200 prompts one at a time: these are the answers alone. Then many clients ask at
once. A third of the requests are cancelled half-way, no JSON, too large, or sent in drops; every other one must get the
answer that it gets alone. At the end the server must be empty, with as many descriptors as at the beginning, and its
memory about what it was after the first fifth. Exit code 1 where any of this is not so.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from competitors import machine

KINDS = ("whole", "stream", "cancelled", "malformed", "oversized", "slow")
WEIGHTS = (4, 4, 1, 1, 1, 1)  # a third is abuse
NUM_PROMPTS = 200
GROWTH = 64 << 20  # bytes by which memory may differ: what the allocator keeps


@dataclass
class Tally:
    """What came of all requests."""

    answers: list[str]  # alone, by prompt
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def expect(self, is_so: bool, what: str) -> None:
        if not is_so:
            self.wrong.append(what)


def prompts_of(number: int, seed: int = 5) -> list[dict[str, Any]]:
    """Many begin alike, some are long, some draw."""
    draw = random.Random(seed)
    beginning = [draw.randrange(200) for _ in range(40)]
    bodies = []
    for each in range(number):
        tokens = [draw.randrange(200) for _ in range(draw.randint(1, 30))]
        prompt = [*beginning[: draw.randint(8, 40)], *tokens] if draw.random() < 0.5 else tokens
        drawing = {"temperature": 0} if draw.random() < 0.5 else {"temperature": 0.8, "top_k": 20, "seed": each}
        bodies.append({"prompt": prompt, "max_tokens": draw.randint(1, 24), **drawing})
    return bodies


def packed(body: bytes, size: int | None = None) -> bytes:
    length = len(body) if size is None else size
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body


def parsed(raw: bytes) -> tuple[int, str]:
    """Status, and the text of the answer, whether in one piece or streamed in chunks."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head:
        return 0, ""
    if b"chunked" in head.lower():
        body = b"".join(re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", body))
    status = int(head.split()[1])
    if b"text/event-stream" in head:
        events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: ")]
        is_whole = bool(events) and events[-1].strip() == b"[DONE]"
        texts = [choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        return status if is_whole else 0, "".join(texts)
    found = json.loads(body)
    return status, found["choices"][0]["text"] if status == 200 else found["error"]["type"]


async def request(port: int, kind: str, body: dict[str, Any], draw: random.Random) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if kind == "malformed":
            writer.write(packed(draw.choice([b"{", b"[]", b'{"prompt": 5}', b"\xff\xff", b'{"prompt": "a", "n": -1}'])))
        elif kind == "oversized":
            writer.write(packed(b"x" * 1000, size=50 << 20))
        elif kind == "slow":
            whole = packed(json.dumps(body).encode())
            for begin in range(0, len(whole), 40):
                writer.write(whole[begin : begin + 40])
                await writer.drain()
                await asyncio.sleep(draw.random() * 0.02)
        else:
            is_streamed = kind == "stream" or (kind == "cancelled" and draw.random() < 0.5)
            writer.write(packed(json.dumps({**body, "stream": is_streamed}).encode()))
        await writer.drain()
        if kind == "cancelled":
            await asyncio.sleep(draw.random() * 0.2)
            return 0, ""
        return parsed(await reader.read())
    finally:
        writer.close()


async def client(port: int, bodies: list[dict[str, Any]], waiting: list[int], tally: Tally) -> None:
    while waiting:
        number = waiting.pop()
        draw = random.Random(number)
        kind, prompt = draw.choices(KINDS, WEIGHTS)[0], draw.randrange(len(bodies))
        began = time.monotonic()
        try:
            status, text = await request(port, kind, bodies[prompt], draw)
            while status == 429:  # the queue is full: come again, as the answer says
                tally.done["come again"] += 1
                await asyncio.sleep(0.2 + draw.random())
                status, text = await request(port, kind, bodies[prompt], draw)
        except OSError as error:
            tally.expect(kind == "oversized", f"{kind} {number}: {error}")  # refused before all of it was sent
            status, text = 413, "invalid_request_error"
        tally.done[kind] += 1
        if kind == "cancelled":
            continue
        expected = {"malformed": (400, "invalid_request_error"), "oversized": (413, "invalid_request_error")}
        wanted = expected.get(kind, (200, tally.answers[prompt]))
        tally.expect((status, text) == wanted, f"{kind} {number}: got {status} {text!r}, alone {wanted!r}")
        if kind in ("whole", "stream"):
            tally.seconds.append(time.monotonic() - began)


def of_process(pid: int) -> tuple[int, int]:
    """Resident bytes and open descriptors."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def load(port: int, pid: int, args: argparse.Namespace) -> int:
    bodies = prompts_of(NUM_PROMPTS)
    answers = []
    for body in bodies:
        status, text = await request(port, "whole", body, random.Random(0))
        assert status == 200, text
        answers.append(text)
    tally = Tally(answers)
    _, descriptors = of_process(pid)
    first, rest = args.requests // 5, args.requests - args.requests // 5
    memory = 0
    began = time.monotonic()
    for begin, count in ((0, first), (first, rest)):
        waiting = list(range(begin, begin + count))
        await asyncio.gather(*(client(port, bodies, waiting, tally) for _ in range(args.clients)))
        memory = memory or of_process(pid)[0]
    elapsed = time.monotonic() - began
    await asyncio.sleep(1.0)  # the last that were cancelled leave
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    metrics = (await reader.read()).decode()
    writer.close()
    for name in ("gptworks_running_rows", "gptworks_waiting_rows"):
        tally.expect(bool(re.search(rf"^{name}\{{.*\}} 0$", metrics, re.MULTILINE)), f"{name} is not 0 at the end")
    await asyncio.sleep(0.5)
    memory_after, descriptors_after = of_process(pid)
    tally.expect(memory_after - memory < GROWTH, f"memory grew from {memory:,} to {memory_after:,} bytes")
    tally.expect(descriptors_after <= descriptors, f"descriptors: {descriptors} before, {descriptors_after} after")
    tally.seconds.sort()
    print(machine())
    print(f"{args.requests} requests from {args.clients} clients in {elapsed:.0f} s: {dict(tally.done)}")
    print(
        f"seconds of an answer: p50 {tally.seconds[len(tally.seconds) // 2]:.2f}, "
        f"p95 {tally.seconds[int(len(tally.seconds) * 0.95)]:.2f}"
    )
    print(
        f"memory {memory / 1e6:.0f} MB after a fifth, {memory_after / 1e6:.0f} MB at the end; "
        f"descriptors {descriptors} and {descriptors_after}"
    )
    print(f"lost or wrong: {len(tally.wrong)}", *tally.wrong[:10], sep="\n  ")
    return 1 if tally.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=20, help="it ends then, in any case")
    parser.add_argument("--weights", default="fp32")
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "gptworks",
        "serve",
        "--model",
        f"it={args.model}",
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    server = subprocess.Popen([*command, "--weights", args.weights], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = None
        while found is None:
            line = server.stdout.readline()
            if not line:
                return 2
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        return asyncio.run(asyncio.wait_for(load(int(found[1]), server.pid, args), args.minutes * 60))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
