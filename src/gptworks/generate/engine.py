"""Prompts to tokens with a KV cache.   Shapes: B rows, T tokens of the longest prompt, V vocabulary."""

from collections.abc import Iterator, Sequence

import torch

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.config.load import from_dict
from gptworks.config.schema import GenerateConfig
from gptworks.errors import GenerationError, TokenizerError
from gptworks.generate.logits import next_token
from gptworks.model import GPT
from gptworks.model.init import seed_of


def generate(model: PretrainedGPT, prompts: str | Sequence[str], **settings: object) -> list[str]:
    """The continuation of each prompt, without the prompt. Settings: see GenerateConfig.

    >>> gptworks.generate(model, "Once upon a time", max_new_tokens=20, strategy="greedy")   # doctest: +SKIP
    """
    if model.tokenizer is None:
        raise TokenizerError(
            "generate: the model was loaded without a tokenizer. Put tokenizer.json beside its weights."
        )
    cfg = from_dict({"generate": settings}, "generate").generate
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    rows: list[list[int]] = [[] for _ in texts]
    encoded = [model.tokenizer.encode(text) for text in texts]
    for step in stream(model, encoded, cfg, eod_id=model.tokenizer.eod_id, vocab_size=model.tokenizer.vocab_size):
        for row, token in step.items():
            rows[row].append(token)
    return [model.tokenizer.decode(row) for row in rows]


@torch.no_grad()
def stream(
    model: GPT, prompts: list[list[int]], cfg: GenerateConfig, *, eod_id: int | None, vocab_size: int
) -> Iterator[dict[int, int]]:
    """One dictionary {row: new token} per step. A row ends with the end of document, which is not given out.

    Rows have random generators of their own, so what a row draws does not depend on its neighbours.
    """
    _check(model, prompts, cfg)
    device = model.wpe.weight.device
    longest = max(len(prompt) for prompt in prompts)
    tokens_BT = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
    cache = model.new_cache(len(prompts), longest + cfg.max_new_tokens)
    cache.counts_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    generators = [torch.Generator().manual_seed(seed_of(cfg.seed, "sample", row)) for row in range(len(prompts))]
    running = set(range(len(prompts)))
    for number in range(cfg.max_new_tokens):
        # Rows of the embedding beyond the tokenizer exist for alignment only and are never drawn.
        logits_BV = model(tokens_BT, cache=cache, last_only=True)[:, :vocab_size].float().cpu()
        drawn = {row: next_token(logits_BV[row], cfg, generators[row]) for row in sorted(running)}
        running -= {row for row, token in drawn.items() if token == eod_id}
        yield {row: token for row, token in drawn.items() if row in running}
        if not running or number == cfg.max_new_tokens - 1:
            return
        tokens_BT = torch.tensor([[drawn.get(row, 0)] for row in range(len(prompts))], device=device)


def _check(model: GPT, prompts: list[list[int]], cfg: GenerateConfig) -> None:
    if not prompts:
        raise GenerationError("generate: no prompt. Give at least one.")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise GenerationError(f"prompt {row + 1} is empty. Needed: at least one token of text.")
        room = model.cfg.max_positions - len(prompt)
        if cfg.max_new_tokens > room:
            raise GenerationError(
                f"prompt {row + 1} has {len(prompt)} tokens and {cfg.max_new_tokens} more were asked for, "
                f"but the model's context is {model.cfg.max_positions}. "
                + (f"Ask for at most {room}." if room > 0 else f"Shorten it to {model.cfg.max_positions - 1} or fewer.")
            )
