"""The products of the C++ functions alone: the peak that training by them can be measured against."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from gptworks.train.block_library import Functions

_SIZES, _TENSORS = ("rows", "columns", "depth", "is_narrow"), ("sgemm", "a", "b", "c")


class _Product(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int64) for name in _SIZES), *((name, ctypes.c_void_p) for name in _TENSORS))


def multiplier(functions: Functions, *, is_narrow: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """a b of two fp32 matrices, by all threads. is_narrow: their numbers are rounded to bf16."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.float32 and a.is_contiguous() and b.is_contiguous()
        (rows, depth), columns = a.shape, b.shape[1]
        c = a.new_empty(rows, columns)
        product = _Product(rows, columns, depth, is_narrow, functions.sgemm, a.data_ptr(), b.data_ptr(), c.data_ptr())
        functions.product(ctypes.byref(product))
        return c

    return multiply
