"""What the model has read of each row: a KV cache while the row fits into it, the last tokens read anew afterwards."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gptworks.generate.fast_decode import Decoder
from gptworks.model import GPT
from gptworks.model.cache import KVCache


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
        self._lengths = [0] * len(self._cached)  # what is in the cache
        longest = max((len(self.tokens[row]) for row in self._cached), default=0)
        self._cache = model.new_cache(len(self._cached), min(longest + new_tokens, self.limit))
        self._cache_anew: KVCache | None = None

    def read_prompts(self) -> list[Tensor]:
        """The logits after each prompt."""
        logits_of = {row: self._anew(row) for row in range(len(self.tokens)) if row not in self._cached}
        logits_of |= self._extend({row: self.tokens[row] for row in self._cached})
        return [logits_of[row] for row in range(len(self.tokens))]

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
        logits_of = self._extend({row: [tokens[row]] for row in self._cached if row in tokens})
        logits_of |= {row: self._anew(row) for row in tokens if row not in self._cached}
        return {row: logits_of[row] for row in tokens}

    def read_each(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Some more tokens for some rows, and the logits [T, V] after each of them. More than one needs `room`."""
        single = {row: more[0] for row, more in tokens.items() if len(more) == 1 and not self.room(row)}
        logits_of = {row: logits_V[None] for row, logits_V in self.read(single).items()} if single else {}
        several = {row: more for row, more in tokens.items() if row not in single}
        for row, more in several.items():
            self.tokens[row] += more
        return logits_of | self._extend_each(several)

    def room(self, row: int) -> int:
        """How many tokens of a row can still be read without forgetting its first ones."""
        if row not in self._cached:
            return 0
        # torch reads all rows equally far, those that have less to read into what is free behind them.
        length = self._lengths[self._cached.index(row)] if self._is_fast else max(self._lengths)
        return min(self._cache.length, self.limit) - length

    def forget(self, row: int, count: int) -> None:
        """The last tokens of a row that is in the cache, as if they had not been read."""
        del self.tokens[row][-count:]
        self._lengths[self._cached.index(row)] -= count
        self._cache.lengths_B = torch.tensor(self._lengths, device=self._cache.lengths_B.device)
        self._cache.used = max(self._lengths)

    def _keep(self, place_of: dict[int, int]) -> None:
        """Only these rows, which are at these places of the cache."""
        self._cache.select(list(place_of.values()))
        self._lengths = [self._lengths[place] for place in place_of.values()]
        self._cached = list(place_of)
        self._cache.used = max(self._lengths, default=0)

    @property
    def _is_fast(self) -> bool:
        return self._decoder is not None and self._decoder.suits(self._cache)

    def _extend(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """More tokens of rows that are in the cache, and the logits after the last of each."""
        return {row: logits_TV[-1] for row, logits_TV in self._extend_each(tokens, last_only=True).items()}

    def _extend_each(self, tokens: Mapping[int, Sequence[int]], *, last_only: bool = False) -> dict[int, Tensor]:
        """More tokens of rows in the cache, and the logits [T, V] after all of them, or [1, V] after the last."""
        if not tokens:
            return {}
        if not self._is_fast:
            return self._extend_by_torch(tokens, last_only=last_only)
        flat, slots, positions, wanted = list[int](), list[int](), list[int](), list[int]()
        sizes: dict[int, int] = {}  # row -> how many of the logits are its own
        for place, row in enumerate(self._cached):
            if more := tokens.get(row):
                flat += more
                slots += [place] * len(more)
                positions += range(self._lengths[place], self._lengths[place] + len(more))
                sizes[row] = 1 if last_only else len(more)
                wanted += range(len(flat) - sizes[row], len(flat))
                self._lengths[place] += len(more)
        assert self._decoder is not None
        logits_MV = self._usable(self._decoder.read(flat, slots, positions, wanted, self._cache))
        self._cache.used = max(self._lengths)
        self._cache.lengths_B = torch.tensor(self._lengths)
        return dict(zip(sizes, logits_MV.split(list(sizes.values())), strict=True))

    def _extend_by_torch(self, tokens: Mapping[int, Sequence[int]], *, last_only: bool) -> dict[int, Tensor]:
        """`_extend_each` by the model itself. Rows with nothing to read are padded: a batch of one shape is faster."""
        counts = [len(tokens.get(row, ())) for row in self._cached]
        tokens_BT = torch.zeros(len(self._cached), max(counts), dtype=torch.long, device=self.device)
        for place, row in enumerate(self._cached):
            tokens_BT[place, : counts[place]] = torch.tensor(tokens.get(row, ()))
        self._cache.counts_B = torch.tensor(counts, device=self.device) if min(counts) < max(counts) else None
        logits = self.model(tokens_BT, cache=self._cache, last_only=last_only)
        logits_BTV = self._usable(logits)[:, None] if last_only else self._usable(logits)
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        self._cache.used = max(self._lengths)
        return {
            row: logits_BTV[place, : 1 if last_only else counts[place]]
            for place, row in enumerate(self._cached)
            if row in tokens
        }

    def _anew(self, row: int) -> Tensor:
        tokens = self.tokens[row][-self.limit :]
        if self._decoder is None:
            return self._usable(self.model(torch.tensor([tokens], device=self.device), last_only=True))[0]
        if self._cache_anew is None:
            self._cache_anew = self.model.new_cache(1, self.limit)
        count = len(tokens)
        return self._usable(self._decoder.read(tokens, [0] * count, range(count), [count - 1], self._cache_anew))[0]

    def _usable(self, logits: Tensor) -> Tensor:
        return logits[..., : self.vocab_size].float().cpu()
