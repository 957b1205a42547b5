"""In a child: the states of a crash, built and opened. python -m soak.open_states SCENARIO SEED COUNT FOLDER MATERIAL

First the state before every call that publishes something, as a kill leaves it; then COUNT as a power failure may.

Each must be the old state, the new state, or be refused by name; and the same command then comes to the same end.
"""

import contextlib
import functools
import hashlib
import io
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit"), str(TESTS / "cli")]

from soak import driver  # noqa: E402
from soak.campaign import Found  # noqa: E402
from soak.crash_states import Choice, build, build_killed, lasting, publishing_moments  # noqa: E402
from soak.crashes import LAYOUTS  # noqa: E402
from soak.recorded import Change, record  # noqa: E402

STEPS = 4


class Training:
    """A run whose second save is recorded: afterwards it goes on, from the first or the second, to the same numbers."""

    resumed = 20  # states; of the others, what a resume would choose is looked at

    def __init__(self, material: Path, folder: Path, *settings: str, first_steps: int = 2) -> None:
        self.material, self.folder, self.settings, self.first_steps = material, folder, settings, first_steps
        self.weights_at: dict[str, bytes] = {}  # by the names of checkpoints

    def words(self, steps: int, out: Path) -> list[str | Path]:
        resume = ["--out", out, "--resume", "auto"]
        return [
            "train",
            "-c",
            self.material / "tiny.yaml",
            f"train.steps={steps}",
            "optim.decay_steps=9",
            *self.settings,
            *resume,
        ]

    def before(self, place: Path) -> None:
        if self.first_steps:
            require_success(*self.words(self.first_steps, place / "run"))
        self._remember(place)

    def recorded(self, place: Path) -> list[str]:
        return driver.command(*self.words(STEPS, place / "run"))

    def after(self, place: Path) -> None:
        self._remember(place)
        self.lines, self.weights = self._finish(place)

    def _remember(self, place: Path) -> None:
        for folder in (place / "run/checkpoints").glob("step-*"):
            self.weights_at[folder.name] = (folder / "portable/model.safetensors").read_bytes()

    def require_good(self, place: Path, done: list[Change], is_resumed: bool) -> None:
        self._require_source(place / "run", max(self.first_steps, *map(_step, done), 0))
        if not is_resumed:
            return
        lines, weights = self._finish(place)
        if weights != self.weights:
            raise Found("the last weights are others")
        if lines != self.lines:
            differs = next(
                (line for line in lines if line not in self.lines), f"{len(lines)} of {len(self.lines)} lines"
            )
            raise Found(f"other metrics than without a crash: {differs}")

    def _require_source(self, run: Path, oldest: int) -> None:
        """The newest whole checkpoint is one that was made, and not older than the newest that was published."""
        from gptworks.checkpoint import manifest as manifests
        from gptworks.checkpoint.folder import CheckpointFolder
        from gptworks.errors import DamagedCheckpoint

        checkpoints = CheckpointFolder(run)
        newest = 0
        for step, path in sorted(checkpoints.named_as_steps().items(), reverse=True):
            with contextlib.suppress(DamagedCheckpoint):
                manifests.verify(path, manifests.read(path))
                weights = (path / "portable/model.safetensors").read_bytes()
                if weights != self.weights_at.get(path.name, weights):
                    raise Found(f"{path.name} is said to be whole, and has other weights")
                newest = step
                break
        if newest < oldest:
            raise Found(f"step {newest} is the newest checkpoint that is whole; step {oldest} was published before")
        for pointer in ("latest", "best"):
            pointed = checkpoints.pointed(pointer)
            if pointed and not pointed.is_dir():
                raise Found(f"{pointer} names {pointed.name}, which is gone")

    def _finish(self, place: Path) -> tuple[list[dict[str, Any]], bytes]:
        require_success(*self.words(STEPS + 2, place / "run"))
        return driver.lines_of(place / "run"), driver.weights_of(place / "run", STEPS + 2)


