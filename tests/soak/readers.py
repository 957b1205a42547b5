"""Every reader of files that others made: a whole example of each, and how it is read to the end."""

import contextlib
import csv
import functools
import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from test_characters import meta
from test_chat import TOOLS
from test_dataset_fuzz import dataset, located_outcome
from test_event_file import write_run
from test_gguf_llama_kind import model_of, weights_of
from test_hostile_weights import MODEL, weights
from test_llama2c import llama2c_model
from test_refused_by_the_system import RANK_TABLE
from test_text_in import parquet
from test_tokenizers_of_today import learned, learned_pieces, settings_of_pieces

from soak.campaign import Found
from soak.driver import CORPUS, RECIPE, TESTS

if TYPE_CHECKING:
    from gptworks.tokenizer import Tokenizer

SOME_WORDS = "a few words, 12 and more\n"
TEXT = CORPUS.read_bytes()[:6000]
SHIPPED = TESTS.parent / "src/gptworks/interop/shipped"


@dataclass(frozen=True)
class Reader:
    make: Callable[[Path], None]  # writes whole files into an empty folder
    read: Callable[[Path], object]  # reads all of it; a GPTWorksError is a good answer
    skip: tuple[str, ...] = ()  # endings of files that are never read
    writes: bool = False  # reading changes the folder


def command(*args: str | Path) -> None:
    """The command line in this process: 0 and 2 are good answers."""
    from gptworks.cli.main import main

    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            code = main([str(each) for each in args])
        except SystemExit as end:
            code = int(end.code or 0)
    if code not in (0, 2) or "Traceback" in told.getvalue():
        raise Found(f"gptworks {' '.join(map(str, args))}: exit {code}\n{told.getvalue()[-3000:]}")


def _dataset(name: str) -> Reader:
    from gptworks.data.formats import registry

    format_ = registry.FORMATS[name]

    def read(folder: Path) -> None:
        main = next((file for file in map(format_.find, sorted(folder.iterdir())) if file), None)
        if main is not None:
            located_outcome(main)

    return Reader(lambda folder: dataset(format_, folder) and None, read, skip=(".db",))


def _weights(name: str) -> Reader:
    from gptworks.checkpoint.systems import registry
    from gptworks.checkpoint.systems.contract import SplitSpec

    system = registry.system(name)

    def target(folder: Path) -> Path:
        return folder / f"x{system.SUFFIX}" if system.SUFFIX else folder

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if name == "llama2c":
            llama2c_model(target(folder))
        else:
            system.write(target(folder), weights(), SplitSpec(1, 1))

    def read(folder: Path) -> None:
        # Some formats do not carry the number of heads; a file of llama2.c has that of its own model.
        given = {} if name == "llama2c" else {"num_heads": MODEL.num_heads}
        found = registry.open_any(target(folder), given, name=name).require_whole()
        for tensor in found.tensors.values():
            tensor.read()
        found.open_tokenizer()

    return Reader(make, read)


def _tokenizer(kind: str) -> Reader:
    from gptworks.tokenizer import Tokenizer

    @functools.cache
    def trained() -> Tokenizer:
        return Tokenizer.train([TEXT.decode()], 400)

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        trained().save(folder)
        if kind == "vocab":
            spec = trained().spec["model"]
            (folder / "tokenizer.json").unlink()
            (folder / "vocab.json").write_text(json.dumps(spec["vocab"]))
            pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["merges"]]
            (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
        if kind == "sentencepiece":
            import sentencepiece

            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(TEXT.decode().splitlines()), model_writer=model, vocab_size=120, minloglevel=2
            )
            (folder / "sentencepiece.model").write_bytes(model.getvalue())

    def read(folder: Path) -> None:
        found = Tokenizer.from_pretrained(folder)
        found.decode(found.encode(SOME_WORDS))
        _ = found.identity, found.byte_lengths

    return Reader(make, read)


def _use(found: "Tokenizer") -> None:
    """All that a model's folder may bring along with its words, the chat template too."""
    from gptworks.tokenizer import chat

    found.decode(found.encode(SOME_WORDS))
    _ = found.identity, found.byte_lengths
    if found.special.chat_template is not None:
        chat.render(found, [{"role": "user", "content": "Hello"}])


