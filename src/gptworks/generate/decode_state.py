"""What the model has read of each row: a KV cache while the row fits into it, the last tokens read anew afterwards."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gptworks.generate.fast_decode import Decoder
from gptworks.model import GPT


class DecodeState:
    """Rows of tokens and the logits of what comes next, [V] on the CPU in fp32.

    A row that is longer than the model's context is read from its last `max_positions` tokens, as if they were all.
    """

    def __init__(self, model: GPT, prompts: Sequence[Sequence[int]], new_tokens: int, vocab_size: int) -> None:
        self.model = model
        self._decoder = Decoder.of(model)
        # Rows of the embedding beyond the tokenizer exist for alignment only and are never drawn.
        self.vocab_size = vocab_size
        self.limit = model.cfg.max_positions
        self.device = model.device
        self.tokens = [list(prompt) for prompt in prompts]
        self._cached = [row for row, tokens in enumerate(self.tokens) if len(tokens) <= self.limit]
        self._lengths = [len(tokens) for tokens in self.tokens if len(tokens) <= self.limit]
        longest = max(self._lengths, default=0)
        self._cache = model.new_cache(len(self._cached), min(longest + new_tokens, self.limit))

    def read_prompts(self) -> list[Tensor]:
        """The logits after each prompt."""
        found = {row: self._anew(row) for row in range(len(self.tokens)) if row not in self._cached}
        if self._cached:
            tokens_BT = torch.zeros(len(self._cached), max(self._lengths), dtype=torch.long, device=self.device)
            for place, row in enumerate(self._cached):
                tokens_BT[place, : self._lengths[place]] = torch.tensor(self.tokens[row])
            self._cache.counts_B = torch.tensor(self._lengths, device=self.device)
            found |= zip(self._cached, self._forward(tokens_BT), strict=True)
            self._cache.used = max(self._lengths)
        return [found[row] for row in range(len(self.tokens))]

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        if list(rows) == list(range(len(self.tokens))):
            return
        place_of = {row: place for place, row in enumerate(self._cached)}
        self.tokens = [list(self.tokens[row]) for row in rows]
        self._keep({new: place_of[old] for new, old in enumerate(rows) if old in place_of})

    def read(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """One more token for some rows, and the logits after it."""
        for row, token in tokens.items():
            self.tokens[row].append(token)
        full = {row for row, length in zip(self._cached, self._lengths, strict=True) if length == self.limit}
        if full:
            self._keep({row: place for place, row in enumerate(self._cached) if row not in full})
        found: dict[int, Tensor] = {}
        if not tokens.keys().isdisjoint(self._cached):
            # Rows that have ended stay where they are: a batch that keeps its shape is read faster.
            next_BT = torch.tensor([[tokens.get(row, 0)] for row in self._cached], device=self.device)
            found |= zip(self._cached, self._forward(next_BT), strict=True)
            self._lengths = [length + 1 for length in self._lengths]
        found |= {row: self._anew(row) for row in tokens if row not in self._cached}
        return {row: found[row] for row in tokens}

    def _keep(self, place_of: dict[int, int]) -> None:
        """Only these rows, which are at these places of the cache."""
        self._cache.select(list(place_of.values()))
        self._lengths = [self._lengths[place] for place in place_of.values()]
        self._cached = list(place_of)
        self._cache.used = max(self._lengths, default=0)

    def _anew(self, row: int) -> Tensor:
        tokens_BT = torch.tensor([self.tokens[row][-self.limit :]], device=self.device)
        return self._usable(self.model(tokens_BT, last_only=True))[0]

    def _forward(self, tokens_BT: Tensor) -> Tensor:
        if self._decoder is not None and self._decoder.suits(tokens_BT, self._cache):
            return self._usable(self._decoder(tokens_BT, self._cache))
        return self._usable(self.model(tokens_BT, cache=self._cache, last_only=True))

    def _usable(self, logits_BV: Tensor) -> Tensor:
        return logits_BV[:, : self.vocab_size].float().cpu()
