"""Who joins, goes away, waits too long or comes too late; new checkpoints; the command line."""

import asyncio
import contextlib
import gc
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gptworks
from gptworks.cli.main import main
from gptworks.serve import http_server
from gptworks.serve.served_model import LoadOptions
from gptworks.serve.service import Limits

LONG = {"model": "base", "prompt": "The", "max_tokens": 90, "ignore_eos": True, "temperature": 0}


class Steps:
    """Holds the engine still, so that something can be done between two of its steps however long that takes."""

    def __init__(self) -> None:
        self._is_held = False
        self._permits = threading.Semaphore(0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._permits = threading.Semaphore(0)
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._permits.release()  # whoever waits for one

    def allow(self, number: int) -> None:
        for _ in range(number):
            self._permits.release()

    def before(self) -> None:
        if self._is_held:
            self._permits.acquire()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    from gptworks.generate.scheduler import Scheduler

    control, step = Steps(), Scheduler.step

    def controlled(self: Scheduler) -> Any:
        control.before()
        return step(self)

    monkeypatch.setattr(Scheduler, "step", controlled)
    return control


def metric(served: Any, name: str) -> float:
    status, text, headers = served.ask("/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{name}(\{{| )", line))


def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.005)


@pytest.fixture
def begin() -> Iterator[Callable[..., socket.socket]]:
    """Sends a request whose answer nobody has read yet. A test that fails leaves no connection to the next."""
    with contextlib.ExitStack() as opened:
        yield lambda served, body: opened.enter_context(_begun(served, body))


def _begun(served: Any, body: dict[str, Any]) -> socket.socket:
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


def answer_on(connection: socket.socket) -> tuple[int, str]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(
    base_folder: Path, serving: Callable[..., Any], begin: Any, steps: Steps, stream: bool
) -> None:
    with serving({"base": base_folder}, max_batch=1) as served:
        scheduler = served.service.models["base"].scheduler
        with steps.held():
            quitter = begin(served, {**LONG, "stream": stream})
            steps.allow(5)
            wait_until(lambda: scheduler.counts.drawn == 5)
            (row,) = scheduler._active
            if stream:
                assert quitter.recv(13) == b"HTTP/1.1 200 "
            quitter.close()
            wait_until(lambda: row.is_cancelled)
        answer = served.complete(**{**LONG, "max_tokens": 2})
        assert answer["usage"]["completion_tokens"] == 2
        assert row.finish == "cancelled" and scheduler.counts.drawn == 5 + 2
        assert 'gptworks_rows_total{finish="cancelled"} 1' in served.ask("/metrics")[1]
        assert served.service.num_rows == 0


def test_a_full_queue_says_when_to_come_again(
    base_folder: Path, serving: Callable[..., Any], begin: Any, steps: Steps
) -> None:
    with serving({"base": base_folder}, limits=Limits(max_queue=2), max_batch=1) as served:
        scheduler = served.service.models["base"].scheduler
        with steps.held():
            waiting = []
            for number in range(3):
                waiting.append(begin(served, LONG))
                wait_until(lambda number=number: served.service.num_rows == number + 1)
            steps.allow(1)
            wait_until(lambda: scheduler.counts.drawn == 1)  # the first has its place
            status, body, headers = served.ask("/v1/completions", LONG)
            assert status == 429 and headers["retry-after"] == "1" and body["error"]["code"] == "queue_full"
            assert "3 rows" in body["error"]["message"] and metric(served, "gptworks_waiting_rows") == 2
            (_, gone) = (row for rows in scheduler._waiting.values() for row in rows)
            waiting.pop().close()  # one that waits gives up: there is room again
            wait_until(lambda: gone.is_cancelled)
            steps.allow(1)
            wait_until(lambda: served.service.num_rows == 2)
            assert gone.finish == "cancelled" and scheduler.num_active == 1
            joining = begin(served, LONG)
            wait_until(lambda: served.service.num_rows == 3)
        for connection in (*waiting, joining):
            status, text = answer_on(connection)
            assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 90


