"""Every verb with files that may not be read, places that may not be written to, and files that go away meanwhile.

Each command is run once as it should be, by this process, which also imports all it needs; then in a forked child with
the fault. Root may read everything, so where the tests run as root the child becomes another user.
"""

import contextlib
import os
import re
import shutil
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

Call = Callable[..., Any]
NOBODY = 65534
STEP = "run/checkpoints/step-00000006"
RANK_TABLE = """{"version": "1.0", "server_count": "1", "status": "completed", "server_list": [{"server_id": "10.0.0.1",
"device": [{"device_id": "0", "device_ip": "10.1.0.1", "rank_id": "0"}]}]}"""

# What reads: the command, and the file that it needs.
READS = {
    "prepare": ("prepare text.txt --tokenizer tokenizer.json --out new/x", "text.txt"),
    "prepare, tokenizer": ("prepare text.txt --tokenizer tokenizer.json --out new/x", "tokenizer.json"),
    "train, config": ("train -c tiny.yaml --out new/run --dry-run", "tiny.yaml"),
    "train, tokens": ("train -c tiny.yaml --out new/run --dry-run", "store.bin"),
    "train, index": ("train -c tiny.yaml --out new/run --dry-run", "store.idx"),
    "train, about the store": ("train -c tiny.yaml --out new/run --dry-run", "store.json"),
    "train, state": ("train -c tiny.yaml --out run --resume auto", f"{STEP}/state/__0_0.distcp"),
    "train, manifest": ("train -c tiny.yaml --out run --resume auto", f"{STEP}/manifest.json"),
    "eval, model": ("eval --model run --data store", f"{STEP}/portable/model.safetensors"),
    "eval, data": ("eval --model run --data store", "store.bin"),
    "generate": ("generate --model hf --prompt the --max-new-tokens 2", "hf/model.safetensors"),
    "generate, about the model": ("generate --model hf --prompt the --max-new-tokens 2", "hf/config.json"),
    "generate, tokenizer": ("generate --model hf --prompt the --max-new-tokens 2", "hf/tokenizer.json"),
    "generate, prompts": ("generate --model hf --prompts prompts.txt --max-new-tokens 2", "prompts.txt"),
    "convert, weights": ("convert run new/x.pt --to nanogpt", f"{STEP}/portable/model.safetensors"),
    "convert, manifest": ("convert run new/x.pt --to nanogpt", f"{STEP}/manifest.json"),
    "convert, data": ("convert store new/x --to tnt", "store.idx"),
    "export": ("export --model run --to hf --out new/x", f"{STEP}/portable/model.safetensors"),
    "infer": ("infer exported --prompt the --max-new-tokens 2", "exported/model.safetensors"),
    "inspect, safetensors": ("inspect hf/model.safetensors", "hf/model.safetensors"),
    "inspect, folder": ("inspect hf", "hf/config.json"),
    "inspect, torch file": ("inspect ckpt.pt", "ckpt.pt"),
    "inspect, dataset": ("inspect store", "store.idx"),
    "inspect, tokens": ("inspect store", "store.bin"),
    "verify": ("verify run", f"{STEP}/state/.metadata"),
    "run": ("run --dry-run train.sh", "train.sh"),
    "translate": ("translate theirs.yaml", "theirs.yaml"),
    "plan": ("plan -c tiny.yaml --device a100-80g", "tiny.yaml"),
    "doctor": ("doctor -c tiny.yaml", "tiny.yaml"),
    "plot": ("plot run", "run/metrics.jsonl"),
    "report": ("report run --out new/x.html", "run/metrics.jsonl"),
    "report, configuration": ("report run --out new/x.html", "run/config.yaml"),
    "report, machine": ("report run --out new/x.html", "run/environment.json"),
    "watch": ("watch --once run", "run/metrics.jsonl"),
    "config": ("config show -c tiny.yaml", "tiny.yaml"),
    "config diff": ("config diff tiny.yaml tiny.yaml", "tiny.yaml"),
    "launch": ("launch --show-rank-table table.json", "table.json"),
}
# What writes: the command, where {new} is a folder to make things in.
WRITES = {
    "prepare": "prepare text.txt --tokenizer tokenizer.json --out {new}/x",
    "train": "train -c tiny.yaml --out {new}/run train.steps=1",
    "eval": "eval --model run --data store --per-document {new}/x.jsonl",
    "convert, weights": "convert run {new}/x.pt --to nanogpt",
    "convert, data": "convert store {new}/x --to tnt",
    "export": "export --model run --to hf --out {new}/x",
    "plan": "plan --preset gpt2 --device a100-80g --devices 1 --search --save {new}/x.yaml",
    "report": "report run --out {new}/x.html",
    "launch": "launch --make-rank-table [0,1] --server-ip 10.0.0.1 --out {new}/x.json",
}
# Theirs are not ours to read or write: `completion` prints a text, and `run` does what its command does.
WITHOUT_OUTPUT = {
    "generate",
    "infer",
    "inspect",
    "verify",
    "run",
    "translate",
    "doctor",
    "plot",
    "serve",
    "watch",
    "config",
    "completion",
}


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def place(recipe: Path, _finished: Path, small_store: Path, small_tokenizer: Any, call: Call) -> Iterator[Path]:
    """A folder that the user of the child may enter and write to, with one of everything that verbs read."""
    here = Path(tempfile.mkdtemp(prefix="refused-")).resolve()
    before = Path.cwd()
    try:
        os.chdir(here)
        (here / "text.txt").write_text("Once upon a time there was a text.\n" * 20)
        small_tokenizer.save_file(here / "tokenizer.json")
        for file in small_store.parent.iterdir():
            shutil.copy(file, here / file.name.replace(small_store.name, "store", 1))
        about = (here / "store.json").read_text()
        (here / "store.json").write_text(about.replace(f'"{small_store.name}.tok', '"store.tok'))
        (here / "tiny.yaml").write_text(recipe.read_text().replace(str(small_store), "store"))
        shutil.copytree(_finished, here / "run")
        shutil.copytree(here / STEP / "portable", here / "hf")
        call("export", "--model", "run", "--to", "hf", "--out", "exported")
        call("convert", "run", "ckpt.pt", "--to", "nanogpt")
        (here / "prompts.txt").write_text("the\n")
        (here / "theirs.yaml").write_text(
            "Global:\n  seed: 3\n  local_batch_size: 8\nModel:\n  module: GPTModule\n  num_layers: 2\n"
        )
        (here / "train.sh").write_text("python train.py config/train_shakespeare_char.py --device=cpu\n")
        for name in ("train", "val"):
            (here / "data" / "shakespeare_char").mkdir(parents=True, exist_ok=True)
            (here / "data" / "shakespeare_char" / f"{name}.bin").write_bytes(bytes([7, 0]) * 40_000)
        (here / "table.json").write_text(RANK_TABLE)
        (here / "new").mkdir()
        yield here
    finally:
        os.chdir(before)
        shutil.rmtree(here)


