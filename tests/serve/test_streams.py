"""Streams on the wire: most of their events are written past the layers of the server, and nobody may notice."""

import asyncio
import json
import re
import socket
import time
from typing import Any, cast

import pytest

from gptworks.generate.row_request import Progress
from gptworks.serve.service import Call

BODY = {"model": "base", "prompt": "The river", "max_tokens": 80, "temperature": 1, "seed": 3, "ignore_eos": True}


def connected(served: Any, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", served.port))
    return connection


def send(connection: socket.socket, body: dict[str, Any], version: str = "1.1") -> None:
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)


def read_all(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body."""
    answer = bytearray()
    with connection:
        while piece := connection.recv(1 << 16):
            answer += piece
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return head, body


def without_chunks(body: bytes) -> bytes:
    found, at = bytearray(), 0
    while True:
        size, _, _ = body[at:].partition(b"\r\n")
        begin = at + len(size) + 2
        length = int(size, 16)
        assert body[begin + length : begin + length + 2] == b"\r\n"
        if not length:
            assert begin + 2 == len(body)
            return bytes(found)
        found += body[begin : begin + length]
        at = begin + length + 2


def texts_of(events: bytes) -> dict[int, str]:
    assert re.fullmatch(rb"(?:data: .*\n\n)+", events)
    *lines, done = re.findall(r"data: (.*)\n\n", events.decode())
    assert done == "[DONE]"
    texts: dict[int, str] = {}
    for line in lines:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_whole_in_both_versions_of_http(served: Any, version: str) -> None:
    expected = served.complete(**BODY)["choices"][0]["text"]
    connection = connected(served)
    send(connection, {**BODY, "stream": True}, version)
    head, body = read_all(connection)
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == "1.1")
    assert texts_of(body if version == "1.0" else without_chunks(body)) == {0: expected}


def test_who_reads_late_gets_everything_in_order(served: Any) -> None:
    """More than the buffers between the two hold: some is written at once, some waits."""
    body = {**BODY, "n": 8, "logprobs": 20, "return_token_ids": True}
    expected = {each["index"]: each["text"] for each in served.complete(**body)["choices"]}
    connection = connected(served, receive_bytes=4096)
    while not (found := connection_of(served, connection)):
        time.sleep(0.005)
    found.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    found.transport.set_write_buffer_limits(high=8192)
    send(connection, {**body, "stream": True})
    while not found.flow.write_paused:
        time.sleep(0.005)
    _, answer = read_all(connection)
    assert len(answer) > 200_000 and texts_of(without_chunks(answer)) == expected


def connection_of(served: Any, connection: socket.socket) -> Any:
    """The server's end of it."""
    ends = tuple(served.server.server_state.connections)
    return next((each for each in ends if each.client == connection.getsockname()), None)


def test_a_fault_in_writing_one_stream_is_left_to_its_own_task() -> None:
    """The others of the same step are told after it."""

    def writes_badly(progress: Progress) -> bool:
        raise RuntimeError("planted")

    call, piece = Call(cast(Any, None)), Progress(cast(Any, None), "text", (), None)
    call.rows, call.write_now = [cast(Any, None)], writes_badly
    call.tell(piece)

    async def first() -> list[Progress]:
        return await anext(call.progress())

    assert asyncio.run(first()) == [piece]
