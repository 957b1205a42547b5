"""Prompts to texts.   Shapes: B rows, T tokens of the longest prompt, K beams, V vocabulary."""

import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from pydantic import ValidationError

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.config.load import from_dict
from gptworks.config.schema import GenerateConfig
from gptworks.errors import GenerationError, TokenizerError, UsageError
from gptworks.generate import beam, sampler
from gptworks.generate.decode_state import DecodeState
from gptworks.generate.draft_model import draft_model
from gptworks.generate.result import Drawn, Generation
from gptworks.generate.result import Sequence as NewTokens
from gptworks.generate.speculate import ModelGuesser, NgramGuesser, Speculation
from gptworks.generate.text import TextOut
from gptworks.model import GPT
from gptworks.model.inference import evaluating
from gptworks.python_words import generation_in_python_words
from gptworks.tokenizer import Tokenizer


class NativeEngine:
    """Our own model where an engine is asked for, be it this one or another."""

    def __init__(self, model: PretrainedGPT) -> None:
        self.model = model

    def generations(self, prompts: str | Sequence[str], **settings: object) -> list[Generation]:
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return generations_up_to(self.model, texts, settings_of(settings), None)

    def stream(self, prompt: str, **settings: object) -> Iterator[str]:
        return stream_text(self.model, prompt, **settings)

    def new_tokens_that_fit(self, prompts: list[str], **settings: object) -> list[int | None]:
        """For each prompt, how many new tokens fit where these are fewer than the settings ask for; else None."""
        return new_tokens_that_fit(self.model, prompts, settings)


@generation_in_python_words
def generate(
    model: PretrainedGPT, prompts: str | Sequence[str], *, return_full_text: bool = False, **settings: object
) -> list[str]:
    """The continuation of each prompt, without the prompt unless `return_full_text`.

    Settings: those of the `generate` section of the configuration, such as max_new_tokens, temperature, top_k, stop.
    Each call draws anew unless it gives a `seed`. With num_return_sequences the list is flat: all texts of the first
    prompt, then all of the second.

    >>> gptworks.generate(model, "Once upon a time", max_new_tokens=20, strategy="greedy")   # doctest: +SKIP
    """
    written = generations(model, prompts, **settings)
    return [generation.prompt + generation.text if return_full_text else generation.text for generation in written]


@generation_in_python_words
def generations(model: PretrainedGPT, prompts: str | Sequence[str], **settings: object) -> list[Generation]:
    """What `generate` gives, with tokens, their log-probabilities, why each text ended, its score, and its seed.

    >>> best = gptworks.generations(model, "Once", strategy="beam", num_beams=4)[0]   # doctest: +SKIP
    >>> best.text, best.finish, best.score   # doctest: +SKIP
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    return generations_up_to(model, texts, settings_of(drawing_anew(settings)), None)


def drawing_anew(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings with a seed of their own, unless one is given."""
    return {"seed": secrets.randbelow(2**31), **{name: each for name, each in settings.items() if each is not None}}


def new_tokens_that_fit(model: PretrainedGPT, prompts: list[str], settings: Mapping[str, object]) -> list[int | None]:
    """Where nobody asked for a number of new tokens and the usual one does not fit the context: as many as do."""
    cfg, tokenizer = settings_of(settings), require_tokenizer(model)
    limits = require_possible(model, [tokenizer.encode_prompt(prompt) for prompt in prompts], cfg, tokenizer.vocab_size)
    return [limit if not is_length_asked(cfg) and limit < cfg.max_new_tokens else None for limit in limits]


def generations_up_to(
    model: PretrainedGPT, texts: list[str], cfg: GenerateConfig, lengths: list[int] | None
) -> list[Generation]:
    """The continuations of all texts; with `lengths` each prompt has its own number of new tokens."""
    tokenizer = require_tokenizer(model)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"generate: got the prompt {text!r}; needs a text or a list of texts.")
    encoded = [tokenizer.encode_prompt(text) for text in texts]
    continued = continue_tokens(model, encoded, cfg, tokenizer=tokenizer, lengths=lengths)
    return [
        Generation(
            text, _text_of(tokenizer, prompt, new, cfg), new.tokens, new.logprobs, new.finish, new.score, cfg.seed
        )
        for text, prompt, of_prompt in zip(texts, encoded, continued, strict=True)
        for new in of_prompt
    ]


