"""The smaller model that guesses for a larger one (`generate.speculate`)."""

import functools
from pathlib import Path

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.errors import GenerationError
from gptworks.model import GPT
from gptworks.model.inference import StoredMatrix
from gptworks.tokenizer import Tokenizer


def draft_model(name: str, model: GPT, tokenizer: Tokenizer | None) -> GPT:
    """The model of this folder, on the same device, its matrices kept alike; an error where its tokens are others."""
    if not Path(name).is_dir():
        raise GenerationError(
            f"generate.speculate: got {name!r}, which is not a folder. Needed: ngram, or the folder of a smaller model "
            "with the same vocabulary."
        )
    draft = _loaded(name, model.device.type, _kind_of(model))
    require_same_vocabulary(name, draft, model, tokenizer)
    return draft


def require_same_vocabulary(name: str, draft: PretrainedGPT, model: GPT, tokenizer: Tokenizer | None) -> None:
    own = draft.tokenizer
    if tokenizer is None or own is None:
        sizes = (draft.cfg.vocab_size, model.cfg.vocab_size)
    else:
        sizes = (own.vocab_size, tokenizer.vocab_size)
    if sizes[0] != sizes[1] or draft.cfg.vocab_size < sizes[1]:
        raise GenerationError(
            f"generate.speculate: the model of {name} has {sizes[0]} tokens, this one {sizes[1]}. A guess must mean "
            "the same to both: give a model that was trained with the same tokenizer, or ngram."
        )
    if tokenizer is None or own is None or own.identity == tokenizer.identity:
        return
    different = next((i for i in range(sizes[1]) if own.decode([i]) != tokenizer.decode([i])), None)
    if different is not None:
        raise GenerationError(
            f"generate.speculate: token {different} of {name} is {own.decode([different])!r}, of this model "
            f"{tokenizer.decode([different])!r}. A guess must mean the same to both: give a model that was trained "
            "with the same tokenizer, or ngram."
        )


@functools.lru_cache(maxsize=1)  # a conversation asks for it at every prompt
def _loaded(name: str, device: str, weights: str) -> PretrainedGPT:
    return PretrainedGPT.from_pretrained(name, device=device, weights=weights).eval()


def _kind_of(model: GPT) -> str:
    kinds = {"torch.bfloat16": "bf16", "torch.int8": "int8", "torch.uint8": "int4"}
    # Of a block: words may have more bits.
    stored = next((module for module in model.blocks.modules() if isinstance(module, StoredMatrix)), None)
    return "fp32" if stored is None else kinds[str(stored.values.dtype)]
