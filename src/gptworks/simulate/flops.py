"""Counts floating-point operations of matrix products and attention while they run, on real or fake tensors.

A product of m x k by k x n is 2mkn. Fused causal attention is half of what is masked and what is not, and its backward
pass twice its forward pass, as plan/sizes.py has it; that kernels compute the scores again in the backward pass is not
counted. (torch's FlopCounterMode keeps recomputed activations alive, knows no addmm_, and no attention of the CPU.)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# operator -> where the two matrices are
_PRODUCTS = {
    _aten.mm: 0,
    _aten.bmm: 0,
    _aten.addmm: 1,
    _aten.addmm_: 1,
    _aten.baddbmm: 1,
}
# operator -> where query and key are, where is_causal is, products
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, 4, 2),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 7, 4),
}


class Flops(TorchDispatchMode):
    """`with Flops() as flops: ...`, then `flops.total`."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.attention = 0

    @property
    def total(self) -> int:
        return self.products + self.attention

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor: the operators on local tensors are counted
        operator = getattr(func, "overloadpacket", None)
        if operator in _PRODUCTS:
            a, b = args[_PRODUCTS[operator] :][:2]
            self.products += 2 * a.numel() * b.shape[-1]
        elif operator in _ATTENTION:
            first, causal, number = _ATTENTION[operator]
            query, key = args[first : first + 2]
            whole = number * 2 * query.numel() * key.shape[-2]
            is_causal = args[causal] if len(args) > causal else (kwargs or {}).get("is_causal", False)
            self.attention += whole // 2 if is_causal else whole
        return func(*args, **(kwargs or {}))
