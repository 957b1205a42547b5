"""A small model behind a real server on loopback, in a thread of this process."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.serve import http_server
from gptworks.serve.app import application
from gptworks.serve.served_model import LoadOptions, load
from gptworks.serve.service import Limits, Service

CONTEXT = 96
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[a] {% endif %}"
)


def write_model(folder: Path, tokenizer: Any, *, seed: int = 4, template: str | None = None) -> Path:
    cfg = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=520, max_positions=CONTEXT)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.2), 2, seed=seed))
    huggingface.save(folder, cfg, dict(model.named_parameters()), eod_id=tokenizer.eod_id)
    tokenizer.save(folder)
    if template is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return folder


@pytest.fixture(scope="session")
def base_folder(small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("serve") / "base", small_tokenizer)


@pytest.fixture(scope="session")
def chat_folder(small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("serve") / "chat", small_tokenizer, seed=5, template=TEMPLATE)


@dataclass
class Served:
    """A running server and how to ask it without any client library."""

    port: int
    service: Service
    server: http_server.Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, body: Any = None, *, method: str = "", headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text) and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            kind = {"content-type": "application/json"} if raw is not None else {}
            connection.request(method or ("POST" if raw is not None else "GET"), path, raw, kind | (headers or {}))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        is_json = found.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text.decode(), found

    def complete(self, **body: Any) -> Any:
        status, answer, _ = self.ask("/v1/completions", body)
        assert status == 200, answer
        return answer

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.drain)
        self.thread.join()


@contextmanager
def running(models: dict[str, Path], *, limits: Limits | None = None, **options: Any) -> Iterator[Served]:
    how = {key: options.pop(key) for key in ("weights", "max_batch", "context") if key in options}
    loaded = (load(name, str(folder), LoadOptions(device="cpu", **how)) for name, folder in models.items())
    service = Service(loaded, limits or Limits())
    server = http_server.Server(application(service, **options), service)
    bound = http_server.bind("127.0.0.1", 0)
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        ready.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    ready.wait()
    served = Served(bound.getsockname()[1], service, server, loops[0], thread)
    try:
        yield served
    finally:
        if thread.is_alive():
            served.stop()
        bound.close()


@pytest.fixture(scope="session")
def serving() -> Callable[..., Any]:
    return running


@pytest.fixture(scope="module")
def served(base_folder: Path, chat_folder: Path) -> Iterator[Served]:
    with running({"base": base_folder, "chat": chat_folder}, max_batch=8) as found:
        yield found
