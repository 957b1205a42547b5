"""Answers on the wire: JSON, or the events of a stream. Who goes away ends what is computed for him."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gptworks.generate.row_request import Progress
from gptworks.serve.answer import Answer
from gptworks.serve.api_error import ApiError
from gptworks.serve.service import Service

# In a request's `extensions`, where the server has it: writes what the function makes, unless that would have to wait.
WRITE_PIECE = "gptworks.write_piece"
WritePiece = Callable[[Callable[[], bytes]], bool]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps makes one in each call


def dumped(value: object) -> bytes:
    return _encoded(value).encode(errors="replace")


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumped(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)


async def respond(service: Service, request: Request, answer: Answer) -> Any:
    """The rows are computed; a client that goes away cancels them."""
    service.submit(answer.call, answer.rows)
    if answer.body.stream:
        return EventStream(service, answer)
    try:
        await _while_connected(request.receive, answer.call.finished())
    finally:
        service.cancel(answer.call)
    _count(service, answer)
    return json_response(await asyncio.to_thread(answer.whole))


async def _while_connected(receive: Receive, work: Any) -> None:
    """Ends early with ClientGone where the client does."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class ClientGone(Exception):  # no error of anybody
    """Nobody is there to be answered."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _count(service: Service, answer: Answer) -> None:
    service.metrics.seconds.observe(time.monotonic() - answer.call.began)


class EventStream:
    """Server-sent events. Nothing is sent before something has come, so that a failure before has its own status."""

    def __init__(self, service: Service, answer: Answer) -> None:
        self.service, self.answer = service, answer
        self._has_begun = False
        self._is_idle = False  # everything that came is written, and the next may follow at once
        self._write_piece: WritePiece | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write_piece = scope.get("extensions", {}).get(WRITE_PIECE)
        self.answer.call.write_now = self._write_now if self._write_piece is not None else None

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self.service.limits.send_seconds):
                await send(message)

        try:
            await _while_connected(receive, self._write(send_in_time))
        except (ClientGone, TimeoutError):
            if not self._has_begun:
                raise ClientGone from None
        finally:
            self.service.cancel(self.answer.call)

    async def _write(self, send: Callable[[Message], Awaitable[None]]) -> None:
        try:
            async for news in self.answer.call.progress():
                self._is_idle = False
                await self._send(send, self._events(news))
                self._is_idle = self._has_begun
            _count(self.service, self.answer)
            last = b"".join(_event(chunk) for chunk in self.answer.last_chunks())
            await self._send(send, last + b"data: [DONE]\n\n")
        except ApiError as error:
            if not self._has_begun:
                raise
            await self._send(send, _event(error.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _events(self, news: list[Progress]) -> bytes:
        return b"".join(_event(chunk) for chunk in self.answer.chunks(news))

    def _write_now(self, progress: Progress) -> bool:
        """Past the layers of the server and without a task: of what a token costs these are the most."""
        if not self._is_idle or self._write_piece is None:
            return False
        return self._write_piece(lambda: self._events([progress]))

    async def _send(self, send: Callable[[Message], Awaitable[None]], events: bytes) -> None:
        if not events:
            return
        if not self._has_begun:
            self._has_begun = True
            self.service.metrics.first_token.observe(time.monotonic() - self.answer.call.began)
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        await send({"type": "http.response.body", "body": events, "more_body": True})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + dumped(chunk) + b"\n\n"