def hand_over(folder: Path) -> None:
    """To the user of the child, so that it is the fault alone that keeps it out."""
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def in_child(command: str, before: Callable[[], None] = lambda: None) -> Ended:
    """The command in a forked child that is not root. `before`: what is done there first."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = _forked(command, before, out, err)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return Ended(code, *texts)


def _forked(command: str, before: Callable[[], None], out: IO[str], err: IO[str]) -> int:
    from gptworks.cli.main import main

    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.environ.update({"HOME": str(Path.cwd()), "GPTWORKS_HOME": str(Path.cwd() / "home")})
            before()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code = main(command.split())
                except SystemExit as end:
                    code = int(end.code or 0)
                except BaseException:
                    traceback.print_exc()
                    code = 99
            out.flush()
            err.flush()
            os._exit(code)
        finally:
            os._exit(98)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def files_of(folder: Path) -> dict[str, bytes]:
    kept = (path for path in folder.rglob("*") if path.is_file() and os.access(path, os.R_OK))
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept if path.name != ".lock"}


def assert_explained(done: Ended, command: str, *said: str) -> None:
    text = f"{command}: exit {done.code}\n--- stdout\n{done.out}\n--- stderr\n{done.err}"
    assert done.code == 2, text
    report = done.out if command.startswith("doctor") else done.err  # whose findings are its output
    assert ("PROBLEM" if command.startswith("doctor") else "error: ") in report, text
    assert "Traceback" not in done.err, text
    for each in said:
        assert re.search(each, report), f"{each!r} is not said\n{text}"


@pytest.fixture(scope="module")
def well(place: Path, call: Call) -> Callable[[str], None]:
    """Runs a command as it should be, once: all that fails after it is due to the fault."""
    import difflib  # noqa: F401
    import encodings.idna  # noqa: F401
    import pwd  # noqa: F401

    done: set[str] = set()

    def run(command: str) -> None:
        if command not in done:
            call(*command.split())
            shutil.rmtree(place / "new")
            (place / "new").mkdir()
            done.add(command)
        hand_over(place)

    return run


def test_every_verb_is_driven() -> None:
    from gptworks.cli.main import VERBS

    reading, writing = ({name.partition(",")[0].partition(" ")[0] for name in table} for table in (READS, WRITES))
    # A server runs until it is ended: what it cannot read at its start is in tests/serve.
    assert reading | {"completion", "serve"} == set(VERBS)
    assert writing | WITHOUT_OUTPUT == set(VERBS)


@pytest.mark.parametrize("name", READS)
def test_a_file_that_may_not_be_read(name: str, place: Path, well: Callable[[str], None]) -> None:
    command, needed = READS[name]
    well(command)
    file = place / needed
    before = stat.S_IMODE(file.stat().st_mode)
    was = files_of(place)
    file.chmod(0)
    try:
        done = in_child(command)
    finally:
        file.chmod(before)
    assert_explained(done, command, re.escape(needed), "permission denied|Permission denied|may not be read")
    assert files_of(place) == was


def without(path: str, command: str, needed: str) -> str:
    """The command with `path` in place of what leads to the file that it needs."""
    words = command.split()
    leads = [word for word in words[1:] if needed == word or needed.startswith((f"{word}/", f"{word}."))]
    assert len(leads) >= 1, f"{needed}: nothing in `{command}` leads there"
    return " ".join(path if word == leads[0] else word for word in words)


# The data of a configuration and the checkpoints of a run folder are found through other files.
BY_NAME = [name for name in READS if name not in {"train, tokens", "train, index", "train, about the store"}]
BY_NAME = [name for name in BY_NAME if not READS[name][0].endswith("--resume auto")]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("fault", ["closed", "too long", "not a folder", "nowhere"])
def test_a_path_that_leads_nowhere(name: str, fault: str, place: Path, well: Callable[[str], None]) -> None:
    command, needed = READS[name]
    well(command)
    closed = place / "closed"
    closed.mkdir(mode=0)
    hand_over(closed)
    path, said = {
        "closed": ("closed/inside", "may not enter closed "),
        "too long": ("x" * 300, r"too long: 300 bytes|\[Errno 36\] File name too long"),
        "not a folder": ("text.txt/inside", r"text\.txt is not a folder|Not a directory"),
        "nowhere": ("nowhere/inside", "nowhere"),
    }[fault]
    command = without(path, command, needed)
    try:
        done = in_child(command)
    finally:
        closed.rmdir()
    assert_explained(done, command, path[:40], said)


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_a_file_that_goes_away_while_it_is_read(name: str, place: Path, well: Callable[[str], None]) -> None:
    """Deleted by an audit hook, just before Python opens it: it was there when it was looked for."""
    command, needed = READS[name]
    well(command)
    file, aside = place / needed, place / "aside"
    shutil.copy(file, aside)

    def delete(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and Path(args[0]).absolute() == file:
            file.unlink(missing_ok=True)

    try:
        done = in_child(command, before=lambda: sys.addaudithook(delete))
        went = not file.exists()
    finally:
        shutil.move(aside, file)
    if not went:
        assert done.code in (0, 2), done.err  # read by a library that is not written in Python
        return
    where, name = os.path.split(needed)  # where it was the sign that something is a checkpoint, its folder is named
    assert done.code == 0 or name in done.err + done.out or f"{where}: " in done.err, done.err
    if done.code:
        assert_explained(done, command)


# Writing


def read_only_place() -> Path | None:
    """A folder on a filesystem that is mounted read-only, if this machine has one."""
    for line in Path("/proc/mounts").read_text().splitlines() if Path("/proc/mounts").exists() else []:
        _, where, _, options, *_ = line.split(" ")
        with contextlib.suppress(OSError):
            if "ro" in options.split(",") and os.statvfs(where).f_flag & os.ST_RDONLY and os.access(where, os.X_OK):
                return Path(where)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("fault", ["may not write", "may not enter", "too long", "not a folder", "system", "read-only"])
def test_a_place_that_cannot_be_written_to(name: str, fault: str, place: Path, well: Callable[[str], None]) -> None:
    well(WRITES[name].format(new="new"))
    closed = place / "closed"
    closed.mkdir(mode=0o555 if fault == "may not write" else 0)
    hand_over(closed)
    where, said = {
        "may not write": ("closed", "may not write to closed|closed.*[Pp]ermission denied"),
        "may not enter": ("closed/inside", "may not enter closed|closed.*[Pp]ermission denied"),
        "too long": ("x" * 300, "too long"),
        "not a folder": ("text.txt", r"text\.txt is not a folder|Not a directory"),
        "system": ("/proc", "/proc"),
        "read-only": (str(read_only_place()), "read-only|Read-only"),
    }[fault]
    was = files_of(place)
    try:
        if fault == "system" and not Path("/proc/self").exists():
            pytest.skip("this system has no /proc")
        if fault == "read-only" and read_only_place() is None:
            pytest.skip("no filesystem is mounted read-only here, and only root could mount one")
        command = WRITES[name].format(new=where)
        done = in_child(command)
    finally:
        closed.chmod(0o700)
        closed.rmdir()
    assert_explained(done, command, where[:40], said)
    assert "free some space" not in done.err.lower()
    assert files_of(place) == was, "nothing is left half-written"
