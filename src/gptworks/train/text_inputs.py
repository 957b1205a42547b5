"""Raw text as data.path: a small corpus is prepared into the run folder before anything else is done."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptworks.checkpoint.pretrained import Pretrained, unseen
from gptworks.config.schema import RunConfig
from gptworks.data.formats import registry
from gptworks.data.prepare import CHARACTERS, prepare, train_tokenizer
from gptworks.data.store import Store, locate_stores
from gptworks.data.text_blocks import TextRules
from gptworks.data.text_files import is_text, list_inputs
from gptworks.errors import DataError, GPTWorksError
from gptworks.launch import process_group, rank_env
from gptworks.launch.ranks import Ranks
from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.bundled import SIZE
from gptworks.train.run_folder import refuse_foreign
from gptworks.train.setup import identity

FOLDER = ".inputs"  # in the run folder: what was not a dataset and training reads from disk
MOST_BYTES = 64 * 1024**2  # of input files; more is better prepared once, by a command that shows how far it is


def prepared(cfg: RunConfig, resume: str, *, tokenizer: Tokenizer | None = None) -> RunConfig:
    """The configuration with stores in the place of texts, which are written by the main process.

    `tokenizer`: of the model, where it is in memory.
    """
    texts = _texts_in(cfg)
    if not texts:
        return cfg
    changed = _with_stores(cfg, texts, Path(cfg.run.out) / FOLDER)

    def write() -> None:
        refuse_foreign(Path(cfg.run.out), resume)
        _write(cfg, texts, Path(cfg.run.out) / FOLDER, tokenizer)

    main_does(cfg, write)
    return changed


def main_does(cfg: RunConfig, function: Callable[[], None]) -> None:
    """Before training: processes that were started share the run folder; one of them writes, the others wait."""
    is_alone = rank_env.read(os.environ).world_size == 1
    world = None if is_alone else process_group.start(cfg.parallel, cfg.run, identity(cfg))
    Ranks.shared(world).main_does(function)


@contextmanager
def for_trial(cfg: RunConfig) -> Iterator[RunConfig]:
    """The same for a look before training: nothing of it stays."""
    texts = _texts_in(cfg)
    with tempfile.TemporaryDirectory() as folder:
        if texts:
            _write(cfg, texts, Path(folder), None)
        yield _with_stores(cfg, texts, Path(folder)) if texts else cfg


def is_raw_text(path: str) -> bool:
    """A file or folder of text in which there is no dataset."""
    if not is_text(path):
        return False
    if Path(path).is_dir():
        return not registry.locate_all(Path(path))
    return all(format_.find(Path(path)) is None for format_ in registry.FORMATS.values())


def _texts_in(cfg: RunConfig) -> dict[str, str]:
    """Each text of data.path and data.held_out_path, and the name of the store it becomes."""
    names: dict[str, str] = {}
    for path in (*cfg.data.path, *cfg.data.held_out_path):
        if path not in names and is_raw_text(path):
            name = Path(path).resolve().name.partition(".")[0] or "text"
            names[path] = name if name not in names.values() else f"{name}-{len(names) + 1}"
    return names


def _with_stores(cfg: RunConfig, texts: dict[str, str], folder: Path) -> RunConfig:
    changes = {
        key: tuple(str(folder / texts[path]) if path in texts else path for path in getattr(cfg.data, key))
        for key in ("path", "held_out_path")
    }
    known = {"tokenizer": _named(cfg), "key": ""}  # what the stores say themselves is not repeated
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={**changes, **known})})


def _named(cfg: RunConfig) -> str:
    """A vocabulary of characters is learned from the text, and the stores know it then."""
    return "" if cfg.data.tokenizer == CHARACTERS else cfg.data.tokenizer


def _rules(cfg: RunConfig) -> TextRules:
    return TextRules((cfg.data.key or "text",), keep_separator=False)


def _write(cfg: RunConfig, texts: dict[str, str], folder: Path, tokenizer: Tokenizer | None) -> None:
    sources = {path: _source(path) for path in texts}
    missing = [path for path, name in texts.items() if not _is_there(path, folder / name, sources[path])]
    for path in missing:
        _refuse_large(path, sources[path])
    if not missing:
        return
    with _options_named(missing[0]):
        chosen = tokenizer or _tokenizer(cfg, texts, folder)
    for path in missing:
        prefix = folder / texts[path]
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with _options_named(path):
            summary = prepare([path], prefix, chosen, rules=_rules(cfg), append_eod=chosen.eod_id is not None)
        _note_of(prefix).write_text(json.dumps(sources[path]) + "\n", encoding="utf-8")
        print(
            f"data:  {path} is text: {summary.documents:,} documents, {summary.tokens:,} tokens of {chosen.name} "
            f"({chosen.vocab_size:,} tokens), prepared as {prefix}",
            flush=True,
        )
        for line in [*(f"skipped {each}" for each in summary.skipped.first), *summary.notes]:
            print(f"data:  {line}", flush=True)
        if summary.skipped.count:
            print(f"data:  {summary.skipped.count:,} lines skipped", flush=True)


def _source(path: str) -> list[list[Any]]:
    """What decides whether a text is the one that was prepared."""
    files, _ = list_inputs([path])
    return [[each.name, each.size, each.modified] for each in files]


def _note_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.source.json")


def _is_there(path: str, prefix: Path, source: list[list[Any]]) -> bool:
    try:
        before = json.loads(_note_of(prefix).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if before != source:
        raise DataError(
            f"data.path: {path} has changed since this run prepared it as {prefix}. Go on with data.path={prefix}, or "
            "start anew in another --out."
        )
    return True


def _refuse_large(path: str, source: list[list[Any]]) -> None:
    size = sum(size for _, size, _ in source)
    if size > MOST_BYTES:
        raise DataError(
            f"data.path: {path} is {size / 1e6:,.0f} MB of text; up to {MOST_BYTES / 1e6:,.0f} MB are prepared on the "
            f"way. {_by_hand(path)}"
        )


def _by_hand(path: str) -> str:
    name = Path(path).resolve().name.partition(".")[0] or "text"
    return f"By hand: `gptworks prepare {path} --append-eod --out data/{name}`, then data.path=data/{name}."


@contextmanager
def _options_named(path: str) -> Iterator[None]:
    """What is wrong with a text is often mended by an option, and the command that has it is named."""
    try:
        yield
    except DataError as error:
        said = str(error).replace("with --key", "with data.key=NAME")
        raise DataError(f"data.path: {said} {_by_hand(path)}") from None


def _tokenizer(cfg: RunConfig, texts: dict[str, str], folder: Path) -> Tokenizer:
    """Named, or of the weights or the other stores; else GPT-2's, or for a smaller vocabulary one that is learned."""
    if cfg.data.tokenizer and cfg.data.tokenizer != CHARACTERS:
        return Tokenizer.from_pretrained(cfg.data.tokenizer)
    if cfg.init.checkpoint:
        opened = Pretrained.open(cfg.init.checkpoint, shape=unseen(cfg.model.model_dump()))
        return opened.require_tokenizer()
    for path in (*cfg.data.path, *cfg.data.held_out_path):
        try:
            stores = locate_stores(str(folder / texts[path]) if path in texts else path)
        except GPTWorksError:  # opening it to train says what is wrong
            continue
        if stores and (known := Store(stores[0]).load_tokenizer()):
            return known
    learned_from = [path for path in cfg.data.path if path in texts]
    size = CHARACTERS if cfg.data.tokenizer == CHARACTERS else cfg.model.vocab_size
    if not learned_from or (isinstance(size, int) and size >= SIZE):
        return Tokenizer.from_pretrained("gpt2")
    return train_tokenizer(learned_from, size, _rules(cfg))
