"""uvicorn with what a server on a network needs besides: senders that take too long are cut off, SIGTERM lets what
runs end, and a run that is still training is followed."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gptworks import file_errors
from gptworks.errors import GPTWorksError, UsageError, first_line
from gptworks.serve.guard import is_loopback
from gptworks.serve.responses import WRITE_PIECE
from gptworks.serve.served_model import LoadOptions, ServedModel, checkpoint_of, description, load
from gptworks.serve.service import Limits, Service

WATCH_SECONDS = 5.0


def bind(host: str, port: int) -> socket.socket:
    """Before anything is loaded: a port that is taken is told at once. Nobody can connect yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The protocol by name: asyncio sends small answers at once (TCP_NODELAY) only where the socket says that it is
        # TCP. Else the body of an answer waits for the client to confirm its head, 40 ms each time.
        bound = socket.socket(family, kind, protocol or socket.IPPROTO_TCP)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: cannot listen there ({error}). Give another.") from None
    return bound


def require_safe(host: str, *, has_keys: bool, is_open: bool) -> None:
    if not is_loopback(host) and not has_keys and not is_open:
        raise UsageError(
            f"--host {host}: others could use the server, and no key is asked for. Give --api-key FILE, or --open if "
            "everybody who reaches this address may."
        )


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then finishes what it has; a second signal ends it at once."""

    def __init__(self, app: ASGIApp, service: Service, *, has_page: bool = False) -> None:
        limits = service.limits
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(limits),
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(limits.timeout) + 1,
                h11_max_incomplete_event_size=limits.header_bytes,
            )
        )
        self.service, self.has_page = service, has_page
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or not POSIX
            for each in signals:
                loop.add_signal_handler(each, self.drain)
        try:
            yield
        finally:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                for each in signals:
                    loop.remove_signal_handler(each)

    def drain(self) -> None:
        if self._draining is not None:
            self.force_exit = self.should_exit = True
            return
        self.service.is_draining = True
        if self.service.num_rows:
            print(f"gptworks serve: finishing {self.service.num_rows} rows", file=sys.stderr, flush=True)
        self._draining = asyncio.get_running_loop().create_task(self._end_when_done())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:  # only now does it listen: who reads the address may connect at once
            for bound in sockets or []:
                url = url_of(bound)
                print(f"gptworks serve: {url}/v1" + (f"; look into it at {url}/" if self.has_page else ""), flush=True)

    async def _end_when_done(self) -> None:
        while self.service.num_rows:
            await asyncio.sleep(0.02)
        self.should_exit = True


def _protocol(limits: Limits) -> type[H11Protocol]:
    """HTTP/1.1 that gives a request's head, from its first byte or the beginning of the connection, so many seconds."""

    class TimedProtocol(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.close()
                return
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._waiting is None:
                self._wait_for_head()

        def handle_events(self) -> None:
            super().handle_events()
            scope: Any = self.scope
            if scope is not None and scope["http_version"] == "1.1":
                # The task that answers has not begun yet.
                scope.setdefault("extensions", {})[WRITE_PIECE] = self.write_piece

        def write_piece(self, piece: Callable[[], bytes]) -> bool:
            """A piece of a body whose length was not told (Transfer-Encoding: chunked)."""
            if self.flow.write_paused or self.transport.is_closing():
                return False
            if text := piece():
                self.transport.write(b"%x\r\n%b\r\n" % (len(text), text))
            return True

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            self._waiting = self.loop.call_later(limits.header_seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _give_up(self) -> None:
            self._waiting = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return TimedProtocol


async def follow(service: Service, options: LoadOptions, every: float = WATCH_SECONDS) -> None:
    """Load the newest checkpoint of each run when there is a newer one. Whatever is wrong with that one is said once,
    and the one before is served."""
    troubles: dict[str, str] = {}
    while True:
        await asyncio.sleep(every)
        for served in list(service.models.values()):
            try:
                if await asyncio.to_thread(checkpoint_of, served.source) != served.checkpoint:
                    newer: ServedModel = await asyncio.to_thread(load, served.name, served.source, options)
                    service.replace(newer)
                    print(f"gptworks serve: {description(newer)}", flush=True)
                troubles.pop(served.name, None)
            except Exception as error:  # deleted while it was read, damaged, or no room for it
                trouble = f"gptworks serve: {served.name} stays at {served.checkpoint.name}: {_in_words(error)}"
                if troubles.get(served.name) != trouble:
                    print(trouble, file=sys.stderr, flush=True)
                troubles[served.name] = trouble


def _in_words(error: Exception) -> str:
    if isinstance(error, GPTWorksError):
        return str(error)
    return (isinstance(error, OSError) and file_errors.explain(error)) or f"{type(error).__name__}: {first_line(error)}"


async def serve(server: Server, bound: socket.socket, watched: LoadOptions | None) -> None:
    following = asyncio.ensure_future(follow(server.service, watched)) if watched is not None else None
    try:
        await server.serve(sockets=[bound])
    finally:
        if following is not None:
            following.cancel()
