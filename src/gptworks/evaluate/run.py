"""A task on one or several models, and the result as a dictionary: what `gptworks eval` does."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptworks.checkpoint import folder
from gptworks.checkpoint.pretrained import Pretrained, PretrainedGPT
from gptworks.config.load import from_dict
from gptworks.data.dataset import Dataset
from gptworks.data.prepare import prepare
from gptworks.data.store import is_raw_text, sha256_of
from gptworks.data.text_blocks import TextRules
from gptworks.data.windows import OrderedSamples, Sample, Source
from gptworks.errors import DataError, TokenizerError, UsageError
from gptworks.evaluate import identity, lambada, wikitext
from gptworks.evaluate.documents import Document, StoreDocuments, score_documents
from gptworks.evaluate.heldout import held_out_loss
from gptworks.evaluate.progress import Watcher
from gptworks.evaluate.records import Records
from gptworks.evaluate.report import published_beside
from gptworks.evaluate.scoring import Score
from gptworks.tokenizer import Tokenizer

TASKS = ("heldout", "wikitext", "lambada")
PARTS = {"train": "train", "held-out": "held_out", "test": "test", "all": "train"}  # split as users say it -> part


@dataclass(frozen=True)
class Request:
    task: str
    data: str
    protocol: str = ""  # empty = the task's first
    overlap: int | None = wikitext.DEFAULT_OVERLAP  # None = windows side by side
    shorten: bool = False  # lambada: a passage that is too long loses its beginning, under every protocol
    limit: int = 0  # samples, windows or passages; 0 = all
    batch_size: int = 8
    device: str = "auto"
    weights: str = "fp32"  # how matrices are kept: fp32, bf16 or int8
    tokenizer: str | None = None  # instead of that beside the weights
    shape: Mapping[str, object] = field(default_factory=dict)  # of the model, where its files do not say
    per_document: Path | None = None
    split: str = "held-out"
    shares: str | None = None
    key: str = ""  # key or column of text that is not a store; empty = text
    seq_len: int | None = None  # predicted tokens per sample; None = as in training, or the model's context
    baselines: bool = False
    published: bool = False  # others' figures beside the result


@dataclass(frozen=True)
class Subject:
    """A model that is measured."""

    path: str
    model: PretrainedGPT
    weights_sha256: str
    kept_in: str

    @classmethod
    def load(cls, path: str, request: Request) -> "Subject":
        stated: dict[str, Any] = {"tokenizer": request.tokenizer, "shape": request.shape}
        opened = Pretrained.open(path, **stated)
        model = PretrainedGPT.from_pretrained(path, device=request.device, weights=request.weights, **stated)
        return cls(path, model, identity.of_weights(opened), request.weights)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.model.tokenizer is None:
            raise TokenizerError(
                f"{self.path}: has no tokenizer, and this task is text. Name one with --tokenizer, or put "
                "tokenizer.json (or vocab.json and merges.txt, or a sentencepiece .model) beside the weights."
            )
        return self.model.tokenizer

    def row(self) -> dict[str, Any]:
        tokenizer = self.model.tokenizer
        named = {"name": tokenizer.name, "identity": tokenizer.identity} if tokenizer else None
        return {
            "model": self.path,
            "weights_sha256": self.weights_sha256,
            "weights_kept_in": self.kept_in,
            "tokenizer": named,
        }


def evaluate(models: Sequence[str], request: Request, watcher: Watcher | None = None) -> dict[str, Any]:
    """One row per model. With `per_document` an interrupted evaluation is continued by the same call."""
    _check(models, request)
    tasks = {"heldout": _heldout, "wikitext": _wikitext, "lambada": _lambada}
    result: dict[str, Any] = {}
    for path in models:  # one after the other: two need not fit into memory together
        measured = tasks[request.task](Subject.load(path, request), request, watcher or Watcher())
        if not result:
            result = measured
        else:
            if measured["protocol"] != result["protocol"]:
                measured["remarks"].append(f"{path} was measured otherwise: {measured['protocol']}")
            known = [row for row in result["rows"] if "weights_sha256" not in row]
            result["rows"] += [row for row in measured["rows"] if row not in known]  # baselines once
            result["remarks"] += [remark for remark in measured["remarks"] if remark not in result["remarks"]]
    result["rows"].sort(key=lambda row: "weights_sha256" not in row)  # the simple models last
    return result


def _check(models: Sequence[str], request: Request) -> None:
    if not models:
        raise UsageError("--model: none given. Needed: at least one.")
    if request.task not in TASKS:
        raise UsageError(f"--task: no task '{request.task}'. Tasks: {', '.join(TASKS)}.")
    if request.batch_size < 1:
        raise UsageError(f"--batch-size: got {request.batch_size}; needs 1 or more.")
    if request.limit < 0:
        raise UsageError(f"--limit: got {request.limit}; needs 1 or more, or 0 for everything.")
    if request.per_document and len(models) > 1:
        raise UsageError(f"--per-document: one file holds one model's documents, but {len(models)} models were given.")
    if request.task == "heldout" and request.protocol:
        raise UsageError(f"--protocol: got '{request.protocol}', but heldout has one way only. Leave it out.")
    if request.task == "lambada":
        lambada.find_protocol(request.protocol or "strict")
    if request.task != "heldout":
        for option, given in (
            ("--split", request.split != "held-out"),
            ("--shares", request.shares),
            ("--key", request.key),
            ("--seq-len", request.seq_len),
            ("--baselines", request.baselines),
        ):
            if given:
                raise UsageError(f"{option}: is for --task heldout, got --task {request.task}. Leave it out.")


def _records(subject: Subject, request: Request, head: dict[str, Any], total: int) -> Records:
    tokenizer = subject.model.tokenizer
    header = {
        **head,
        "weights_sha256": subject.weights_sha256,
        "tokenizer": tokenizer.identity if tokenizer else None,
        "weights_kept_in": subject.kept_in,
    }
    return Records(request.per_document, header, total)


def _score(
    subject: Subject, request: Request, head: dict[str, Any], documents: Sequence[Document], watcher: Watcher
) -> list[Score]:
    with _records(subject, request, head, len(documents)) as records:
        return score_documents(
            subject.model, documents, records, batch_size=request.batch_size, watcher=watcher, what=subject.path
        )


def _file_head(request: Request, protocol: str) -> dict[str, Any]:
    if not Path(request.data).is_file():
        raise DataError(f"{request.data}: no such file. The task {request.task} reads one file of text.")
    return {"task": request.task, "protocol": protocol, "data_sha256": sha256_of(Path(request.data))}


def _result(request: Request, head: dict[str, Any], rows: list[dict[str, Any]], remarks: list[str]) -> dict[str, Any]:
    return {
        "task": request.task,
        "protocol": head["protocol"],
        "data": {"path": request.data, "sha256": head["data_sha256"]},
        "limit": request.limit or None,
        "rows": rows,
        "remarks": remarks + ([f"only the first {request.limit} were measured"] if request.limit else []),
        "published": published_beside(request.task) if request.published else [],
    }


# WikiText


def _wikitext(subject: Subject, request: Request, watcher: Watcher) -> dict[str, Any]:
    protocol = request.protocol or wikitext.PROTOCOLS[0]
    length = subject.model.cfg.max_positions
    head = _file_head(request, wikitext.protocol_name(protocol, request.overlap)) | {"context": length}
    tokenizer = subject.tokenizer
    stream = wikitext.read_stream(Path(request.data), tokenizer, protocol)
    rows = wikitext.window_rows(stream.tokens, length, length if request.overlap is None else request.overlap)
    rows = rows[: request.limit or None]
    scores = _score(subject, request, head, [[row] for row in rows], watcher)
    measured = wikitext.summarize(stream, rows, scores, tokenizer.byte_lengths)
    row = subject.row() | {
        "loss": measured.loss,
        "perplexity": measured.perplexity,
        "adjusted_perplexity": measured.adjusted_perplexity,
        "token_ratio": measured.token_ratio,
        "bits_per_byte": measured.bits_per_byte,
        "tokens": measured.tokens,
        "windows": measured.windows,
        "bytes": measured.text_bytes,
        "stream_tokens": len(stream.tokens),
        "original_pieces": stream.num_original,
        "context": length,
    }
    return _result(request, head, [row], [])


# LAMBADA


def _lambada(subject: Subject, request: Request, watcher: Watcher) -> dict[str, Any]:
    protocol = lambada.find_protocol(request.protocol or "strict")
    shortens = "; long passages lose their beginning" if request.shorten and not protocol.drops_the_beginning else ""
    head = _file_head(request, f"{protocol.name}: {protocol.meaning}{shortens}")
    tokenizer = subject.tokenizer
    passages = lambada.read_passages(Path(request.data), request.limit)
    questions = lambada.rows_of(
        passages, tokenizer, protocol, subject.model.cfg.max_positions, where=request.data, shorten=request.shorten
    )
    scores = _score(subject, request, head, [[row] for row in questions.rows], watcher)
    measured = lambada.summarize(scores, questions.shortened)
    row = subject.row() | {
        "correct": measured.correct,
        "total": measured.total,
        "accuracy": measured.accuracy,
        "target_perplexity": measured.target_perplexity,
        "tokens": sum(score.tokens for score in scores),
        "shortened": measured.shortened,
    }
    remark = lambada.remark_on(protocol, passages)
    return _result(request, head, [row], [remark] if remark else [])


# Held-out text of a dataset


class _Watched:
    """The samples of a part, or the first of them; the watcher is told of every batch."""

    def __init__(self, samples: OrderedSamples, limit: int, watcher: Watcher) -> None:
        self.samples, self.limit, self.watcher = samples, limit, watcher

    @property
    def sources(self) -> Sequence[Source]:
        return self.samples.sources

    @property
    def per_epoch(self) -> int:
        return min(self.limit or self.samples.per_epoch, self.samples.per_epoch)

    def at(self, first: int, count: int) -> list[Sample]:
        self.watcher.batch(first, [])
        return self.samples.at(first, count)


def default_split(data: str, task: str = "heldout") -> str:
    """All of a text that nobody has shared out; of a dataset, what training held out."""
    return "all" if task == "heldout" and is_raw_text(data) else "held-out"


@contextmanager
def as_store(data: str, tokenizer: Tokenizer, key: str = "") -> Iterator[str]:
    """Text as a store for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        rules = TextRules((key or "text",), keep_separator=False)
        try:
            prepare([data], path, tokenizer, rules=rules, append_eod=tokenizer.eod_id is not None, strict=True)
            yield str(path)
        except DataError as error:
            said = str(error).replace(f"{path}.bin", data).replace(", or leave out --strict to skip such lines", "")
            raise type(error)(said) from None