@torch.no_grad()
def stream_text(model: PretrainedGPT, prompt: str, **settings: object) -> Iterator[str]:
    """One continuation of one prompt in pieces of whole characters, as its tokens are drawn.

    >>> for piece in stream_text(model, "Once upon a time"): print(piece, end="", flush=True)   # doctest: +SKIP
    """
    tokenizer, cfg = require_tokenizer(model), settings_of(settings)
    if not can_stream(cfg):
        raise GenerationError(
            f"streaming needs one text that is drawn token by token, got strategy {cfg.strategy}, "
            f"num_return_sequences {cfg.num_return_sequences} and best_of {cfg.best_of}."
        )
    encoded = tokenizer.encode_prompt(prompt)
    limits = require_possible(model, [encoded], cfg, tokenizer.vocab_size)
    (row,) = sampler.rows_of([encoded], limits, cfg)
    out = TextOut(tokenizer, encoded, cfg.stop)
    pieces: list[str] = []

    def is_stop(_: int, tokens: list[int]) -> bool:
        pieces.append(out.add(tokens[-1]))
        return out.is_stopped

    with evaluating(model):
        state = DecodeState(model, [encoded], limits[0], tokenizer.vocab_size)
        draws = _draws(model, [row], state, cfg, tokenizer)
        for _ in draws(cfg, eod_id=tokenizer.eod_id, is_stop=is_stop):
            while pieces:
                if piece := pieces.pop():
                    yield piece
    if rest := out.close():
        yield rest


def can_stream(cfg: GenerateConfig) -> bool:
    return cfg.strategy != "beam" and cfg.num_return_sequences == 1 and cfg.best_of <= 1


@torch.no_grad()
def continue_tokens(
    model: GPT,
    prompts: list[list[int]],
    cfg: GenerateConfig,
    *,
    tokenizer: Tokenizer | None = None,
    eod_id: int | None = None,
    vocab_size: int | None = None,
    lengths: list[int] | None = None,
) -> list[list[NewTokens]]:
    """The new tokens of each prompt, num_return_sequences times. The tokenizer is needed for stop strings only."""
    with evaluating(model):
        return _continue(model, prompts, cfg, tokenizer, eod_id, vocab_size or model.cfg.vocab_size, lengths)


def _continue(
    model: GPT,
    prompts: list[list[int]],
    cfg: GenerateConfig,
    tokenizer: Tokenizer | None,
    eod_id: int | None,
    vocab_size: int,
    lengths: list[int] | None,
) -> list[list[NewTokens]]:
    if tokenizer is not None:
        eod_id, vocab_size = tokenizer.eod_id, tokenizer.vocab_size
    limits = require_possible(model, prompts, cfg, vocab_size, lengths)
    state = DecodeState(model, prompts, max(limits), vocab_size)

    def is_stop(prompt: int, tokens: list[int]) -> bool:
        return bool(cfg.stop) and tokenizer is not None and _stopped(tokenizer, prompts[prompt], tokens, cfg)

    if cfg.strategy == "beam":
        return beam.search(prompts, limits, state, cfg, eod_id=eod_id, is_stop=is_stop)
    rows = sampler.rows_of(prompts, limits, cfg)
    draws = _draws(model, rows, state, cfg, tokenizer)
    for _ in draws(cfg, eod_id=eod_id, is_stop=is_stop):
        pass
    results: list[list[NewTokens]] = [[] for _ in prompts]
    for row in rows:
        results[row.prompt].append(row.result())
    if cfg.best_of:
        results = [sorted(texts, key=lambda new: -new.score)[: cfg.num_return_sequences] for texts in results]
    return results


def _draws(
    model: GPT, rows: list[sampler.Row], state: DecodeState, cfg: GenerateConfig, tokenizer: Tokenizer | None
) -> Callable[..., Iterator[dict[int, Drawn]]]:
    """How the tokens of the rows are drawn: one after the other, or with guesses that are read ahead."""
    if not cfg.speculate:
        return functools.partial(sampler.run, rows, state)
    if cfg.speculate == "ngram":
        return Speculation(rows, state, NgramGuesser()).run
    small = draft_model(cfg.speculate, model, tokenizer)
    prompts = [row.prompt_tokens for row in {row.prompt: row for row in rows}.values()]
    eod_id = tokenizer.eod_id if tokenizer is not None else None
    drafts = DecodeState(small, prompts, max(row.limit for row in rows), state.vocab_size)
    return Speculation(rows, state, ModelGuesser(drafts, rows, cfg, eod_id)).run


def settings_of(settings: Mapping[str, object]) -> GenerateConfig:
    """Checked settings. `logit_bias` may be a dictionary {token id: bias}, and stop a single text."""
    values = dict(settings)
    biases = values.get("logit_bias")
    if isinstance(biases, Mapping):
        values["logit_bias"] = tuple(f"{token}:{bias}" for token, bias in biases.items())
    try:
        return GenerateConfig.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError:  # said in the words of all configurations
        return from_dict({"generate": values}, "generate").generate


