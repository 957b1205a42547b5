"""The keys and values of what was read before, for generation.

Shapes: L layers, B rows, T new tokens, S tokens in the cache, N heads of keys and values, H head size.
"""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of what each row has read so far: fixed shapes, updated in place, one length per row."""

    def __init__(self, num_layers: int, rows: int, num_heads: int, length: int, head_size: int, **kind: object) -> None:
        shape = (num_layers, rows, num_heads, length, head_size)
        self.keys_LBNSH = torch.zeros(shape, **kind)  # type: ignore[call-overload]
        self.values_LBNSH = torch.zeros(shape, **kind)  # type: ignore[call-overload]
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=self.keys_LBNSH.device)
        self.length = length
        # Upper bound of lengths_B, known without asking the device: attention looks no further.
        self.used = 0
        # How many tokens of the next forward are real, per row (the rest is padding on the right); None = all.
        self.counts_B: Tensor | None = None

    def positions(self, num_tokens: int) -> Tensor:
        return self.lengths_B[:, None] + torch.arange(num_tokens, device=self.lengths_B.device)

    def mask(self, num_tokens: int, window: int = 0) -> Tensor:
        """[B, 1, T, S]: which stored tokens each new token may look at: all, or the last `window` with itself."""
        stored = torch.arange(self.used + num_tokens, device=self.lengths_B.device)
        ahead_BTS = self.positions(num_tokens)[:, :, None] - stored
        visible = (ahead_BTS >= 0) & (ahead_BTS < window) if window else ahead_BTS >= 0
        return visible[:, None]

    def layer(self, number: int) -> "LayerCache":
        return LayerCache(self, self.keys_LBNSH[number], self.values_LBNSH[number])

    def advance(self, num_tokens: int) -> None:
        """After a forward pass: the new tokens have been read."""
        self.lengths_B += num_tokens if self.counts_B is None else self.counts_B
        self.used += num_tokens
        self.counts_B = None

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was: beams change places, rows are copied or left out."""
        at = torch.tensor(rows, dtype=torch.long, device=self.lengths_B.device)
        self.lengths_B = self.lengths_B[at]
        for name in ("keys_LBNSH", "values_LBNSH"):
            old = getattr(self, name)
            new = old if len(rows) == old.shape[1] else old.new_zeros(old.shape[0], len(rows), *old.shape[2:])
            new[:, :, :, : self.used] = old[:, at, :, : self.used]
            setattr(self, name, new)


class LayerCache:
    """What one block sees of the cache."""

    def __init__(self, whole: KVCache, keys_BNSH: Tensor, values_BNSH: Tensor) -> None:
        self.whole, self.keys_BNSH, self.values_BNSH = whole, keys_BNSH, values_BNSH

    def extend(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values behind the old ones; return all of them."""
        num_tokens = k_BNTH.shape[2]
        rows = torch.arange(k_BNTH.shape[0], device=k_BNTH.device)[:, None]
        at_BT = self.whole.positions(num_tokens)
        self.keys_BNSH[rows, :, at_BT] = k_BNTH.transpose(1, 2).to(self.keys_BNSH.dtype)
        self.values_BNSH[rows, :, at_BT] = v_BNTH.transpose(1, 2).to(self.values_BNSH.dtype)
        end = self.whole.used + num_tokens
        return self.keys_BNSH[:, :, :end].to(k_BNTH.dtype), self.values_BNSH[:, :, :end].to(v_BNTH.dtype)