class Ranks(Training):
    """The same with two ranks."""

    resumed = 1  # to start ranks takes long

    def __init__(self, material: Path, folder: Path, layout: str, *settings: str) -> None:
        keeps = ("checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.keep_best=true")
        super().__init__(material, folder, *settings, *keeps, "evaluate.every=1", "evaluate.batches=1", first_steps=0)
        self.launch = ["--nproc", "2", f"parallel.{layout[:-1]}=2", "parallel.timeout=60"]

    def words(self, steps: int, out: Path) -> list[str | Path]:
        return [*super().words(steps, out), *self.launch]


class Preparing:
    """A dataset that is published, perhaps in the place of an older one."""

    resumed = 1000

    def __init__(self, material: Path, folder: Path, *options: str, is_first: bool = True) -> None:
        self.material, self.folder, self.options, self.is_first = material, folder, options, is_first
        self.old: Any = None

    def words(self, text: str, place: Path) -> list[str | Path]:
        tokenizer = self.material / "store.tokenizer.json"
        options = ["--append-eod", "--workers", "1", *self.options]
        return ["prepare", self.material / text, "--tokenizer", tokenizer, "--out", place / "made", *options]

    def before(self, place: Path) -> None:
        if not self.is_first:
            require_success(*self.words("old.txt", place))
            self.old = tokens_of(place)

    def recorded(self, place: Path) -> list[str]:
        return driver.command(*self.words("new.txt", place))

    def after(self, place: Path) -> None:
        self.new = tokens_of(place)

    def require_good(self, place: Path, done: list[Change], is_resumed: bool) -> None:
        from gptworks.errors import GPTWorksError

        try:
            if tokens_of(place) not in (self.old, self.new):
                raise Found("neither the old tokens nor the new ones")
        except GPTWorksError as error:
            if "made" not in str(error):
                raise Found(f"refused, but not by name: {error}") from None
        require_success(*self.words("new.txt", place))
        if tokens_of(place) != self.new:
            raise Found("the same command again gave other tokens")


class Converting:
    """A checkpoint that is written for another system."""

    resumed = 1000

    def __init__(self, material: Path, folder: Path, to: str, verb: str = "convert") -> None:
        self.material, self.to, self.verb = material, to, verb
        self.name = "made.gguf" if to == "gguf" else "made"

    def words(self, place: Path) -> list[str | Path]:
        if self.verb == "export":
            return ["export", "--model", self.material / "run", "--to", self.to, "--out", place / self.name]
        return ["convert", self.material / "run", place / self.name, "--to", self.to]

    def before(self, place: Path) -> None:
        pass

    def recorded(self, place: Path) -> list[str]:
        return driver.command(*self.words(place))

    def after(self, place: Path) -> None:
        self.new = weights_at(place / self.name)

    def require_good(self, place: Path, done: list[Change], is_resumed: bool) -> None:
        """What has the final name is whole: nothing else is promised of it, so a refusal would be a failure."""
        if not (place / self.name).exists():
            require_success(*self.words(place))
        if weights_at(place / self.name) != self.new:
            raise Found("other weights under the final name")


def _step(change: Change) -> int:
    """Of the checkpoint that this change gave its name; else 0."""
    is_named = change.kind == "link" and change.name.startswith("step-")
    return int(change.name.removeprefix("step-")) if is_named else 0


def _asynchronous(material: Path, folder: Path, layout: str) -> Ranks:
    return Ranks(material, folder, layout, "checkpoint.asynchronous=true")


