"""Everything that is refused: an error object with the right status, and never a stack trace."""

import hmac
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gptworks.errors import UsageError
from gptworks.serve import guard, http_server
from gptworks.serve.served_model import LoadOptions, load, named_sources
from gptworks.serve.service import Limits

FINE = {"model": "base", "prompt": "The", "max_tokens": 2}


def refused(answer: tuple[int, Any, dict[str, str]], status: int) -> dict[str, Any]:
    found, body, _ = answer
    assert found == status, body
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (b"[" * 100_000, None, "nested too deep"),
        (b"[1]", None, "list instead of an object"),
        ({}, "prompt", "missing"),
        ({**FINE, "model": "other"}, "model", "no model 'other'. Models: base, chat"),
        ({**FINE, "model": None}, "model", "Models: base, chat"),
        ({**FINE, "prompt": ""}, "prompt", "empty"),
        ({**FINE, "prompt": []}, "prompt", "needs a text"),
        ({**FINE, "prompt": [[]]}, "prompt", "needs a text"),
        ({**FINE, "prompt": ["a", 5]}, "prompt", "needs a text"),
        ({**FINE, "prompt": [520]}, "prompt", "token 520 is not in the vocabulary"),
        ({**FINE, "prompt": [-1]}, "prompt", "needs a text"),
        ({**FINE, "prompt": "\ud800"}, "prompt", "prompt"),
        ({**FINE, "prompt": "x y " * 500}, "prompt", "Shorten the prompt"),
        ({**FINE, "prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({**FINE, "max_tokens": 0}, "max_tokens", "got 0"),
        ({**FINE, "max_tokens": -1}, "max_tokens", "got -1"),
        ({**FINE, "max_tokens": 10**30}, "max_tokens", "at most 9"),
        ({**FINE, "max_tokens": True}, "max_tokens", "got True"),
        ({**FINE, "temperature": -0.5}, "temperature", "got -0.5"),
        ({**FINE, "temperature": "hot"}, "temperature", "got 'hot'"),
        (b'{"model": "base", "prompt": "a", "temperature": NaN}', "temperature", "got nan"),
        (b'{"model": "base", "prompt": "a", "temperature": 1e999}', "temperature", "got inf"),
        ({**FINE, "top_p": 1.5}, "top_p", "1.5"),
        ({**FINE, "top_k": 513}, "top_k", "above the vocabulary (512 tokens)"),
        ({**FINE, "n": 0}, "n", "got 0"),
        ({**FINE, "n": 1000}, "n", "got 1000"),
        ({**FINE, "prompt": ["a"] * 100, "n": 2}, "n", "at most 128 in a call"),
        ({**FINE, "n": 3, "best_of": 2}, "best_of", "at least n"),
        ({**FINE, "best_of": 3, "stream": True}, "best_of", "cannot be streamed"),
        ({**FINE, "best_of": 3, "temperature": 0}, "best_of", "one text only"),
        ({**FINE, "stop": ["x"] * 17}, "stop", "at most 16"),
        ({**FINE, "stop": ""}, "stop", "got ''"),
        ({**FINE, "stop": "x" * 1001}, "stop", "1 to 1000 characters"),
        ({**FINE, "seed": -1}, "seed", "got -1"),
        ({**FINE, "logprobs": 21}, "logprobs", "got 21"),
        ({**FINE, "logit_bias": {"x": 1}}, "logit_bias", "x:1"),
        ({**FINE, "logit_bias": {"512": 1}}, "logit_bias", "token 512 is not in the vocabulary"),
        ({**FINE, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({**FINE, "suffix": "end"}, "suffix", "got 'end'"),
        ({**FINE, "min_tokens": 5}, "min_tokens", "min_tokens: 5"),
        ({**FINE, "tempreature": 1}, "tempreature", "Unknown field 'tempreature'. Known: model, temperature"),
        ({**FINE, "stream_options": {"x": 1}}, "stream_options", "got 1"),
        ({**FINE, "logit_bias": {str(i): float("-1e29") for i in range(512)} | {"3": -1e29}}, None, None),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(served: Any, body: Any, param: str | None, words: str | None) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = served.ask("/v1/completions", raw)
    if words is None:
        assert answer[0] == 200
        return
    error = refused(answer, 400)
    assert words in error["message"] and error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"model": "chat"}, "messages", "missing"),
        ({"model": "chat", "messages": []}, "messages", "at least 1"),
        ({"model": "chat", "messages": [{"content": "x"}]}, "messages", "got"),
        ({"model": "chat", "messages": ["x"]}, "messages", "got 'x'"),
        (
            {"model": "chat", "messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
            "top_logprobs",
            "logprobs",
        ),
        ({"model": "chat", "messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools", "at most 0"),
        ({"model": "chat", "messages": [{"role": "user", "content": "x " * 200}]}, "prompt", "Shorten"),
    ],
)
def test_a_bad_chat_is_told_what_is_wrong(served: Any, body: Any, param: str, words: str) -> None:
    error = refused(served.ask("/v1/chat/completions", body), 400)
    assert words in error["message"] and error["param"] == param


def test_addresses_methods_and_types(served: Any) -> None:
    unknown = refused(served.ask("/v1/nothing"), 404)["message"]
    assert "/v1/nothing. Needed: one of /v1/chat/completions, /v1/completions, /v1/models." in unknown
    for path in ("/completions", "/v1/completions/"):
        assert "Did you mean /v1/completions?" in refused(served.ask(path, FINE), 404)["message"]
    refused(served.ask("/../../etc/passwd"), 404)
    refused(served.ask("/v1/models/../../etc/passwd"), 404)
    assert "GET is not for /v1/completions. Needed: POST." in refused(served.ask("/v1/completions"), 405)["message"]
    kind = {"content-type": "text/plain"}  # what a page of elsewhere can make a browser send
    assert "application/json" in refused(served.ask("/v1/completions", FINE, headers=kind), 415)["message"]
    refused(served.ask("/tokenize", {"model": "base"}), 400)
    refused(served.ask("/detokenize", {"model": "base", "tokens": [9999]}), 400)


def test_another_name_for_this_machine_is_refused(served: Any) -> None:
    """Whoever owns a name can let it point here, and then a page of his may ask."""
    refused(served.ask("/v1/models", headers={"host": "evil.example"}), 403)
    for name in ("localhost", "127.0.0.1:8000", "[::1]:80"):
        assert served.ask("/v1/models", headers={"host": name})[0] == 200


def test_no_page_of_elsewhere_may_read_answers(served: Any, base_folder: Path, serving: Callable[..., Any]) -> None:
    origin = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in served.ask("/v1/models", headers=origin)[2]
    with serving({"base": base_folder}, origins=["https://a.example"], max_batch=1) as other:
        assert other.ask("/v1/models", headers=origin)[2]["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in other.ask("/v1/models", headers={"origin": "https://b.example"})[2]


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_p": 1e-300},
        {"typical_p": 1e-300},
        {"min_p": 1e-300},
        {"temperature": 1e-5, "presence_penalty": -1e36, "ignore_eos": True},
        {"temperature": 1e300, "min_tokens": 2},
    ],
)
def test_numbers_at_the_ends_of_their_ranges(served: Any, extreme: dict[str, Any]) -> None:
    """What one row asks for must not become a fault, which ends all rows of the step."""
    assert served.complete(**FINE, **extreme)["choices"][0]["finish_reason"]


# Files


_opened: list[str] | None = None


def _note_opened(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event in ("open", "os.listdir", "os.scandir"):
        _opened.append(str(args[0]))


def test_nothing_in_a_request_is_taken_for_a_file(served: Any, tmp_path: Path) -> None:
    """Whatever this process opens while it answers, no name of it comes from a client."""
    global _opened
    secret = tmp_path / "secret-7351"
    secret.write_text("do not read")
    names = [str(secret), f"file://{secret}", f"../../../..{secret}"]
    sys.addaudithook(_note_opened)  # cannot be taken away again; it does nothing between
    _opened = []
    try:
        for name in names:
            for field in ("model", "prompt", "stop", "user", "suffix"):
                served.ask("/v1/completions", {**FINE, field: name})
            message = {"role": "user", "content": name, "name": name}
            for more in ({}, {"model": name}, {"tools": [{"path": name}]}, {"metadata": {"path": name}}):
                served.ask("/v1/chat/completions", {"model": "chat", "messages": [message], "max_tokens": 2, **more})
            served.ask("/tokenize", {"model": name, "prompt": name})
            served.ask("/v1/models/" + quote(name))
            served.ask(quote("/" + name))
            served.ask("/metrics?file=" + quote(name), headers={"x-file": name})
        seen = list(_opened)
        secret.read_text()
        assert str(secret) in _opened  # the hook sees what is opened
    finally:
        _opened = None
    assert not [name for name in seen if "secret-7351" in name]


# Keys


def test_every_key_is_compared_in_constant_time(
    base_folder: Path, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the place of the key in the file nor how much of it is right can be told from the time."""
    compared, compare = list[tuple[bytes, bytes]](), hmac.compare_digest

    def noting(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return compare(given, known)

    monkeypatch.setattr(guard.hmac, "compare_digest", noting)
    keys = [b"first-key-0123456789", b"second-key-0123456789"]
    with serving({"base": base_folder}, keys=keys, max_batch=1) as served:
        for given, status in ((keys[0], 200), (b"first-key-", 401)):
            compared.clear()
            header = {"authorization": f"Bearer {given.decode()}"}
            assert served.ask("/v1/models", headers=header)[0] == status
            assert compared == [(given, keys[0]), (given, keys[1])]


def test_keys(base_folder: Path, serving: Callable[..., Any], tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# Anna\nfirst-key-0123456789\n\nsecond-key-0123456789\n")
    with serving({"base": base_folder}, keys=guard.read_keys(str(file)), max_batch=1) as served:
        for key in ("first-key-0123456789", "second-key-0123456789"):
            assert served.ask("/v1/models", headers={"authorization": f"Bearer {key}"})[0] == 200
        for wrong in ("Bearer first-key-012345678", "Bearer ", "first-key-0123456789", "Basic first-key-0123456789"):
            answer = served.ask("/v1/completions", FINE, headers={"authorization": wrong})
            assert refused(answer, 401)["code"] == "invalid_api_key" and answer[2]["www-authenticate"] == "Bearer"
        assert refused(served.ask("/metrics"), 401)["type"] == "authentication_error"
        assert served.ask("/health")[0] == 200
    assert "key-01234" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("text", "words"), [("", "no key in it"), ("short\n", "key number 1"), ("a b c d e f g h i j k l\n", "space")]
)
def test_a_file_of_keys_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        guard.read_keys(str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        guard.read_keys(str(tmp_path / "none"))


def test_other_addresses_need_keys_or_a_word() -> None:
    with pytest.raises(UsageError, match=r"--host 0\.0\.0\.0: .*--api-key FILE, or --open"):
        http_server.require_safe("0.0.0.0", has_keys=False, is_open=False)
    for host, has_keys, is_open in (("0.0.0.0", True, False), ("::", False, True), ("127.0.0.1", False, False)):
        http_server.require_safe(host, has_keys=has_keys, is_open=is_open)
    assert guard.is_loopback("::1") and guard.is_loopback("127.8.8.8") and not guard.is_loopback("example.org")


def test_what_cannot_be_started(base_folder: Path) -> None:
    with http_server.bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UsageError, match=f"--port {taken.getsockname()[1]}: cannot listen"):
            http_server.bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UsageError, match=r"--context 97: .* has 96 positions"):
        load("base", str(base_folder), LoadOptions(context=97))
    with pytest.raises(UsageError, match=r"need .* GB for keys and values"):
        load("base", str(base_folder), LoadOptions(max_batch=10**9))
    with pytest.raises(UsageError, match="name base is taken"):
        named_sources([str(base_folder), f"base={base_folder}"])
    assert named_sources(["a=runs/x", str(base_folder)]) == {"a": "runs/x", "base": str(base_folder)}


# Sizes and slowness


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def answer_on(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The whole of it, in however many pieces it comes."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


def test_a_body_that_is_too_large(served: Any) -> None:
    refused(served.ask("/v1/completions", {**FINE, "prompt": "x" * (1 << 20)}), 413)
    with socket.create_connection(("127.0.0.1", served.port)) as connection:  # without saying how large
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        for _ in range(17):
            connection.sendall(piece)
        connection.sendall(b"0\r\n\r\n")
        assert answer_on(connection)[0] == 413
    # Of these nothing is read: of one that is far too large, and of one whose sender asks before.
    for size, more in ((1 << 40, b""), ((1 << 20) + 1, b"Expect: 100-continue\r\n")):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(POST + more + f"Content-Length: {size}\r\n\r\n".encode())
            status, body = answer_on(connection)
            assert status == 413 and body["error"]["code"] == "request_too_large"


def test_a_body_without_an_end_is_not_read_for_ever(base_folder: Path, serving: Callable[..., Any]) -> None:
    with (
        serving({"base": base_folder}, limits=Limits(body_bytes=100), max_batch=1) as served,
        socket.create_connection(("127.0.0.1", served.port)) as connection,
    ):
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"64\r\n" + b"x" * 0x64 + b"\r\n")


def test_a_head_that_is_too_large(served: Any) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_who_sends_slowly_is_cut_off(base_folder: Path, serving: Callable[..., Any]) -> None:
    limits = Limits(header_seconds=0.5, body_seconds=0.5)
    with serving({"base": base_folder}, limits=limits, max_batch=1) as served:
        for begun in (b"", b"POST /v1/comp"):
            with socket.create_connection(("127.0.0.1", served.port)) as connection:
                connection.sendall(begun)
                assert connection.recv(100) == b""
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
            assert answer_on(connection)[0] == 408
        with socket.create_connection(("127.0.0.1", served.port)) as connection:  # a second request on one connection
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer_on(connection) == (200, {"status": "ok", "models": ["base"]})
            connection.sendall(b"GET /hea")
            assert connection.recv(100) == b""
        kept = http.client.HTTPConnection("127.0.0.1", served.port)  # who says nothing in between may stay
        for _ in range(2):
            kept.request("GET", "/health")
            assert kept.getresponse().read()
            time.sleep(0.6)
        kept.close()


def test_more_connections_than_are_allowed(base_folder: Path, serving: Callable[..., Any]) -> None:
    with serving({"base": base_folder}, limits=Limits(connections=2), max_batch=1) as served:
        first, second = (socket.create_connection(("127.0.0.1", served.port)) for _ in range(2))
        with socket.create_connection(("127.0.0.1", served.port)) as third:
            assert third.recv(100) == b""
        first.close()
        second.close()
