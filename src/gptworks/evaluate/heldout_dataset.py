"""A model measured on a split of a dataset, cut into samples as it was in training."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.config.load import from_dict
from gptworks.data.dataset import Dataset
from gptworks.data.prepare import PrepareJob, prepare
from gptworks.data.store import is_raw_text
from gptworks.data.text_blocks import TextRules
from gptworks.data.windows import OrderedSamples, Sample, Source
from gptworks.errors import DataError, UsageError
from gptworks.evaluate.heldout import HeldOut, held_out_loss
from gptworks.evaluate.progress import Watcher
from gptworks.tokenizer import Tokenizer


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


def default_split(data: str) -> str:
    """All of a text that nobody has shared out; of a dataset, what training held out."""
    return "all" if is_raw_text(data) else "held-out"


@contextmanager
def as_store(data: str, tokenizer: Tokenizer, key: str = "") -> Iterator[str]:
    """Text as a store for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        rules = TextRules((key or "text",), keep_separator=False)
        try:
            prepare(
                PrepareJob([data], path, tokenizer, rules=rules, append_eod=tokenizer.eod_id is not None, strict=True)
            )
            yield str(path)
        except DataError as error:
            message = str(error).replace(f"{path}.bin", data).replace(", or leave out --strict to skip such lines", "")
            raise type(error)(message) from None


def open_dataset(model: PretrainedGPT, section: dict[str, Any], trained: dict[str, Any], where: str) -> Dataset:
    """`section`: of a configuration, in whose errors `where` is named. The seed of training decides where the samples
    of another system's order begin."""
    cfg = from_dict({"model": model.cfg.model_dump(), "data": section}, where).data
    seed = trained.get("train", {}).get("seed", 0)
    return Dataset(cfg, vocab_size=model.cfg.vocab_size, seed=seed, tokenizer=model.tokenizer)


def measure(
    model: PretrainedGPT,
    dataset: Dataset,
    split: str,
    *,
    batch_size: int,
    limit: int = 0,
    name: str,
    watcher: Watcher | None = None,
) -> HeldOut:
    """The loss over the samples of a split, or over the first `limit` of them. The dataset has the model's tokenizer,
    or it is refused with `name` for the model's name."""
    if model.tokenizer and dataset.tokenizer:
        dataset.tokenizer.require(model.tokenizer.identity, source=name)
    tokenizer = dataset.tokenizer or model.tokenizer
    watcher = watcher or Watcher()
    samples = _Watched(dataset.samples(split), limit, watcher)
    watcher.begin(name, samples.per_epoch, 0)
    try:
        return held_out_loss(
            model,
            samples,
            dataset.eod_policy,
            micro_size=batch_size,
            device=model.device,
            byte_lengths=tokenizer.byte_lengths if tokenizer else None,
        )
    finally:
        watcher.end()


class _Watched:
    """The samples of a split, or the first of them; the watcher is told of every batch."""

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
