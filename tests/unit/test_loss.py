"""Head and cross-entropy in chunks, against torch's cross_entropy on the whole [tokens, vocabulary] matrix."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptworks.model import loss as loss_file
from gptworks.model.loss import IGNORED, LinearCrossEntropy

ROWS, WIDTH, VOCAB = 37, 8, 29
# Logits at a time: one row, a few rows with a remainder, exactly all rows, far more than there are.
CHUNKS = [1, VOCAB * 5, VOCAB * ROWS, 10**9]


def inputs(dtype: torch.dtype = torch.float64, *, ignored: float = 0.4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[torch.rand(ROWS, generator=generator) < ignored] = IGNORED
    weight = weight.to(dtype if dtype == torch.float64 else torch.float32)
    return x.requires_grad_(), weight.requires_grad_(), labels


def reference(x: Tensor, weight: Tensor, labels: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and both gradients in fp64, from the same (possibly rounded) numbers."""
    x64 = x.detach().double().requires_grad_()
    w64 = weight.detach().to(x.dtype).double().requires_grad_()
    loss = F.cross_entropy(x64 @ w64.T, labels, ignore_index=IGNORED, reduction="sum")
    (loss * factor).backward()
    assert x64.grad is not None and w64.grad is not None
    return loss.detach(), x64.grad, w64.grad


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_loss_and_gradients_equal_cross_entropy(
    chunk: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_file, "CHUNK_ELEMENTS", chunk)
    x, weight, labels = inputs(dtype)
    loss = LinearCrossEntropy()(x, weight, labels)
    (loss * 0.37).backward()  # the trainer divides by the number of scored tokens
    expected, grad_x, grad_weight = reference(x, weight, labels, 0.37)
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert x.grad is not None and weight.grad is not None
    torch.testing.assert_close(x.grad.double(), grad_x, rtol=0, atol=tolerance * 10)
    torch.testing.assert_close(weight.grad.double(), grad_weight, rtol=0, atol=tolerance * 10)


def test_rows_of_a_batch_are_all_summed() -> None:
    x, weight, labels = inputs(ignored=0.0)
    rows = x.detach()[:36].reshape(4, 9, WIDTH)
    loss = LinearCrossEntropy()(rows, weight, labels[:36].reshape(4, 9))
    expected = F.cross_entropy(x[:36] @ weight.T, labels[:36], reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_ignored_rows_leave_no_trace() -> None:
    x, weight, labels = inputs()
    LinearCrossEntropy()(x, weight, labels).backward()
    assert x.grad is not None
    assert torch.equal(x.grad[labels == IGNORED], torch.zeros_like(x.grad[labels == IGNORED]))
    assert (x.grad[labels != IGNORED].abs().sum(-1) > 0).all()


def test_nothing_scored_is_a_loss_of_zero_with_zero_gradients() -> None:
    x, weight, labels = inputs(ignored=1.1)
    loss = LinearCrossEntropy()(x, weight, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None and weight.grad is not None
    assert x.grad.abs().max() == 0.0 and weight.grad.abs().max() == 0.0


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_an_fp32_loss_and_fp32_weight_gradients(
    chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_file, "CHUNK_ELEMENTS", chunk)
    x, weight, labels = inputs(dtype)
    loss = LinearCrossEntropy()(x, weight, labels)
    loss.backward()
    expected, grad_x, grad_weight = reference(x, weight, labels)
    assert loss.dtype == torch.float32
    # Logits of about 8 carry an error of 2^-9 relative in bf16; it averages out over 37 rows.
    assert loss.item() == pytest.approx(expected.item(), rel=3e-3)
    assert x.grad is not None and weight.grad is not None
    assert x.grad.dtype == dtype and weight.grad.dtype == torch.float32
    for got, wanted in ((x.grad, grad_x), (weight.grad, grad_weight)):
        assert (got.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_huge_logits_do_not_overflow() -> None:
    x, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        x *= 1000
    loss = LinearCrossEntropy()(x, weight, labels)
    loss.backward()
    expected, _, grad_weight = reference(x, weight, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(weight.grad.double(), grad_weight, rtol=1e-4, atol=0.1)


def test_the_weight_gradient_is_summed_in_fp32() -> None:
    """Over 20,000 tokens of one kind the sum is 120,000, which fp16 does not reach."""
    x = torch.full((20000, 1), 8.0, dtype=torch.float16)
    weight = torch.zeros(4, 1, requires_grad=True)
    LinearCrossEntropy()(x, weight, torch.zeros(20000, dtype=torch.long)).backward()
    assert weight.grad.flatten().tolist() == pytest.approx([-120000, 40000, 40000, 40000])


def test_without_gradients_the_loss_is_the_same() -> None:
    x, weight, labels = inputs()
    with_gradients = LinearCrossEntropy()(x, weight, labels)
    with torch.no_grad():
        without = LinearCrossEntropy()(x, weight, labels)
    assert with_gradients.requires_grad and not without.requires_grad
    assert without.item() == pytest.approx(with_gradients.item(), rel=1e-14)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_one_side_may_be_frozen(frozen: str) -> None:
    x, weight, labels = inputs()
    (x if frozen == "x" else weight).requires_grad_(False)
    LinearCrossEntropy()(x, weight, labels).backward()
    _, grad_x, grad_weight = reference(x, weight, labels)
    got, wanted, none = (weight.grad, grad_weight, x.grad) if frozen == "x" else (x.grad, grad_x, weight.grad)
    assert none is None
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


class Watch(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns, and counts matrix products."""

    elements = products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.name().split("::")[1].startswith(("mm", "addmm"))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("gradients", [True, False])
def test_the_whole_logit_matrix_never_exists(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_file, "CHUNK_ELEMENTS", VOCAB * 12)
    x, weight, labels = inputs()
    with torch.set_grad_enabled(gradients), Watch() as seen:
        loss = LinearCrossEntropy()(x, weight, labels)
        if gradients:
            loss.backward()
    assert 0 < seen.elements <= VOCAB * 12 < VOCAB * ROWS


@pytest.mark.parametrize(("gradients", "products"), [(True, 3), (False, 1)])
def test_evaluation_pays_for_the_logits_only(gradients: bool, products: int) -> None:
    """One product per chunk; with gradients one more for each of x and weight."""
    x, weight, labels = inputs()
    with torch.set_grad_enabled(gradients), Watch() as seen:
        LinearCrossEntropy()(x, weight, labels)
    assert seen.products == products