def _heldout(subject: Subject, request: Request, watcher: Watcher) -> dict[str, Any]:
    if not is_raw_text(request.data):
        if request.key:
            raise UsageError(f"--key: got '{request.key}', but {request.data} is not text. Leave it out.")
        return _measured(subject, request, watcher, request.data)
    with as_store(request.data, subject.tokenizer, request.key) as store:
        return _measured(subject, request, watcher, store)


def _measured(subject: Subject, request: Request, watcher: Watcher, store: str) -> dict[str, Any]:
    model = subject.model
    part = PARTS[request.split]
    dataset = _dataset_of(subject, request, store)
    if model.tokenizer and dataset.tokenizer:
        dataset.tokenizer.require(model.tokenizer.identity, what=subject.path)
    tokenizer = dataset.tokenizer or model.tokenizer
    samples = _Watched(dataset.samples(part), request.limit, watcher)
    watcher.begin(subject.path, samples.per_epoch, 0)
    try:
        measured = held_out_loss(
            model,
            samples,
            dataset.borders,
            micro_size=request.batch_size,
            device=model.wpe.weight.device,
            byte_lengths=tokenizer.byte_lengths if tokenizer else None,
        )
    finally:
        watcher.end()
    shares = list(dataset.cfg.split)
    cut = ",".join(f"{share:g}" for share in shares)
    protocol = f"{request.split} text (shares {cut}), windows of {dataset.cfg.seq_len} tokens side by side"
    head = {"task": "heldout", "protocol": protocol, "data_sha256": identity.of_stores(dataset.stores)}
    row = subject.row() | {
        "loss": measured.loss,
        "perplexity": measured.perplexity,
        "bits_per_byte": measured.bits_per_byte,
        "tokens": measured.tokens,
        "bytes": measured.text_bytes,
        "samples": measured.samples,
    }
    if request.per_document:
        row["documents"] = _per_document(subject, request, head, dataset, part, watcher)
    rows = [row]
    if request.baselines:
        from gptworks.evaluate.heldout_baselines import baseline_rows

        rows += baseline_rows(dataset, part, tokenizer)
    result = _result(request, head, rows, [])
    return result | {
        "split": request.split,
        "shares": shares,
        "tokens": measured.tokens,
        "bytes": measured.text_bytes,
        "published": [],
    }


