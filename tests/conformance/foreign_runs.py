"""What the tests of foreign commands have in common: a folder with the files a document names, a command run in it."""

import contextlib
import io
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gptworks.cli.main import main
from gptworks.config.load import from_dict
from gptworks.data import split
from gptworks.data.dataset import Dataset
from gptworks.errors import DataError


def fill(folder: Path, corpus: Path, tokenizer: Any) -> None:
    """The corpus and the vocabulary, small, under the names of OneFlow's and Megatron's documents."""
    texts = [text for text in corpus.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    lines = [json.dumps({"src": "here", "text": text, "id": str(n)}) + "\n" for n, text in enumerate(texts)]
    (folder / "my-corpus.json").write_text("".join(lines), encoding="utf-8")
    tokenizer.save_file(folder / "t.json")
    described = json.loads((folder / "t.json").read_text(encoding="utf-8"))
    (folder / "t.json").unlink()
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    (folder / "gpt2-vocab.json").write_text(json.dumps(described["model"]["vocab"] | added), encoding="utf-8")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]]
    (folder / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")


def paddle_corpus(folder: Path) -> None:
    """In ./data a corpus of small ids, as Paddle's tools write it."""
    draw = np.random.default_rng(0)
    lens = draw.integers(30, 200, size=60).astype(np.int32)
    (folder / "data").mkdir()
    np.save(folder / "data/corpus_ids.npy", draw.integers(0, 500, size=int(lens.sum())).astype(np.uint16))
    np.savez(folder / "data/corpus_idx.npz", lens=lens, docs=np.arange(len(lens) + 1, dtype=np.int64))


# Output and data that stand between the same marks as commands.
_NOT_SHELL = re.compile(r"(?:json|yaml|text|python)\n|\n?\[20|\n?\{\"src|\n?\|-")


def shell_blocks(shared_data: Path, number: int) -> list[str]:
    """Of one of the five documents, in their order."""
    return [block.partition("\n")[2] for block in _blocks(shared_data, number) if not _NOT_SHELL.match(block)]


def python_blocks(shared_data: Path, number: int) -> list[str]:
    found = [block for block in _blocks(shared_data, number) if block.startswith("python\n")]
    return [textwrap.dedent(block.partition("\n")[2]) for block in found]


def text_blocks(shared_data: Path, number: int) -> list[str]:
    """Those that a document marks as text: files, and what to do with them."""
    return [block.partition("\n")[2] for block in _blocks(shared_data, number) if block.startswith("text\n")]


def _blocks(shared_data: Path, number: int) -> list[str]:
    (document,) = (shared_data.parent / "seeds").glob(f"{number:03d}_*.txt")
    return re.findall(r"^``` ?(\w*\n.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def paddle_npz(path: Path) -> None:
    """A corpus of small ids in one file, as the older of Paddle's tools wrote it."""
    draw = np.random.default_rng(0)
    lens = draw.integers(30, 200, size=60).astype(np.uint16)
    np.savez(path, ids=draw.integers(0, 500, size=int(lens.sum())).astype(np.uint16), lens=lens)


def run(folder: Path, command: str, *options: str) -> int:
    """As a document writes it, on a CPU and small."""
    return main(["run", "--device", "cpu", "--shrink", "tiny", "--cwd", str(folder), *options, "--", command])


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def said(words: Sequence[str]) -> Said:
    """What our command line prints; for fixtures of a module, which have no capsys."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return Said(code, out.getvalue(), err.getvalue())


def paddle_pair(prefix: Path, documents: Sequence[np.ndarray]) -> None:
    """As PaddleNLP's and FleetX's tools write it."""
    prefix.parent.mkdir(exist_ok=True)
    np.save(f"{prefix}_ids.npy", np.concatenate(documents).astype(np.uint16))
    lens = np.array([len(document) for document in documents], np.int32)
    np.savez(f"{prefix}_idx.npz", lens=lens, docs=np.arange(len(lens) + 1, dtype=np.int64))


def parts_of(config: dict[str, Any], folder: Path) -> list[tuple[int, int] | None]:
    """First and last + 1 of the sequences that a translated command gives to training, held-out and test."""
    data = {**config["data"], "path": [str(folder / path) for path in config["data"]["path"]]}
    dataset = Dataset(from_dict({"data": data}).data, vocab_size=config["model"]["vocab_size"])
    found: list[tuple[int, int] | None] = []
    for part in split.SPLITS:
        try:
            (source,) = dataset.samples(part).sources
        except DataError:  # nothing is in it
            found.append(None)
        else:
            found.append((int(source.document_index.min()), int(source.document_index.max()) + 1))
    return found


def losses(run_folder: Path) -> list[tuple[int, float]]:
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [(each["step"], each["loss"]) for each in found if "loss" in each]


def train_again(folder: Path, file: str, out: str) -> list[tuple[int, float]]:
    """The losses of `gptworks train` on what a command was translated to."""
    values = yaml.safe_load((folder / file).read_text(encoding="utf-8"))
    values["data"]["path"] = [str(folder / path) for path in values["data"]["path"]]
    if "held_out_path" in values["data"]:
        values["data"]["held_out_path"] = [str(folder / path) for path in values["data"]["held_out_path"]]
    (folder / "again.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    assert main(["train", "-c", str(folder / "again.yaml"), "--out", str(folder / out)]) == 0
    return losses(folder / out)


def translate(capsys: Any, command: str, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["translate", "--json", *options, "--", command]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def flags_in(command: str) -> set[str]:
    return {word.partition("=")[0] for word in command.split() if word.startswith("--")}


def noted(translation: dict[str, Any]) -> set[str]:
    return {note["theirs"] for note in translation["notes"]}


def with_value(command: str, flag: str, value: str) -> str:
    """The command with another value of a flag that takes one."""
    words: list[str] = command.replace("\\\n", " ").split()
    at = words.index(flag)
    return " ".join([*words[: at + 1], value, *words[at + 2 :]])


def without(command: str, switch: str) -> str:
    return " ".join(word for word in command.replace("\\\n", " ").split() if word != switch)


def error_of(capsys: Any, words: Sequence[str]) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    return str(capsys.readouterr().err)
