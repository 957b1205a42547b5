"""Parts of tensors that are put together from others, read from little more than the bytes that hold them."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.parallel.slices import Region


def rows_of(tensors: Sequence[LazyTensor], rows: Tensor, columns: Region, *, transposed: bool) -> Tensor:
    """These rows, in this order, of equal tensors that stand one below the other; none of them twice.

    `columns`: which part of each row, nothing for vectors. `transposed`: in the files rows are columns.
    """
    height = tensors[0].shape[1 if transposed else 0]
    ordered, order = rows.sort()
    pieces = []
    for run in _runs(ordered.tolist(), height):
        begin = run.start % height
        here = (slice(begin, begin + len(run)), *columns)
        piece = tensors[run.start // height].region(here[::-1] if transposed else here)
        pieces.append(piece.T if transposed else piece)
    together = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return together if torch.equal(ordered, rows) else together[order.argsort()]


def _runs(ordered: list[int], height: int) -> Iterator[range]:
    """Neighbours among ordered numbers, none across a multiple of `height`."""
    begin = ordered[0]
    for before, number in zip(ordered, [*ordered[1:], -1], strict=True):
        if number != before + 1 or number % height == 0:
            yield range(begin, before + 1)
            begin = number


def beside(pieces: Sequence[Callable[[Region], Tensor]], size: int, dim: int, region: Region) -> Tensor:
    """What lies in a region of equal pieces that stand one after the other along `dim`, each `size` long."""
    cuts = []
    for number, read_region in enumerate(pieces):
        begin, end = (min(max(place - number * size, 0), size) for place in (region[dim].start, region[dim].stop))
        if begin < end:
            cuts.append(read_region((*region[:dim], slice(begin, end), *region[dim + 1 :])))
    return torch.cat(cuts, dim) if len(cuts) > 1 else cuts[0]