SCENARIOS: dict[str, Callable[[Path, Path], Any]] = {
    "save": lambda m, f: Training(m, f, "checkpoint.every=2", "checkpoint.keep_last=2"),
    "save-keep-one": lambda m, f: Training(m, f, "checkpoint.every=1", "checkpoint.keep_last=1"),
    "save-asynchronous": lambda m, f: Training(m, f, "checkpoint.every=2", "checkpoint.asynchronous=true"),
    "save-best": lambda m, f: Training(
        # The rate is far too high: the first checkpoint stays the best.
        m,
        f,
        "optim.lr=0.3",
        "checkpoint.every=1",
        "checkpoint.keep_last=1",
        "evaluate.every=1",
        "evaluate.batches=2",
        "checkpoint.keep_best=true",
    ),
    "save-first": lambda m, f: Training(m, f, "checkpoint.every=2", first_steps=0),
    "prepare": lambda m, f: Preparing(m, f),
    "prepare-again": lambda m, f: Preparing(m, f, is_first=False),
    "prepare-nanogpt": lambda m, f: Preparing(m, f, "--format", "nanogpt", is_first=False),
    "prepare-paddle": lambda m, f: Preparing(m, f, "--format", "paddle", is_first=False),
    "convert-hf": lambda m, f: Converting(m, f, "hf"),
    "convert-gguf": lambda m, f: Converting(m, f, "gguf"),
    "export-hf": lambda m, f: Converting(m, f, "hf", "export"),
}
for _layout in LAYOUTS:
    SCENARIOS[f"save-{_layout}"] = functools.partial(Ranks, layout=_layout)
    SCENARIOS[f"save-{_layout}-asynchronous"] = functools.partial(_asynchronous, layout=_layout)


def require_success(*args: str | Path) -> None:
    from gptworks.cli.main import main

    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = main([str(each) for each in args])
    if code:
        raise Found(f"gptworks {' '.join(map(str, args))}: exit {code}\n{told.getvalue()[-3000:]}")


def tokens_of(place: Path) -> str | None:
    """A hash of all that a dataset says; None where none is found under this name."""
    from gptworks.data.store import Store

    names = ("made.bin", "made.idx", "made_ids.npy", "made_idx.npz", "made.json", "made.bin.json")
    if not any((place / name).exists() for name in names):
        return None
    is_bare = not any((place / name).exists() for name in ("made.idx", "made_ids.npy"))
    store = Store(place / "made.bin" if is_bare else place / "made")
    contents = store.contents
    digest = hashlib.sha256(contents.tokens[0 : len(contents.tokens)].astype("int64").tobytes())
    for array in (contents.sizes, contents.documents):
        digest.update(array.astype("int64").tobytes())
    digest.update(repr(store.sidecar).encode())
    return digest.hexdigest()


def weights_at(path: Path) -> str:
    from gptworks.checkpoint.systems import registry

    found = registry.open_any(path).require_whole()
    digest = hashlib.sha256()
    for name, tensor in sorted(found.tensors.items()):
        digest.update(name.encode() + tensor.read().numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    name, seed, count, folder, material = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
        Path(sys.argv[5]),
    )
    scenario = SCENARIOS[name](material, folder)
    place = folder / "place"  # the same for all states: paths are written into files
    place.mkdir()
    scenario.before(place)
    recording = record(scenario.recorded(place), place, folder / "recorded")
    scenario.after(place)
    print(f"{name}: {len(recording.changes)} calls", flush=True)
    states: list[Callable[[Path], Choice]] = [
        functools.partial(build_killed, recording, moment) for moment in publishing_moments(recording)
    ]
    killed = len(states)
    states += [functools.partial(build, recording, random.Random(f"{seed}/{number}")) for number in range(count)]
    resumed = set(random.Random(seed).sample(range(len(states)), min(scenario.resumed, len(states))))
    for number, state in enumerate(states):
        shutil.rmtree(place)
        chosen = state(place)
        try:
            scenario.require_good(place, lasting(recording.changes[: chosen.moment], chosen.order), number in resumed)
        except BaseException as error:
            print(
                f"state {number} of {name}, {chosen}, is none of old, new and refused: {type(error).__name__}: {error}"
            )
            return 1
    print(killed, len(states) - killed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
