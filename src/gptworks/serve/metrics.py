"""Counts and times for Prometheus, in its text format."""

import bisect
from collections.abc import Iterator

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


def _exactly(value: float) -> str:
    """All its digits: rates are differences of large numbers."""
    return repr(int(value)) if value == int(value) else repr(value)


class Counter:
    """A number for each combination of labels."""

    kind = "counter"

    def __init__(self, name: str, about: str, *labels: str) -> None:
        self.name, self.about, self.labels = name, about, labels
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, number: float, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + number

    def lines(self) -> Iterator[str]:
        yield from _heading(self.name, self.about, self.kind)
        for labels, value in sorted(self.values.items()):
            yield f"{self.name}{_labels(self.labels, labels)} {_exactly(value)}"


class Gauge(Counter):
    kind = "gauge"

    def set(self, number: float, *labels: str) -> None:
        self.values[labels] = number


class Histogram:
    def __init__(self, name: str, about: str, bounds: tuple[float, ...]) -> None:
        self.name, self.about, self.bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield from _heading(self.name, self.about, "histogram")
        total = 0
        for bound, count in zip((*map("{:g}".format, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {_exactly(self._sum)}"
        yield f"{self.name}_count {total}"


class Metrics:
    """Everything that is told; who knows a number writes it here."""

    def __init__(self) -> None:
        self.requests = Counter("gptworks_requests_total", "Requests answered.", "path", "status")
        self.rows = Counter("gptworks_rows_total", "Rows that ended, by how.", "finish")
        self.prompt_tokens = Counter("gptworks_prompt_tokens_total", "Tokens of prompts that were read.")
        self.shared_tokens = Counter("gptworks_prefix_cache_tokens_total", "Tokens of prompts that were there already.")
        self.new_tokens = Counter("gptworks_generated_tokens_total", "Tokens that were drawn.")
        self.tokens_per_second = Gauge("gptworks_generated_tokens_per_second", "Over the last seconds with work.")
        self.running = Gauge("gptworks_running_rows", "Rows in the batch.", "model")
        self.waiting = Gauge("gptworks_waiting_rows", "Rows in the queue.", "model")
        self.slots = Gauge("gptworks_slots", "Rows that a batch can have.", "model")
        self.step = Gauge("gptworks_model_step", "Step of the run that the weights are of.", "model")
        self.first_token = Histogram("gptworks_time_to_first_token_seconds", "From arrival to a token.", LATENCIES)
        self.seconds = Histogram("gptworks_request_seconds", "From arrival to the end of the answer.", LATENCIES)
        self.batch_size = Histogram("gptworks_batch_size", "Rows in the batch, of each step.", SIZES)

    def text(self) -> str:
        return "".join(f"{line}\n" for each in vars(self).values() for line in each.lines())


def _heading(name: str, about: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    escaped = [value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in values]
    return "{" + ",".join(f'{n}="{v}"' for n, v in zip(names, escaped, strict=True)) + "}" if names else ""