def _dataset_of(subject: Subject, request: Request, store: str) -> Dataset:
    model = subject.model
    trained = folder.config_of(Path(subject.path))
    data = data_section(trained, model.cfg.max_positions, store, request.split, request.shares)
    if request.seq_len is not None:
        data |= {"seq_len": request.seq_len, "too_long": "truncate"}
    config = from_dict({"model": model.cfg.model_dump(), "data": data}, "eval").data
    # With an order of another system the seed decides where the samples begin.
    seed = trained.get("train", {}).get("seed", 0)
    return Dataset(config, vocab_size=model.cfg.vocab_size, seed=seed, tokenizer=model.tokenizer)


def own_data(model: str, split: str) -> tuple[str, str]:
    """What a run was trained on, and the part of it; text that it held out of its own is all held out."""
    said = folder.config_of(Path(model)).get("data", {})
    is_apart = split == "held-out" and said.get("held_out_path")
    paths = said.get("held_out_path" if is_apart else "path") or []
    if len(paths) != 1:
        listed = f" It has {', '.join(paths)}: name one." if paths else ""
        raise UsageError(f"--data: not given, and {model} does not name one dataset.{listed} Needed: a store.")
    return str(paths[0]), "all" if is_apart else split


def data_section(trained: dict[str, Any], context: int, data: str, split: str, shares: str | None) -> dict[str, Any]:
    """How `data` is cut into samples. A run (`trained`: its configuration) cut its own in a certain way: held-out means
    the same here as in training."""
    cut = trained.get("data", {})
    if split == "held-out" and cut.get("held_out_path") and data in cut.get("path", ()):
        raise UsageError(
            f"--split held-out: the run held out text of its own and trained on this share of {data} too. "
            f"Evaluate what it held out: --data {cut['held_out_path'][0]} --split all."
        )
    # These say what was trained on, not how it was cut into samples.
    not_the_cut = {"path", "held_out_path", "weights", "tokenizer"}
    section = {"seq_len": context, **{key: value for key, value in cut.items() if key not in not_the_cut}, "path": data}
    if split == "all":
        section["split"] = "1,0,0"
    elif shares:
        section["split"] = shares
    return section


def _per_document(
    subject: Subject, request: Request, head: dict[str, Any], dataset: Dataset, part: str, watcher: Watcher
) -> int:
    documents: list[Document] = []
    for store, numbers in dataset.documents(part):
        left = request.limit - len(documents) if request.limit else len(numbers)
        documents += StoreDocuments(store, numbers[:left], dataset.cfg.seq_len)
    _score(subject, request, head, documents, watcher)
    return len(documents)
