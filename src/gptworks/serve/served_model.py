"""A checkpoint that is served: weights, tokenizer, places for rows; and the next checkpoint of a run that trains."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptworks import model_hub, run_paths
from gptworks.checkpoint import folder as folders
from gptworks.checkpoint.pretrained import Pretrained, PretrainedGPT
from gptworks.counted import counted
from gptworks.errors import UsageError
from gptworks.generate import fast_decode
from gptworks.generate.scheduler import Scheduler
from gptworks.generate.token_reader import reader_of
from gptworks.plan.machine import memory_available
from gptworks.plan.sizes import num_parameters
from gptworks.serve.token_texts import TokenTexts
from gptworks.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadOptions:
    """How models are opened, and how many rows of how many tokens each has places for."""

    weights: str = "fp32"
    device: str = "auto"
    tokenizer: str | None = None
    shape: dict[str, object] = field(default_factory=dict)
    max_batch: int = 32
    context: int | None = None  # None: the model's own


@dataclass(eq=False)
class ServedModel:
    name: str
    source: str  # as it was given
    checkpoint: Path
    weights: str
    model: PretrainedGPT
    tokenizer: Tokenizer
    token_texts: TokenTexts
    scheduler: Scheduler
    context: int
    created: int

    @property
    def step(self) -> int | None:
        """The step that the weights are of, where they are of a run."""
        digits = self.checkpoint.name.removeprefix("step-")
        return int(digits) if run_paths.is_checkpoint(self.checkpoint) and digits.isdigit() else None

    @property
    def has_chat_template(self) -> bool:
        return getattr(getattr(self.tokenizer, "special", None), "chat_template", None) is not None

    def card(self) -> dict[str, Any]:
        """What /v1/models tells; the last part is not OpenAI's."""
        cfg = self.model.cfg
        more = {
            "context": self.context,
            "parameters": self.num_parameters,
            "layers": cfg.num_layers,
            "hidden_size": cfg.hidden_size,
            "heads": cfg.num_heads,
            "vocabulary": self.tokenizer.vocab_size,
            "tokenizer": self.tokenizer.name,
            "tokenizer_sha256": self.tokenizer.identity,
            "end_of_document": self.tokenizer.eod_id,
            "weights": self.weights,
            "source": self.source,
            "checkpoint": self.checkpoint.name,
            "step": self.step,
            "chat": self.has_chat_template,
        }
        head = {"id": self.name, "object": "model", "created": self.created, "owned_by": "gptworks"}
        return {**head, "max_model_len": self.context, "gptworks": more}

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model.cfg)


def named_sources(models: list[str]) -> dict[str, str]:
    """`NAME=DIR` or `DIR`, whose last part is the name: `stories` of runs/stories, `stories@100` of its step 100."""
    sources: dict[str, str] = {}
    for each in models:
        name, equals, source = each.partition("=")
        if not equals or Path(each).exists():
            is_path = Path(each).exists() or folders.at_step(each) is not None
            name, source = Path(each).resolve().name if is_path else each, each
        if not name or not source:
            raise UsageError(f"--model {each}: needs a folder, or NAME=FOLDER.")
        if name in sources:
            raise UsageError(
                f"--model {each}: the name {name} is taken by {sources[name]}. Give each a name: --model NAME=FOLDER."
            )
        sources[name] = source
    return sources


def checkpoint_of(source: str) -> Path:
    """The folder that the weights are read from: of a run its newest whole checkpoint."""
    path = folders.at_step(source) or Path(source)
    if not path.exists() and path.name not in (run_paths.LATEST, run_paths.BEST):
        path = model_hub.resolve(source)
    return folders.find(path) if run_paths.is_ours(path) else path


def load(name: str, source: str, options: LoadOptions) -> ServedModel:
    checkpoint = checkpoint_of(source)
    stated: dict[str, Any] = {"tokenizer": options.tokenizer, "shape": options.shape}
    opened = checkpoint if run_paths.is_checkpoint(checkpoint) else source
    tokenizer = Pretrained.open(opened, **stated).require_tokenizer()
    model = PretrainedGPT.from_pretrained(opened, device=options.device, weights=options.weights, **stated)
    context = model.cfg.max_positions
    if options.context is not None:
        if options.context > context:
            raise UsageError(f"--context {options.context}: {source} has {context} positions. Give at most {context}.")
        context = options.context
    _require_memory(model, options.max_batch, context)
    scheduler = Scheduler(
        reader_of(model),
        model.new_cache(options.max_batch, context),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
    )
    texts = TokenTexts(tokenizer)
    return ServedModel(
        name, source, checkpoint, options.weights, model, tokenizer, texts, scheduler, context, int(time.time())
    )


def _require_memory(model: PretrainedGPT, max_batch: int, context: int) -> None:
    one = model.new_cache(1, 1)
    needed = (one.keys_LBNSH.nbytes + one.values_LBNSH.nbytes) * max_batch * context
    free = memory_available() if model.device.type == "cpu" else math.inf
    if needed > free:
        raise UsageError(
            f"{counted(max_batch, 'row')} of {context:,} tokens need {needed / 1e9:.1f} GB for keys and values, but "
            f"{free / 1e9:.1f} GB are free. Give a smaller --max-batch or --context."
        )


def description(served: ServedModel) -> str:
    """What is told at the start: one line."""
    step = f", step {served.step}" if served.step is not None else ""
    slots = served.scheduler.slots
    reason = fast_decode.why_not(served.model.cfg) if served.model.device.type == "cpu" else None
    slow = f"; torch computes alone, which is slower: {reason}" if reason and fast_decode.OFF not in reason else ""
    return (
        f"{served.name}: {served.num_parameters / 1e6:,.1f}M parameters in {served.weights}{step}; places for "
        f"{counted(slots.number, 'row')} of {served.context:,} tokens, at most {slots.num_bytes / 1e9:.2f} GB{slow}"
    )
