"""Every verb with files that may not be read, places that may not be written to, and files that go away meanwhile.

Each command is run once as it should be, by this process, which also imports all it needs; then in a forked child with
the fault. Root may read everything, so where the tests run as root the child becomes another user.
"""

import contextlib
import io
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
from typing import Any

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
    "convert, weights": ("convert run new/x --to nanogpt", f"{STEP}/portable/model.safetensors"),
    "convert, manifest": ("convert run new/x --to nanogpt", f"{STEP}/manifest.json"),
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
    "config": ("config show -c tiny.yaml", "tiny.yaml"),
    "config diff": ("config diff tiny.yaml tiny.yaml", "tiny.yaml"),
    "launch": ("launch --show-rank-table table.json", "table.json"),
}
# What writes: the command, where {new} is a folder to make things in.
WRITES = {
    "prepare": "prepare text.txt --tokenizer tokenizer.json --out {new}/x",
    "train": "train -c tiny.yaml --out {new}/run train.steps=1",
    "eval": "eval --model run --data store --per-document {new}/x.jsonl",
    "convert, weights": "convert run {new}/x --to nanogpt",
    "convert, data": "convert store {new}/x --to tnt",
    "export": "export --model run --to hf --out {new}/x",
    "plan": "plan --preset gpt2 --device a100-80g --devices 1 --search --save {new}/x.yaml",
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
    import torch

    here = Path(tempfile.mkdtemp(prefix="refused-"))
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
        torch.save({"model": {"x": torch.zeros(2)}}, here / "ckpt.pt")
        call("convert", "run", "theirs.pt", "--to", "nanogpt")
        shutil.copy("theirs.pt/ckpt.pt" if Path("theirs.pt").is_dir() else "theirs.pt", "ckpt.pt")
        (here / "prompts.txt").write_text("the\n")
        (here / "theirs.yaml").write_text("Global:\n  seed: 3\nModel:\n  module: GPTModule\n  num_layers: 2\n")
        (here / "train.sh").write_text("python train.py config/train_shakespeare_char.py --device=cpu\n")
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
    from gptworks.cli.main import main

    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            before()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code = main(command.split())
                except SystemExit as end:
                    code = int(end.code or 0)
                except BaseException:
                    traceback.print_exc()
                    code = 99
            out.flush(), err.flush()
            os._exit(code)
        finally:
            os._exit(98)
    _, status = os.waitpid(child, 0)
    texts = []
    for file in (out, err):
        file.seek(0)
        texts.append(file.read())
        file.close()
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def files_of(folder: Path) -> dict[str, bytes]:
    kept = (path for path in folder.rglob("*") if path.is_file() and os.access(path, os.R_OK))
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept if path.name != ".lock"}


def assert_explained(done: Ended, command: str, *said: str) -> None:
    text = f"{command}: exit {done.code}\n--- stdout\n{done.out}\n--- stderr\n{done.err}"
    assert done.code == 2, text
    assert done.err.count("error: ") >= 1 and "Traceback" not in done.err, text
    for each in said:
        assert re.search(each, done.err), f"{each!r} is not said\n{text}"


@pytest.fixture(scope="module")
def well(place: Path, call: Call) -> Callable[[str], None]:
    """Runs a command as it should be, once: all that fails after it is due to the fault."""
    import difflib  # noqa: F401
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
    assert reading | {"completion"} == set(VERBS)
    assert writing | WITHOUT_OUTPUT == set(VERBS)


@pytest.mark.parametrize("name", READS)
def test_a_file_that_may_not_be_read(name: str, place: Path, well: Callable[[str], None]) -> None:
    command, needed = READS[name]
    well(command)
    file = place / needed
    before = stat.S_IMODE(file.stat().st_mode)
    was = files_of(place)
    os.chmod(file, 0)
    try:
        done = in_child(command)
    finally:
        os.chmod(file, before)
    assert_explained(done, command, re.escape(needed), "permission denied|Permission denied|may not be read")
    assert files_of(place) == was


@pytest.mark.parametrize("name", READS)
def test_a_folder_that_may_not_be_entered(name: str, place: Path, well: Callable[[str], None]) -> None:
    command, needed = READS[name]
    well(command)
    closed = place / "closed"
    closed.mkdir(mode=0)
    hand_over(closed)
    word = next(word for word in command.split() if needed.startswith(word) or word == needed.partition(".")[0])
    command = (
        command.replace(f" {word}", f" closed/{word}", 1)
        if "tiny.yaml" not in needed
        else command.replace("tiny.yaml", "closed/tiny.yaml")
    )
    try:
        done = in_child(command)
    finally:
        closed.rmdir()
    assert_explained(done, command, "closed", "permission denied|Permission denied")