def test_a_request_has_a_deadline(base_folder: Path, serving: Callable[..., Any], begin: Any, steps: Steps) -> None:
    with serving({"base": base_folder}, limits=Limits(timeout=0.2), max_batch=1) as served:
        with steps.held():
            waiting = begin(served, LONG)
            wait_until(lambda: served.service.num_rows == 1)
            time.sleep(0.25)
        status, text = answer_on(waiting)
        assert status == 504 and json.loads(text)["error"]["type"] == "timeout_error"
    with serving({"base": base_folder}, max_batch=1) as served:
        scheduler = served.service.models["base"].scheduler
        with steps.held():
            begun = begin(served, {**LONG, "stream": True})
            steps.allow(20)
            wait_until(lambda: scheduler.counts.drawn == 20)
            answer = http.client.HTTPResponse(begun)
            answer.begin()
            (row,) = scheduler._active
            row.deadline = time.monotonic() - 1  # the default is ten minutes
        status, text = answer.status, answer.read().decode()
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
        assert status == 200 and events[-1]["error"]["type"] == "timeout_error" and events[0]["choices"]


def test_what_runs_is_finished_and_what_is_new_refused(
    base_folder: Path, serving: Callable[..., Any], begin: Any, steps: Steps
) -> None:
    with serving({"base": base_folder}, max_batch=1) as served:
        expected = served.complete(**LONG)["choices"][0]["text"]
        with steps.held():
            running = [begin(served, LONG) for _ in range(2)]  # one of them still waits for its place
            wait_until(lambda: served.service.num_rows == 2)
            served.loop.call_soon_threadsafe(served.server.drain)
            wait_until(lambda: served.service.is_draining)
            status, body, headers = served.ask("/v1/completions", LONG)
            assert status == 503 and headers["retry-after"] and "being stopped" in body["error"]["message"]
            assert served.ask("/health")[0] == 503
        for connection in running:
            status, text = answer_on(connection)
            assert status == 200 and json.loads(text)["choices"][0]["text"] == expected
        served.thread.join()


def test_a_shared_beginning_is_read_once(base_folder: Path, serving: Callable[..., Any]) -> None:
    with serving({"base": base_folder}, max_batch=4) as served:
        beginning = list(range(10, 70))
        alone = [
            served.complete(model="base", prompt=[*beginning, i], temperature=0)["choices"][0]["text"] for i in (1, 2)
        ]
        assert metric(served, "gptworks_prefix_cache_tokens_total") == 60
        assert metric(served, "gptworks_prompt_tokens_total") == 61 + 1
    with serving({"base": base_folder}, max_batch=1) as fresh:
        again = fresh.complete(model="base", prompt=[*beginning, 2], temperature=0)["choices"][0]["text"]
    assert alone[1] == again


def test_metrics_count_what_was_done(base_folder: Path, serving: Callable[..., Any]) -> None:
    with serving({"base": base_folder}, max_batch=4) as served:
        served.complete(model="base", prompt=["The", "A"], temperature=0, max_tokens=5, ignore_eos=True)
        served.ask("/v1/completions", b"{")
        served.ask("/v1/" + "x" * 50)
        served.ask("/v1/completions", {**LONG, "stream": True})
        assert metric(served, "gptworks_generated_tokens_total") == 2 * 5 + 90
        assert metric(served, "gptworks_time_to_first_token_seconds_count") == 1
        assert metric(served, "gptworks_batch_size_count") >= 90
        assert metric(served, "gptworks_slots") == 4 and metric(served, "gptworks_running_rows") == 0
        text = served.ask("/metrics")[1]
        assert 'gptworks_requests_total{path="/v1/completions",status="200"} 2' in text
        assert 'gptworks_requests_total{path="/v1/completions",status="400"} 1' in text
        assert 'gptworks_requests_total{path="other",status="404"} 1' in text
        assert 'gptworks_rows_total{finish="length"} 3' in text
        for line in text.splitlines():
            assert line.startswith("# ") or re.fullmatch(
                r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [\d.e+-]+', line
            )


