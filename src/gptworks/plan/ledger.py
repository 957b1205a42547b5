"""Bytes by what they are for, and a ledger of tensors that remembers when they were most."""

from collections.abc import Callable


class Bytes:
    """By what they are for. (Not a dataclass: a search makes many thousands of them.)"""

    __slots__ = ("activations", "communication", "gradients", "temporaries")

    def __init__(self, activations: int = 0, temporaries: int = 0, gradients: int = 0, communication: int = 0) -> None:
        self.activations = activations  # kept for the backward pass
        self.temporaries = temporaries
        self.gradients = gradients
        self.communication = communication

    @property
    def total(self) -> int:
        return self.activations + self.temporaries + self.gradients + self.communication

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            self.activations + other.activations,
            self.temporaries + other.temporaries,
            self.gradients + other.gradients,
            self.communication + other.communication,
        )

    def __sub__(self, other: "Bytes") -> "Bytes":
        return self + -1 * other

    def __rmul__(self, times: int) -> "Bytes":
        return Bytes(
            times * self.activations, times * self.temporaries, times * self.gradients, times * self.communication
        )


NOTHING = Bytes()


class Ledger:
    """Tensors by name, and the moment when they were most."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, int]] = {}
        self.now = 0
        self.high = 0
        self.most = NOTHING

    def _take(self, kind: str, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            if not size:
                continue
            assert name not in self.held, name
            self.held[name] = (kind, size)
            self.now += size
        if self.now > self.high:
            self.high, self.most = self.now, self.snapshot()

    def keep(self, **sizes: int) -> None:
        """For the backward pass."""
        self._take("activations", sizes)

    def use(self, **sizes: int) -> None:
        """For a while."""
        self._take("temporaries", sizes)

    def grow(self, **sizes: int) -> None:
        """Gradients."""
        self._take("gradients", sizes)

    def gather(self, **sizes: int) -> None:
        self._take("communication", sizes)

    def drop(self, *names: str) -> None:
        for name in names:
            if name in self.held:
                self.now -= self.held.pop(name)[1]

    def snapshot(self) -> Bytes:
        sums: dict[str, int] = {}
        for kind, size in self.held.values():
            sums[kind] = sums.get(kind, 0) + size
        return Bytes(**sums)

    def highest(self, run: Callable[["Ledger"], None]) -> Bytes:
        """The most there is during what `run` writes down."""
        self.high, self.most = self.now, self.snapshot()
        run(self)
        return self.most
