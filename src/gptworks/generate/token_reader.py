"""Tokens of many rows in one pass, each at its own place of a cache: what continuous batching computes with.

Shapes: N tokens that are read, M of them whose logits are wanted, V vocabulary; of one group B slots, T tokens each.
"""

from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from gptworks.generate.fast_decode import Decoder, logits_in
from gptworks.model import GPT
from gptworks.model.cache import KVCache, LayerCache


class TokenReader(Protocol):
    def read(
        self,
        tokens_N: Tensor,
        slots_N: Tensor,
        positions_N: Tensor,
        wanted_M: Tensor,
        cache: KVCache,
        out_V: Tensor | None = None,
    ) -> Tensor:
        """Logits [M, V] after the tokens numbered wanted_M. Keys and values are written into the cache.

        `out_V` is room for the logits that the caller lends: they are there, where it is large enough.

        Token i belongs to row slots_N[i] of the cache, at positions_N[i]. Tokens of a slot follow each other, in
        ascending positions; what the slot holds below the first of them was read before.
        """
        ...


def reader_of(model: GPT) -> TokenReader:
    """The C++ function where it knows the model, else torch."""
    decoder = Decoder.of(model)
    return decoder if decoder is not None else TorchReader(model)


class TorchReader:
    """Any model on any device: slots that read equally many tokens are one batch of the model."""

    def __init__(self, model: GPT) -> None:
        self.model = model

    @torch.no_grad()
    def read(
        self,
        tokens_N: Tensor,
        slots_N: Tensor,
        positions_N: Tensor,
        wanted_M: Tensor,
        cache: KVCache,
        out_V: Tensor | None = None,
    ) -> Tensor:
        wanted = wanted_M.tolist()
        row_of = {index: row for row, index in enumerate(wanted)}
        logits_MV = logits_in(out_V, len(wanted), self.model.cfg.vocab_size)
        for size, begins in _equally_long(slots_N.tolist()).items():
            at_B = torch.tensor(begins)
            at_BT = at_B[:, None] + torch.arange(size)
            view = _SlotView(cache, slots_N[at_B], positions_N[at_B])
            tokens_BT = tokens_N[at_BT].to(self.model.device)
            indices = [index for index in at_BT.flatten().tolist() if index in row_of]
            rows = torch.tensor([row_of[index] for index in indices], dtype=torch.long)
            if set(indices) <= {begin + size - 1 for begin in begins}:  # the vocabulary is most of a small model's work
                found_BV = self.model(tokens_BT, cache=view, last_only=True)
                is_wanted = [begin + size - 1 in row_of for begin in begins]
                logits_MV[rows] = found_BV[torch.tensor(is_wanted, device=found_BV.device)].float().cpu()
            else:
                found_BTV = self.model(tokens_BT, cache=view)
                is_wanted_BT = torch.tensor([[index in row_of for index in row] for row in at_BT.tolist()])
                logits_MV[rows] = found_BTV[is_wanted_BT.to(found_BTV.device)].float().cpu()
        return logits_MV


def _equally_long(slots: list[int]) -> dict[int, list[int]]:
    """Number of tokens of a slot -> where the tokens of such slots begin."""
    begins: dict[int, list[int]] = {}
    at = 0
    for _, run in groupby(slots):
        size = len(list(run))
        begins.setdefault(size, []).append(at)
        at += size
    return begins


class _SlotView(KVCache):
    """Some slots of a cache, as the rows of one forward pass of the model."""

    def __init__(self, whole: KVCache, slots_B: Tensor, lengths_B: Tensor) -> None:
        device = whole.keys_LBNSH.device
        self.keys_LBNSH, self.values_LBNSH, self.length = whole.keys_LBNSH, whole.values_LBNSH, whole.length
        self.slots_B, self.lengths_B = slots_B.to(device), lengths_B.to(device)
        self.used = int(lengths_B.max())
        self.counts_B = None

    def layer(self, number: int) -> LayerCache:
        return _SlotLayer(self, self.keys_LBNSH[number], self.values_LBNSH[number])


class _SlotLayer(LayerCache):
    whole: _SlotView

    def extend(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        slots_B, num_tokens = self.whole.slots_B, k_BNTH.shape[2]
        at_BT = self.whole.positions(num_tokens)
        self.keys_BNSH[slots_B[:, None], :, at_BT] = k_BNTH.transpose(1, 2).to(self.keys_BNSH.dtype)
        self.values_BNSH[slots_B[:, None], :, at_BT] = v_BNTH.transpose(1, 2).to(self.values_BNSH.dtype)
        end = self.whole.used + num_tokens
        return (
            self.keys_BNSH[:, :, :end][slots_B].to(k_BNTH.dtype),
            self.values_BNSH[:, :, :end][slots_B].to(v_BNTH.dtype),
        )