def _published_tokenizer(make: Callable[[Path], object]) -> Reader:
    from gptworks.tokenizer import Tokenizer

    return Reader(lambda folder: make(folder) and None, lambda folder: _use(Tokenizer.from_pretrained(folder)))


def _characters(folder: Path) -> None:
    meta(folder, SOME_WORDS)


def _pieces(folder: Path) -> None:
    from gptworks.checkpoint.systems import gguf_vocabulary

    settings = settings_of_pieces(learned_pieces(), **{"tokenizer.chat_template": TOOLS})
    found = gguf_vocabulary.from_settings(settings, "x")
    assert found is not None
    found.save(folder)


def _model_of_a_kind(system_name: str, kind: str, split_name: str) -> Reader:
    """A model that is no GPT-2, with the words of one of today."""
    from gptworks.checkpoint.systems import registry
    from gptworks.tokenizer import Tokenizer, splits
    from gptworks.tokenizer.special_tokens import SpecialTokens

    system = registry.system(system_name)
    split = next(each for each in splits.ALL if each.name == split_name)

    def target(folder: Path) -> Path:
        return folder / f"x{system.SUFFIX}" if system.SUFFIX else folder

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        words = Tokenizer(learned(split), name="x", eod_token="<|eot_id|>", special=SpecialTokens(chat_template=TOOLS))
        model = model_of(kind).model_copy(update={"vocab_size": words.vocab_size})
        system.write(target(folder), replace(weights_of(model), tokenizer=lambda: words))
        if not system.SUFFIX:
            words.save(folder)

    def read(folder: Path) -> None:
        found = registry.open_any(target(folder), name=system_name).require_whole()
        for tensor in found.tensors.values():
            tensor.read()
        words = found.open_tokenizer()
        if words is not None:
            _use(words)

    return Reader(make, read)


def _records() -> Reader:
    """What a run wrote down of itself, as reports and trackers read it."""
    from gptworks import run_paths
    from gptworks.report import page, run_data
    from gptworks.train import event_file, trackers

    def read(folder: Path) -> None:
        page.written([run_data.read(folder)]).encode(errors="replace")
        command("inspect", folder, "--events")
        before = sorted(folder.iterdir())
        trackers.Begun(folder, 3, {}, "project")
        content = (folder / run_paths.EVENTS).read_bytes()
        event_file.forget_after(folder, 10**6, 10**6, lambda _: None)
        (folder / run_paths.EVENTS).write_bytes(content)
        (folder / f"{run_paths.EVENTS}.bad").unlink(missing_ok=True)
        if sorted(folder.iterdir()) != before:
            raise Found("files came or went")

    return Reader(write_run, read)


def _text(name: str, content: Callable[[], bytes]) -> Reader:
    from gptworks.data import corpus
    from gptworks.data.text_blocks import TextRules

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content())

    def read(folder: Path) -> None:
        for _ in corpus.read_documents([str(folder / name)], TextRules(), corpus.Skipped(strict=False)):
            pass

    return Reader(make, read)


def _lines() -> bytes:
    return b"".join(json.dumps({"text": part.decode()}).encode() + b"\n" for part in TEXT.split(b"\n\n"))


def _table(delimiter: str) -> bytes:
    made = io.StringIO()
    writer = csv.writer(made, delimiter=delimiter)
    writer.writerow(["id", "text"])
    writer.writerows([[number, part.decode()] for number, part in enumerate(TEXT.split(b"\n\n"))])
    return made.getvalue().encode()


def _arrow() -> bytes:
    import pyarrow

    made = io.BytesIO()
    table = pyarrow.table({"text": [part.decode() for part in TEXT.split(b"\n\n")]})
    with pyarrow.ipc.new_stream(made, table.schema) as stream:
        stream.write_table(table)
    return made.getvalue()


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in {"a.txt": TEXT, "b/c.jsonl": _lines(), "d.txt.gz": gzip.compress(TEXT)}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def _zst() -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(TEXT)


def _yaml(text: str) -> Reader:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x.yaml").write_text(text, encoding="utf-8")

    def read(folder: Path) -> None:
        command("config", "check", "-c", folder / "x.yaml")

    return Reader(make, read)


def _foreign_yaml(file: Path) -> Reader:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / "x.yaml")

    return Reader(make, lambda folder: command("translate", folder / "x.yaml"))


