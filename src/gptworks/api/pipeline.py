"""`gptworks.pipeline`: a model and the settings to use it with, as MindFormers has it."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptworks.api.tasks import TEXT_GENERATION, require_task
from gptworks.checkpoint import folder as folders
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.errors import GenerationError, TokenizerError, UsageError
from gptworks.generate.engine import drawing_anew, generations_up_to, require_fitting, settings_of
from gptworks.python_words import generation_in_python_words
from gptworks.tokenizer import Tokenizer

RESULT = "text_generation_text"
# Two ways to say how long: with the prompt, and without it.
_TOTAL, _NEW = "max_length", "max_new_tokens"
_FULL = "return_full_text"


class Pipeline:
    """Texts in, texts out; made by `gptworks.pipeline`."""

    def __init__(self, model: PretrainedGPT, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
        # The tokenizer may be another than the caller's model has; the weights are shared.
        self.model, self.tokenizer, self.settings = copy.copy(model), tokenizer, settings
        self.model.tokenizer = tokenizer

    @generation_in_python_words
    def __call__(self, text: str | Iterable[str], **settings: Any) -> list[dict[str, list[str]]]:
        """Prompt and continuation of each text. Settings given here come before those of the pipeline.

        `return_full_text=False` leaves the prompt out. Each call draws anew unless a `seed` is given.

        >>> write(["I love Beijing, because", "Hello"], strategy="greedy", max_new_tokens=8)   # doctest: +SKIP
        """
        texts = [text] if isinstance(text, str) or not isinstance(text, Iterable) else list(text)
        for item in texts:
            if not isinstance(item, str):
                raise UsageError(f"pipeline: got {item!r}; needs a text or a list of texts.")
        if not texts:
            raise GenerationError("pipeline: no text. Give at least one.")
        wanted = combined(self.settings, settings)
        total, with_prompt = wanted.pop(_TOTAL, None), wanted.pop(_FULL, True)
        if not isinstance(with_prompt, bool):
            raise UsageError(f"pipeline: {_FULL}: got {with_prompt!r}; needs True or False.")
        lengths = None
        if total is not None:
            lengths = [
                _room(total, len(self.tokenizer.encode_prompt(item)), number) for number, item in enumerate(texts, 1)
            ]
            wanted[_NEW] = max(lengths)
        generations = generations_up_to(self.model, texts, settings_of(drawing_anew(wanted)), lengths)
        return _results(texts if with_prompt else [""] * len(texts), [generation.text for generation in generations])


@generation_in_python_words
def pipeline(
    task: str = TEXT_GENERATION,
    model: str | Path | PretrainedGPT = "gpt2",
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    device: str = "auto",
    weights: str = "fp32",
    download: bool | None = None,
    **settings: Any,
) -> Pipeline:
    """A function from texts to texts. The model is a folder, a name or a `GPT`; the settings are those of `generate`.

    weights: fp32, bf16, int8 or int4, see `GPT.from_pretrained`.
    `max_length` counts the prompt too, `max_new_tokens` does not. The result has one dictionary per text, with the
    prompt (unless `return_full_text=False`) and what follows it, in the form MindFormers gives.

    >>> write = gptworks.pipeline("text_generation", model="gpt2", max_length=20)   # doctest: +SKIP
    >>> write("I love Beijing, because", top_k=3)   # doctest: +SKIP
    [{'text_generation_text': ['I love Beijing, because ...']}]
    """
    require_task(task, [TEXT_GENERATION], "pipeline")
    combined({}, settings)
    loaded = model
    if not isinstance(loaded, PretrainedGPT):
        loaded = PretrainedGPT.from_pretrained(loaded, device=device, weights=weights, download=download)
    chosen = loaded.tokenizer
    if tokenizer is not None:
        chosen = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_pretrained(tokenizer)
    if chosen is None:
        raise TokenizerError(
            "pipeline: the model has no tokenizer. Put tokenizer.json beside its weights, or give tokenizer=."
        )
    require_fitting(chosen.vocab_size, loaded)
    of_the_run = folders.config_of(loaded.folder).get("generate", {}) if loaded.folder else {}
    of_the_run = {name: value for name, value in of_the_run.items() if name != "seed"}  # a call draws anew
    return Pipeline(loaded, chosen, combined(of_the_run, settings))


def combined(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Settings over settings: one of the two lengths puts the other out of force."""
    if _TOTAL in above and _NEW in above:
        raise UsageError(
            f"pipeline: got {_TOTAL}={above[_TOTAL]!r} (with the prompt) and {_NEW}={above[_NEW]!r} (without it). "
            "Give one of them."
        )
    if _TOTAL in above or _NEW in above:
        below = {name: value for name, value in below.items() if name not in (_TOTAL, _NEW)}
    return below | above


def _room(total: object, prompt: int, number: int) -> int:
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise GenerationError(f"{_TOTAL}: got {total!r}; needs a whole number of tokens, 1 or more.")
    if total <= prompt:
        raise GenerationError(
            f"text {number} has {prompt} tokens, and {_TOTAL}={total} counts them too, so nothing can follow. "
            f"Set {_TOTAL} to {prompt + 1} or more, or use {_NEW}."
        )
    return total - prompt


def _results(prompts: list[str], texts: list[str]) -> list[dict[str, list[str]]]:
    each = len(texts) // len(prompts)
    return [
        {RESULT: [prompt + text for text in texts[row * each : (row + 1) * each]]} for row, prompt in enumerate(prompts)
    ]
