"""Raw text as data.path: a small corpus is prepared into the run folder before anything else is done."""

import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptworks import run_paths
from gptworks.checkpoint.pretrained import Pretrained, fields_not_stored
from gptworks.config.derive import require_end
from gptworks.config.schema import DataConfig, RunConfig
from gptworks.counted import counted
from gptworks.data.pieces import cut_by_position
from gptworks.data.prepare import CHARACTERS, LEARNED, PrepareJob, Summary, learn_tokenizer, prepare, train_tokenizer
from gptworks.data.store import Store, is_raw_text, locate_stores
from gptworks.data.text_blocks import TextRules
from gptworks.data.text_files import list_inputs, matching
from gptworks.errors import DataError, GPTWorksError
from gptworks.launch import process_group, rank_env
from gptworks.launch.devices import pick_device
from gptworks.launch.ranks import Ranks
from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.bundled import SIZE
from gptworks.train.run_folder import refuse_foreign
from gptworks.train.setup import identity

FOLDER = run_paths.INPUTS  # in the run folder: what was not a dataset and training reads from disk
MOST_BYTES = 64 * 1024**2  # of input files; more is better prepared once, by a command that shows how far it is


def prepared(cfg: RunConfig, resume: str, *, tokenizer: Tokenizer | None = None) -> RunConfig:
    """The configuration with stores in the place of texts, which are written by the main process.

    `tokenizer`: of the model, where it is in memory.
    """
    texts = _texts_in(cfg.data)
    if not texts:
        return cfg
    folder = Path(cfg.run.out) / FOLDER
    changed = cfg.model_copy(update={"data": _with_stores(cfg.data, texts, folder)})
    _require_device(cfg.run.device)

    def write() -> None:
        refuse_foreign(Path(cfg.run.out), resume)
        _write(cfg, texts, folder, tokenizer)

    on_main(cfg, write)
    return changed


def on_main(cfg: RunConfig, function: Callable[[], None]) -> None:
    """Before training: processes that were started share the run folder; one of them writes, the others wait."""
    is_alone = rank_env.read(os.environ).world_size == 1
    world = None if is_alone else process_group.start(cfg.parallel, cfg.run, identity(cfg))
    Ranks.shared(world).on_main(function)


@contextmanager
def for_trial(cfg: RunConfig) -> Iterator[RunConfig]:
    """Text prepared for a look before training: nothing of it stays."""
    texts = _texts_in(cfg.data)
    with tempfile.TemporaryDirectory() as folder:
        if texts:
            require_end(cfg.train)  # before the text is prepared, which takes its time
            _require_device(cfg.run.device)
            _write(cfg, texts, Path(folder), None, is_kept=False)
            cfg = cfg.model_copy(update={"data": _with_stores(cfg.data, texts, Path(folder))})
        yield cfg


def _require_device(device: str) -> None:
    """Asks for the device before the text is prepared. Of several processes each asks for its own, once connected."""
    if rank_env.read(os.environ).world_size == 1:
        pick_device(device)


def _texts_in(data: DataConfig) -> dict[str, str]:
    """Each text of data.path and data.held_out_path, and the name of the store it becomes."""
    names: dict[str, str] = {}
    for path in (*data.path, *data.held_out_path):
        if path not in names and is_raw_text(path):
            name = _name_of(path)
            names[path] = name if name not in names.values() else f"{name}-{len(names) + 1}"
    return names


def _name_of(path: str) -> str:
    """The name of a file without its endings, of a folder, or of the folder of a pattern."""
    place = Path(path) if matching(path) is None else Path(path).parent
    name = place.resolve().name.partition(".")[0]
    return name if name and matching(name) is None else "text"


def _with_stores(data: DataConfig, texts: dict[str, str], folder: Path) -> DataConfig:
    changes = {
        key: tuple(str(folder / texts[path]) if path in texts else path for path in getattr(data, key))
        for key in ("path", "held_out_path")
    }
    known = {"tokenizer": _named(data), "key": ""}  # what the stores say themselves is not repeated
    return data.model_copy(update={**changes, **known})


def _named(data: DataConfig) -> str:
    """A vocabulary of characters is learned from the text, and the stores know it then."""
    return "" if data.tokenizer == CHARACTERS else data.tokenizer


def _rules(data: DataConfig) -> TextRules:
    return TextRules((data.key or "text",), keep_separator=False)


def _write(
    cfg: RunConfig, texts: dict[str, str], folder: Path, tokenizer: Tokenizer | None, *, is_kept: bool = True
) -> None:
    sources = {path: _source(path) for path in texts}
    missing = [path for path, name in texts.items() if not _is_there(path, folder / name, sources[path])]
    for path in missing:
        _refuse_large(path, sources[path], _by_hand(path, cfg))
    if not missing:
        return
    with _options_named(missing[0], cfg):
        chosen = tokenizer or choose_tokenizer(cfg, folder)
    for path in missing:
        prefix = folder / texts[path]
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with _options_named(path, cfg):
            summary = prepare(
                PrepareJob([path], prefix, chosen, rules=_rules(cfg.data), append_eod=chosen.eod_id is not None)
            )
        shares = () if cfg.data.held_out_path else cfg.data.split
        tell(f"{path} is text", summary, chosen, cut_by_position(prefix, shares), is_kept=is_kept)
        _note_of(prefix).write_text(json.dumps(sources[path]) + "\n", encoding="utf-8")