def _foreign_script(name: str) -> Reader:
    """A script of another system: it is read, nothing in it is run."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(SHIPPED / name, folder / "x.sh")

    return Reader(make, lambda folder: command("run", "--dry-run", "--cwd", folder, folder / "x.sh"))


def _rank_table() -> Reader:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.json").write_text(RANK_TABLE)

    return Reader(make, lambda folder: command("launch", "--show-rank-table", folder / "table.json"))


def _run_folder(*, goes_on: bool) -> Reader:
    """A run of ours: manifest, metrics, configuration, state."""

    def make(folder: Path) -> None:
        # Beside the folder that is damaged: the store is read as it is.
        store, recipe = folder.parent / "store", folder.parent / "tiny.yaml"
        command("prepare", CORPUS, "--train-tokenizer", "512", "--append-eod", "--out", store)
        recipe.write_text(RECIPE.format(store=store))
        command("train", "-c", recipe, "--out", folder, "train.steps=2")

    def read(folder: Path) -> None:
        command("verify", folder)
        command("inspect", folder)
        command("plot", folder)
        if goes_on:
            command("train", "-c", folder / "config.yaml", "--out", folder, "--resume", "auto", "train.steps=3")

    return Reader(make, read, writes=True)


def all_readers() -> dict[str, Callable[[], Reader]]:
    """By name; each is built when it is its turn."""
    import bz2
    import lzma

    from gptworks.checkpoint.systems import registry as systems
    from gptworks.data.formats import registry as formats

    found: dict[str, Callable[[], Reader]] = {}
    found |= {f"dataset-{name}": functools.partial(_dataset, name) for name in formats.FORMATS}
    found |= {f"weights-{name}": functools.partial(_weights, name) for name in systems.NAMES if name != "gptworks"}
    found |= {f"tokenizer-{kind}": functools.partial(_tokenizer, kind) for kind in ("json", "vocab", "sentencepiece")}
    texts: dict[str, Callable[[], bytes]] = {
        "a.txt": lambda: TEXT,
        "a.jsonl": _lines,
        "a.json": lambda: b"[" + b",\n".join(_lines().splitlines()) + b"]",
        "a.tokens": lambda: b"\n = Title = \n\n" + TEXT,
        "a.txt.gz": lambda: gzip.compress(TEXT),
        "a.jsonl.xz": lambda: lzma.compress(_lines()),
        "a.txt.bz2": lambda: bz2.compress(TEXT),
        "a.txt.zst": _zst,
        "a.tar": _tar,
        "a.tar.gz": lambda: gzip.compress(_tar()),
        "a.csv": lambda: _table(","),
        "a.tsv": lambda: _table("\t"),
        "a.arrow": _arrow,
        "a.parquet": lambda: parquet([part.decode() for part in TEXT.split(b"\n\n")]),
    }
    found |= {f"text-{name}": functools.partial(_text, name, content) for name, content in texts.items()}
    for file in sorted((TESTS.parent / "recipes").glob("*.yaml"))[:6]:
        found[f"yaml-{file.stem}"] = functools.partial(_yaml, file.read_text(encoding="utf-8"))
    for file in sorted(SHIPPED.glob("*.yaml"))[:6]:
        found[f"foreign-{file.stem}"] = functools.partial(_foreign_yaml, file)
    found |= {
        f"script-{file.stem}": functools.partial(_foreign_script, file.name) for file in sorted(SHIPPED.glob("*.sh"))
    }
    found["tokenizer-of-characters"] = functools.partial(_published_tokenizer, _characters)
    found["tokenizer-of-pieces"] = functools.partial(_published_tokenizer, _pieces)
    kinds = {"gguf": ("qwen3", "qwen2"), "gguf-q8_0": ("llama, own head, theta", "llama-bpe"),
             "gguf-q4_0": ("qwen2", "qwen2"), "hf": ("llama, yarn", "smollm")}  # fmt: skip
    for system, (kind, split) in kinds.items():
        found[f"weights-{system}-{kind.partition(',')[0]}"] = functools.partial(_model_of_a_kind, system, kind, split)
    found["records"] = _records
    found["rank-table"] = _rank_table
    found["run-looked-at"] = functools.partial(_run_folder, goes_on=False)
    found["run-folder"] = functools.partial(_run_folder, goes_on=True)
    return found
