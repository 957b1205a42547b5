"""Between the server and the thread that computes: calls go in, what their rows write comes back."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from gptworks.generate.engine_thread import EngineThread
from gptworks.generate.row_request import Progress, RowRequest
from gptworks.serve.api_error import ApiError
from gptworks.serve.metrics import Metrics
from gptworks.serve.served_model import ServedModel

_RATE_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    """What one client, or many, may ask of the server."""

    max_queue: int = 256  # rows that wait for a place
    timeout: float = 600.0  # seconds from the arrival of a request to the end of its answer
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    send_seconds: float = 60.0  # that a client may take to accept what was written
    connections: int = 1000


class Call:
    """The rows of one request, and what comes of them."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.rows: list[RowRequest] = []
        self.began = time.monotonic()
        self.write_now: Callable[[Progress], bool] | None = None  # False: it could not
        self._news: asyncio.Queue[Progress] = asyncio.Queue()

    def tell(self, progress: Progress) -> None:
        """Most tokens of a stream are written here, without waking the task that answers the call."""
        write = self.write_now if progress.finish is None and self._news.empty() else None
        try:
            is_written = write is not None and write(progress)
        except Exception:  # the calls that are told after this one must not suffer; its own task meets the fault again
            is_written = False
        if not is_written:
            self._news.put_nowait(progress)

    async def progress(self) -> AsyncIterator[list[Progress]]:
        """All that has come in since the last time, until every row has ended."""
        num_open = len(self.rows)
        while num_open:
            news = [await self._news.get()]
            while not self._news.empty():
                news.append(self._news.get_nowait())
            num_open -= sum(each.finish is not None for each in news)
            yield news

    async def finished(self) -> list[RowRequest]:
        async for _ in self.progress():
            pass
        return self.rows


class Service:
    def __init__(self, models: Iterable[ServedModel], limits: Limits) -> None:
        self.models = {served.name: served for served in models}
        self.limits = limits
        self.metrics = Metrics()
        self.is_draining = False
        self._num_rows = 0  # that have not ended
        self._rates: deque[tuple[float, int]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = EngineThread(self._deliver, self._observe)
        for served in self.models.values():
            self._engine.add(served.scheduler)

    def start(self) -> None:
        """In the event loop that answers."""
        self._loop = asyncio.get_running_loop()
        self._engine.start()

    def end(self) -> None:
        self._engine.end()

    def replace(self, served: ServedModel) -> None:
        """New rows go to this one; those that the former one has are finished by it."""
        former = self.models[served.name]
        served.scheduler.counts = former.scheduler.counts
        self._engine.add(served.scheduler)
        self.models[served.name] = served
        self._engine.remove_when_idle(former.scheduler)

    def find(self, name: str | None) -> ServedModel:
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise ApiError(400, f"model: is missing. Models: {', '.join(self.models)}.", param="model")
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(
                400, f"model: no model {name[:100]!r}. Models: {known}.", param="model", code="model_not_found"
            )
        return self.models[name]

    @property
    def num_slots(self) -> int:
        return sum(served.scheduler.slots.number for served in self.models.values())

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def submit(self, call: Call, rows: list[RowRequest]) -> None:
        if self.is_draining:
            raise ApiError(503, "The server is being stopped and takes no new requests.", retry_after=10)
        if self._num_rows + len(rows) > self.num_slots + self.limits.max_queue:
            raise ApiError(
                429,
                f"The queue is full: {self._num_rows} rows are running or waiting, {len(rows)} more were asked for; "
                f"at most {self.num_slots + self.limits.max_queue} are allowed. Try again later.",
                code="queue_full",
                retry_after=1,
            )
        self._num_rows += len(rows)
        call.rows = rows
        for row in rows:
            row.call = call
            row.deadline = call.began + self.limits.timeout
        self._engine.submit(call.served.scheduler, rows)

    def cancel(self, call: Call) -> None:
        """Rows that have ended stay as they are; the places of the others are free within a step."""
        self._engine.cancel([row for row in call.rows if row.finish is None])

    def _deliver(self, progress: list[Progress]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._tell, progress)
        except RuntimeError:  # the loop has been closed: nobody listens any more
            return

    def _tell(self, progress: list[Progress]) -> None:
        for each in progress:
            call = each.request.call
            assert isinstance(call, Call)
            if each.finish is not None:
                self._num_rows -= 1
                self.metrics.rows.add(1, each.finish)
            call.tell(each)

    def _observe(self, batch_size: int) -> None:
        self.metrics.batch_size.observe(batch_size)
        now = time.monotonic()
        self._rates.append((now, sum(served.scheduler.counts.drawn for served in self.models.values())))
        while self._rates[0][0] < now - _RATE_SECONDS:
            self._rates.popleft()

    def metrics_text(self) -> str:
        metrics = self.metrics
        counts = [served.scheduler.counts for served in self.models.values()]
        metrics.prompt_tokens.values[()] = float(sum(each.prompt for each in counts))
        metrics.shared_tokens.values[()] = float(sum(each.shared for each in counts))
        metrics.new_tokens.values[()] = float(sum(each.drawn for each in counts))
        for served in self.models.values():
            metrics.running.set(served.scheduler.num_active, served.name)
            metrics.waiting.set(served.scheduler.num_waiting, served.name)
            metrics.slots.set(served.scheduler.slots.number, served.name)
            if served.step is not None:
                metrics.step.set(served.step, served.name)
        metrics.tokens_per_second.set(self._rate())
        return metrics.text()

    def _rate(self) -> float:
        rates = list(self._rates)
        if len(rates) < 2 or rates[-1][0] < time.monotonic() - _RATE_SECONDS:
            return 0.0
        return (rates[-1][1] - rates[0][1]) / max(1e-3, rates[-1][0] - rates[0][0])