def require_tokenizer(model: PretrainedGPT) -> Tokenizer:
    if not isinstance(model, PretrainedGPT):
        raise UsageError(
            f"generate: the model is {model!r}; needs a gptworks.GPT, as GPT.from_pretrained(folder) gives. "
            "gptworks.pipeline takes a folder or a name."
        )
    if model.tokenizer is None:
        raise TokenizerError(
            'generate: the model has no tokenizer. For a fresh model: GPT.from_config(..., tokenizer="gpt2"); for any: '
            "model.tokenizer = gptworks.Tokenizer.from_pretrained(...), or tokenizer.json beside its weights."
        )
    return model.tokenizer


def require_fitting(vocab_size: int, model: GPT) -> None:
    if vocab_size > model.cfg.vocab_size:
        raise TokenizerError(
            f"generate: the tokenizer has {vocab_size} tokens, but the model only {model.cfg.vocab_size}. "
            "Use the tokenizer the model was trained with."
        )


def require_possible(
    model: GPT, prompts: list[list[int]], cfg: GenerateConfig, vocab_size: int, lengths: list[int] | None = None
) -> list[int]:
    """How many new tokens each prompt may get; an error where prompts and settings cannot be honoured.

    A number that was asked for stays, or is an error; one that nobody asked for ends with the model's context.
    """
    require_fitting(vocab_size, model)
    if not prompts:
        raise GenerationError("generate: no prompt. Give at least one.")
    require_in_vocabulary(cfg, vocab_size)
    is_asked = lengths is not None or is_length_asked(cfg)
    lengths = lengths or [cfg.max_new_tokens] * len(prompts)
    return [
        _room(model, number, prompt, wanted, cfg, is_asked=is_asked)
        for number, (prompt, wanted) in enumerate(zip(prompts, lengths, strict=True), start=1)
    ]


def require_in_vocabulary(cfg: GenerateConfig, vocab_size: int) -> None:
    if cfg.top_k > vocab_size:
        raise GenerationError(
            f"generate.top_k: {cfg.top_k} is above the vocabulary ({vocab_size} tokens). "
            f"Give at most {vocab_size}, or 0 to keep all."
        )
    beyond = next((token for token in cfg.biases if token >= vocab_size), None)
    if beyond is not None:
        raise GenerationError(f"generate.logit_bias: token {beyond} is not in the vocabulary ({vocab_size} tokens).")


def is_length_asked(cfg: GenerateConfig) -> bool:
    """Whether somebody said how many new tokens; those of `rules: mindformers` count the prompt, and are never cut."""
    return "max_new_tokens" in cfg.model_fields_set or cfg.rules == "mindformers"


def _room(model: GPT, number: int, prompt: list[int], wanted: int, cfg: GenerateConfig, *, is_asked: bool) -> int:
    if not prompt:
        raise GenerationError(f"prompt {number} is empty. Needed: at least one token of text.")
    context = model.cfg.max_positions
    if cfg.rules == "mindformers":
        wanted -= len(prompt)
        if wanted < 1:
            raise GenerationError(
                f"prompt {number} has {len(prompt)} tokens, but generate.max_new_tokens is {cfg.max_new_tokens}, "
                f"which counts the prompt too with rules: mindformers. Set it to {len(prompt) + 1} or more."
            )
    room = context - len(prompt)
    if cfg.window == "slide":
        return wanted
    if not is_asked:
        least = max(1, cfg.min_new_tokens)
        if room >= least:
            return min(wanted, room)
        wanted = least
    if wanted > room:
        more = f" and {wanted} more were asked for" if is_asked or cfg.min_new_tokens else ""
        raise GenerationError(
            f"prompt {number} has {len(prompt)} tokens{more}, but the model's context is {context}. "
            + (f"Ask for at most {room}" if room > 0 else f"Shorten it to {context - 1} or fewer")
            + ", or let the window slide (--window slide)."
        )
    return wanted


def _stopped(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], cfg: GenerateConfig) -> bool:
    return _read(tokenizer, prompt, tokens, cfg).is_stopped


def _text_of(tokenizer: Tokenizer, prompt: list[int], new: NewTokens, cfg: GenerateConfig) -> str:
    out = _read(tokenizer, prompt, new.tokens, cfg)
    out.close()
    return out.text


def _read(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], cfg: GenerateConfig) -> TextOut:
    """The text of several tokens at once."""
    out = TextOut(tokenizer, prompt, cfg.stop)
    out.extend(tokens)
    return out
