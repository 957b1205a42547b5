"""Word embedding, head and loss with the vocabulary cut among ranks. For a loss, logits are never gathered.

The cut is torch.chunk's: all ranks have ceil(V / ranks) rows but the last ones, which may have fewer. Nothing is padded
but what gathering logits for generation sends.
Shapes: B rows, T tokens, C rows of a chunk, D hidden, V vocabulary, W words of it on this rank.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from gptworks.errors import UsageError
from gptworks.model.loss import Words
from gptworks.parallel import collectives
from gptworks.parallel.collectives import TensorRanks


def embed(tokens_BT: Tensor, weight_WD: Tensor, vocab_size: int, ranks: TensorRanks) -> Tensor:
    """Each rank looks up the words it has; the others count as zero in the sum."""
    if ranks.split_tokens and tokens_BT.shape[1] % ranks.size:
        raise UsageError(
            f"{tokens_BT.shape[1]} tokens in a row cannot be cut among the {ranks.size} ranks of parallel.tp. Needed: "
            f"a multiple of {ranks.size}. Change data.seq_len, or set parallel.sequence: false."
        )
    ids = tokens_BT - first_word(vocab_size, ranks)
    elsewhere = _is_elsewhere(ids, weight_WD.shape[0], ranks.rank, ranks.size)
    found_BTD = F.embedding(ids.masked_fill(elsewhere, 0), weight_WD).masked_fill(elsewhere[..., None], 0.0)
    if ranks.split_tokens:
        return collectives.sum_to_split_tokens(found_BTD, ranks)
    return collectives.sum_over_ranks(found_BTD, ranks)


def logits(x: Tensor, weight_WD: Tensor, vocab_size: int, ranks: TensorRanks) -> Tensor:
    """Logits of the whole vocabulary and of all tokens, on every rank."""
    if not ranks.split_tokens:
        x = collectives.copy_to_ranks(x, ranks)
    elif x.ndim == 3:
        x = collectives.gather_tokens(x, ranks)
    else:
        raise UsageError(
            "last_only: the last token of a sequence that is cut among ranks is on one of them only. "
            "Call the model under torch.no_grad(), or set parallel.sequence: false."
        )
    return collectives.gather_features(F.linear(x, weight_WD.to(x.dtype)), vocab_size, ranks)


def first_word(vocab_size: int, ranks: TensorRanks) -> int:
    return ranks.rank * math.ceil(vocab_size / ranks.size)


def _is_elsewhere(ids: Tensor, num_words: int, rank: int, num_ranks: int) -> Tensor:
    """Words of another rank. What is outside the vocabulary is nobody's: the first and the last rank keep it, and the
    lookup there refuses it, as on one process."""
    below = ids < 0 if rank else torch.zeros_like(ids, dtype=torch.bool)
    return below if rank == num_ranks - 1 else below | (ids >= num_words)


@dataclass(frozen=True)
class CutWords(Words):
    """The words of one rank; all of them get the same loss. Two small sums over ranks a chunk; tokens may be cut
    among the ranks too."""

    vocab_size: int
    ranks: TensorRanks
    split_tokens: bool  # as it was before a Function switched gradients off

    @property
    def group(self) -> ProcessGroup:
        return self.ranks.group

    def most(self, weight_VD: Tensor) -> int:
        return math.ceil(self.vocab_size / self.ranks.size)

    def rows(self, x: Tensor) -> Tensor:
        return collectives.all_gather_tokens(x, self.group) if self.split_tokens else x

    def gradient(self, grad_x: Tensor) -> Tensor:
        add_up = collectives.reduce_scatter_tokens if self.split_tokens else collectives.all_reduce
        return add_up(grad_x, self.group)

    def places(self, labels_C1: Tensor, scored_C1: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
        first = first_word(self.vocab_size, self.ranks)
        here_C1 = scored_C1 & ~_is_elsewhere(labels_C1 - first, num_words, self.ranks.rank, self.ranks.size)
        return (labels_C1 - first).masked_fill(~here_C1, 0), here_C1

    def highest(self, logit_C1: Tensor) -> Tensor:
        distributed.all_reduce(logit_C1, distributed.ReduceOp.MAX, group=self.group)
        return logit_C1

    def totals(self, sum_C1: Tensor, target_logit_C1: Tensor, here_C1: Tensor) -> tuple[Tensor, Tensor]:
        sums_C2 = torch.cat([sum_C1, target_logit_C1.masked_fill(~here_C1, 0.0)], 1)
        distributed.all_reduce(sums_C2, group=self.group)
        total_C1, target_logit_C1 = sums_C2.split(1, 1)
        return total_C1, target_logit_C1