def tell(source: str, summary: Summary, tokenizer: Tokenizer, pieces: int, *, is_kept: bool = True) -> None:
    """What text has become, on the lines with which a run begins. `pieces`: into which it was cut by position."""
    where = f"prepared as {summary.prefix}" if is_kept else "prepared for this look only"
    print(
        f"data:  {source}: {counted(summary.documents, 'document')}, {counted(summary.tokens, 'token')} "
        f"{_vocabulary(tokenizer)}, {where}",
        flush=True,
    )
    if pieces:
        print(
            f"data:  {counted(summary.documents, 'document')} cannot be divided as data.split asks: the text is cut "
            f"by position into {pieces} pieces of equal length, of which the last are held out",
            flush=True,
        )
    for line in [*(f"skipped {each}" for each in summary.skipped.first), *summary.notes]:
        print(f"data:  {line}", flush=True)
    if summary.skipped.count:
        print(f"data:  {counted(summary.skipped.count, 'line')} skipped", flush=True)


def _vocabulary(tokenizer: Tokenizer) -> str:
    if tokenizer.name in LEARNED:
        return f"of a vocabulary of {tokenizer.vocab_size:,} learned from the text"
    return f"of the tokenizer {tokenizer.name} ({tokenizer.vocab_size:,})"


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


def _refuse_large(path: str, source: list[list[Any]], by_hand: str) -> None:
    size = sum(size for _, size, _ in source)
    if size > MOST_BYTES:
        raise DataError(
            f"data.path: {path} is {size / 1e6:,.0f} MB of text; up to {MOST_BYTES / 1e6:,.0f} MB are prepared on the "
            f"way. {by_hand}"
        )


def _by_hand(path: str, cfg: RunConfig, key: str = "") -> str:
    """The command that does the same as this run would have, with its options. `key`: that is missing."""
    command = ["gptworks", "prepare", path]
    if key or cfg.data.key:
        command += ["--key", key or cfg.data.key]
    learned = _size_to_learn(cfg.data.tokenizer, cfg.model.vocab_size)
    if cfg.data.tokenizer not in ("", CHARACTERS) or cfg.init.checkpoint:
        command += ["--tokenizer", cfg.data.tokenizer or cfg.init.checkpoint]
    elif learned:
        command += ["--train-tokenizer", str(learned)]
    store = f"data/{_name_of(path)}"
    return f"By hand: `{shlex.join([*command, '--append-eod', '--out', store])}`, then data.path={store}."


@contextmanager
def _options_named(path: str, cfg: RunConfig) -> Iterator[None]:
    """What is wrong with a text is often fixed by an option, and the command that has it is named."""
    try:
        yield
    except DataError as error:
        named = re.search(r"--key ([\w.-]*\w)", str(error))
        problem = re.sub(r"--key ([\w.-]*\w)", r"data.key=\1", str(error))
        problem = re.sub(r"with --key\b", "with data.key=NAME", problem)
        key = named[1] if named else "NAME" if problem != str(error) else ""
        raise DataError(f"data.path: {problem} {_by_hand(path, cfg, key)}") from None


def _size_to_learn(tokenizer: str, vocab_size: int) -> int | str:
    """The size of a vocabulary for the text; 0 where GPT-2's fits the model."""
    if tokenizer == CHARACTERS:
        return CHARACTERS
    return vocab_size if vocab_size < SIZE else 0


def choose_tokenizer(cfg: RunConfig, folder: Path, in_memory: Iterable[str] | None = None) -> Tokenizer:
    """Named, or of the weights or the other stores; else GPT-2's, or for a smaller vocabulary one that is learned.

    `folder`: in which texts become stores. `in_memory`: what is trained on, where it is not in files.
    """
    texts = _texts_in(cfg.data)
    if cfg.data.tokenizer and cfg.data.tokenizer != CHARACTERS:
        return Tokenizer.from_pretrained(cfg.data.tokenizer)
    if cfg.init.checkpoint:
        opened = Pretrained.open(cfg.init.checkpoint, shape=fields_not_stored(cfg.model.model_dump()))
        if opened.tokenizer is None:
            raise DataError(
                f"{opened.folder}: has no tokenizer, and {next(iter(texts), 'the data')} is text. Name one with "
                "data.tokenizer=gpt2 or data.tokenizer=FOLDER, or put tokenizer.json beside the weights."
            )
        return opened.require_tokenizer()
    size = _size_to_learn(cfg.data.tokenizer, cfg.model.vocab_size)
    if in_memory is not None:
        return learn_tokenizer(in_memory, size) if size else Tokenizer.from_pretrained("gpt2")
    for path in (*cfg.data.path, *cfg.data.held_out_path):
        try:
            stores = locate_stores(str(folder / texts[path]) if path in texts else path)
        except GPTWorksError:  # opening it to train says what is wrong
            continue
        if stores and (known := Store(stores[0]).load_tokenizer()):
            return known
    learned_from = [path for path in cfg.data.path if path in texts]
    if not learned_from or not size:
        return Tokenizer.from_pretrained("gpt2")
    return train_tokenizer(learned_from, size, _rules(cfg.data))