def test_a_new_checkpoint_is_served_while_the_old_one_finishes(
    serving: Callable[..., Any],
    tmp_path: Path,
    small_store: Path,
    begin: Any,
    steps: Steps,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, said = tmp_path / "run", []
    command = [f"data.path={small_store}", "data.seq_len=32", "model.num_layers=1", "model.hidden_size=32"]
    command += ["model.num_heads=2", "model.vocab_size=512", "model.max_positions=96", "batch.global_size=4"]
    command += ["run.device=cpu", "evaluate.every=0", "train.steps=2", "--out", str(run)]
    assert main(["train", *command]) == 0
    with serving({"run": run}, max_batch=2) as served:
        assert served.ask("/v1/models/run")[1]["gptworks"]["step"] == 2
        body = {**LONG, "model": "run", "max_tokens": 60}
        expected = served.complete(**body)["choices"][0]["text"]
        following = asyncio.run_coroutine_threadsafe(
            http_server.follow(served.service, LoadOptions(device="cpu", max_batch=2), every=0.05), served.loop
        )
        former = weakref.ref(served.service.models["run"].model)
        further = ["train.steps=4", "optim.lr=0.05", "--resume", "auto"]
        with steps.held():
            running = begin(served, body)
            wait_until(lambda: served.service.num_rows == 1)
            steps.allow(3)
            assert main(["train", "-c", str(run / "config.yaml"), *further]) == 0
            wait_until(lambda: served.ask("/v1/models/run")[1]["gptworks"]["step"] == 4)
        status, text = answer_on(running)
        assert status == 200 and json.loads(text)["choices"][0]["text"] == expected  # by the weights that it began with
        wait_until(lambda: gc.collect() >= 0 and former() is None)  # its memory is given back
        (now,) = gptworks.generate(
            gptworks.GPT.from_pretrained(run), "The", strategy="greedy", max_new_tokens=60, ignore_eod=True
        )
        assert served.complete(**body)["choices"][0]["text"] == now != expected
        # Gone, all at once, so that step 2 is never the newest: the one that is loaded goes on.
        (run / "checkpoints").rename(tmp_path / "gone")
        time.sleep(0.2)
        assert served.complete(**body)["choices"][0]["text"] == now and not following.done()
        # There is a newer one, and it is damaged; what is no error of ours is in the way of another.
        (tmp_path / "gone").rename(run / "checkpoints")
        newer = shutil.copytree(run / "checkpoints" / "step-00000004", run / "checkpoints" / "step-00000006")
        (newer / "manifest.json").write_bytes(b"\0")
        capsys.readouterr()
        wait_until(lambda: "stays at" in (told := capsys.readouterr().err) and not said.append(told))
        monkeypatch.setattr(http_server, "checkpoint_of", lambda _: 1 / 0)
        wait_until(lambda: "ZeroDivisionError" in (told := capsys.readouterr().err) and not said.append(told))
        time.sleep(0.3)
        assert capsys.readouterr().err == "", "each is said once"
        assert "run stays at step-00000004: " in said[0] and "manifest.json: not a manifest" in said[0]
        assert served.complete(**body)["choices"][0]["text"] == now and not following.done()
        following.cancel()


def test_generate_asks_a_server(served: Any, base_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--strategy", "greedy"], ["--seed", "5", "--num-return-sequences", "2"], ["--stream", "--seed", "6"]):
        settings = ["--prompt", "The river", "--max-new-tokens", "20", *more]
        assert main(["generate", "--model", str(base_folder), *settings]) == 0
        here = capsys.readouterr().out
        assert main(["generate", "--server", served.url, "--model", "base", *settings]) == 0
        assert capsys.readouterr().out == here
    assert main(["generate", "--model", str(base_folder), "--prompt", "The", "--strategy", "greedy", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert (
        main(
            [
                "generate",
                "--server",
                f"{served.url}/v1",
                "--model",
                "base",
                "--prompt",
                "The",
                "--strategy",
                "greedy",
                "--json",
            ]
        )
        == 0
    )
    there = json.loads(capsys.readouterr().out)
    assert there["tokens"] == here["tokens"] and there["finish"] == here["finish"]
    assert there["logprobs"] == pytest.approx(here["logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "{url}", "--model", "other"], "no model 'other'"),
        (["--server", "{url}", "--model", "base", "--max-new-tokens", "100"], "context of base is 96"),
        (["--server", "{url}", "--model", "base", "--num-beams", "4", "--strategy", "beam"], "--num-beams 4 cannot"),
        (["--server", "http://127.0.0.1:9"], "cannot be reached"),
        (["--server", "127.0.0.1:9"], "needs an address such as http://"),
        (["--server", "{url}", "--weights", "int8"], "--weights int8: not with --server"),
        (["--server", "{url}", "--device", "cpu"], "--device cpu: not with --server"),
        (["--server", "{url}", "--tokenizer", "gpt2"], "--tokenizer gpt2: not with --server"),
        (["--server", "{url}", "--engine", "llama.cpp"], "--engine llama.cpp: not with --server"),
        (["--server", "{url}", "-o", "model.num_heads=2"], "--override model.num_heads=2: not with --server"),
    ],
)
def test_what_a_server_refuses_is_told(
    served: Any, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    given = [option.format(url=served.url) for option in options]
    assert main(["generate", *given, "--prompt", "The"]) == 2
    assert words in capsys.readouterr().err


def test_the_address_is_told_when_it_can_be_reached(
    base_folder: Path,
    serving: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url_of = http_server.url_of

    def reached(bound: socket.socket) -> str:
        socket.create_connection(bound.getsockname()).close()  # refused where nobody listens
        return url_of(bound)

    monkeypatch.setattr(http_server, "url_of", reached)
    with serving({"base": base_folder}, max_batch=1) as served:
        assert capsys.readouterr().out == f"gptworks serve: {served.url}/v1\n"


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(base_folder: Path, begin: Any) -> None:
    command = [
        sys.executable,
        "-m",
        "gptworks",
        "serve",
        "--model",
        f"a={base_folder}",
        "--port",
        "0",
        "--max-batch",
        "2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline() for _ in range(2)]
            assert re.search(r"a: 0\.1M parameters in fp32; places for 2 rows of 96 tokens, at most 0\.00 GB", lines[0])
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", lines[1])
            assert found
            connection = begin(type("At", (), {"port": int(found[1])}), {**LONG, "model": "a", "max_tokens": 80})
            server.send_signal(signal.SIGTERM)
            answer = json.loads(answer_on(connection)[1])
            _, errors = server.communicate()
        finally:
            server.kill()
    # The signal may come before the request has: then it is refused in so many words.
    assert "choices" in answer or "being stopped" in answer["error"]["message"]
    assert server.returncode == 0 and "Traceback" not in errors


def test_generate_needs_a_model_or_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--prompt", "The"])
    assert ended.value.code == 2
    assert re.search(r"no model\. Needed: --model DIR, .*, or --server URL\.", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key FILE, or --open"),
        (["--max-batch", "0"], "--max-batch 0: needs 1 or more"),
        (["--api-key", "/nowhere/keys"], "cannot be read"),
        (["--context", "97"], "has 96 positions"),
        # Who says so may listen elsewhere: what is refused is the next mistake.
        (["--host", "0.0.0.0", "--open", "--context", "97"], "has 96 positions"),
        (["--host", "0.0.0.0", "--api-key", "{keys}", "--context", "97"], "has 96 positions"),
    ],
)
def test_what_serve_refuses(
    base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    (tmp_path / "keys").write_text("a-key-of-16-letters-or-more\n")
    given = [option.format(keys=tmp_path / "keys") for option in options]
    assert main(["serve", "--model", str(base_folder), "--port", "0", *given]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_small_answers_are_sent_at_once(host: str) -> None:
    """Else each answer on a connection that is used again waits 40 ms: asyncio sets TCP_NODELAY by the protocol."""

    async def has_no_delay() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        with http_server.bind(host, 0) as bound:
            async with await asyncio.start_server(connected, sock=bound):
                _, writer = await asyncio.open_connection(*bound.getsockname()[:2])
                answer = await found
                writer.close()
        return answer

    assert asyncio.run(has_no_delay())
