"""Tensor parallelism over more ranks than there are heads of keys and values: several ranks hold a copy of one head.

The matrix of queries, keys and values then has the rows [queries of the rank | key | value] of one rank after the
other, which a plain cut shares out. Gradients of copies are summed, so that they stay equal; a checkpoint has each row
once, where it is in the whole matrix.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptworks.architecture import role_of
from gptworks.config.schema import ModelConfig
from gptworks.parallel.slices import Pieces, Slice, local_of, region_of


@dataclass(frozen=True)
class KVCopies:
    kv_heads: int
    copies: int  # of each
    query_rows: int  # on one rank
    head_size: int

    @classmethod
    def of(cls, model: ModelConfig, tp: int) -> "KVCopies | None":
        """None where every rank has heads of its own."""
        if tp <= model.num_kv_heads:
            return None
        query_rows = model.num_heads // tp * model.head_size
        return cls(model.num_kv_heads, tp // model.num_kv_heads, query_rows, model.head_size)

    @property
    def heads_per_kv(self) -> int:
        """On one rank."""
        return self.query_rows // self.head_size

    @property
    def rows_of_rank(self) -> int:
        return self.query_rows + 2 * self.head_size

    @property
    def rows_with_copies(self) -> int:
        return self.kv_heads * self.copies * self.rows_of_rank

    @property
    def _rows_of_head(self) -> int:
        """Rows of one head of keys and values in the whole matrix, with all queries that share it."""
        return self.copies * self.query_rows + 2 * self.head_size

    def with_copies(self, whole: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other."""
        rows = []
        for rank in range(self.kv_heads * self.copies):
            first, second = self._places(rank)
            rows += [whole.narrow(0, first, self.query_rows), whole.narrow(0, second, 2 * self.head_size)]
        return torch.cat(rows)

    def _places(self, rank: int) -> tuple[int, int]:
        """Where the queries of a rank begin in the whole matrix, and where its key does."""
        head, number = divmod(rank, self.copies)
        start = head * self._rows_of_head
        return start + number * self.query_rows, start + self.copies * self.query_rows

    def pieces(self, tensor: Tensor) -> Pieces:
        """What is here of a cut tensor of rows with copies, by its places in the whole one."""
        rows, *others = region_of(tensor)
        here = local_of(tensor)
        rank, begin = divmod(rows.start, self.rows_of_rank)
        end = begin + rows.stop - rows.start
        shape = torch.Size([self.kv_heads * self._rows_of_head, *tensor.shape[1:]])
        slices = []
        edges = (0, self.query_rows, self.rows_of_rank)
        for low, high, place in zip(edges, edges[1:], self._places(rank), strict=False):
            first, last = max(begin, low), min(end, high)
            if first < last:
                offsets = torch.Size([place + first - low, *(each.start for each in others)])
                slices.append(Slice(here[first - begin : last - begin], offsets, shape))
        return Pieces(tuple(slices), shape, here.dtype)

    def shared_rows(self, gradient: Tensor) -> tuple[Tensor, int]:
        """The rows of a cut gradient here that other ranks have copies of, and the number of their head."""
        rows = region_of(gradient)[0]
        rank, begin = divmod(rows.start, self.rows_of_rank)
        here = local_of(gradient)
        return here[max(0, self.query_rows - begin) :], rank // self.copies


_ATTRIBUTE = "kv_copies"


def remember(part: nn.Module, copies: KVCopies | None) -> None:
    setattr(part, _ATTRIBUTE, copies)


def copies_in(part: nn.Module) -> KVCopies | None:
    return getattr(part, _ATTRIBUTE, None)


def is_copied(name: str) -> bool:
    """Whether a tensor has rows of keys and values; moments have a beginning before the name of their parameter."""
    match = re.search(r"(^|\.)(blocks\.\d+\..*)$", name)
    return match is not None and bool(role_of(match[2]).fused)


def as_stored(named: Iterable[tuple[str, Tensor]], copies: KVCopies | None) -> Iterator[tuple[str, Tensor | Pieces]]:
    """Tensors of a rank as checkpoints and comparisons know them."""
    for name, tensor in named:
        yield name, copies.pieces(tensor) if copies is not None and is_copied(name) else tensor
