"""One token out of a distribution, by one random number."""

import pytest
import torch

from gptworks.generate.logits import keep_top_p
from gptworks.generate.sampler import drawn_from


def test_tokens_come_as_often_as_they_are_likely() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    generator = torch.Generator().manual_seed(3)
    number = 20_000
    counts = torch.bincount(
        torch.tensor([drawn_from(probabilities, generator) for _ in range(number)]), minlength=len(probabilities)
    )
    is_possible = probabilities > 0
    assert counts[~is_possible].sum() == 0
    expected = probabilities[is_possible] * number
    chi_square = float(((counts[is_possible] - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # of 3 degrees of freedom: one in a thousand is above


@pytest.mark.parametrize(
    ("number", "token"), [(0.0, 1), (0.25, 1), (0.5, 3), (0.999, 3), (1 - 2**-53, 3), (1.0, 3)]
)  # 1.0 is what rounding may make of the largest product
def test_a_number_falls_on_a_token_that_can_be(monkeypatch: pytest.MonkeyPatch, number: float, token: int) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(number, dtype=torch.float64))
    assert drawn_from(torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]), torch.Generator()) == token


def test_the_same_seed_draws_the_same_and_one_number_only() -> None:
    probabilities = torch.rand(50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    one, other = (torch.Generator().manual_seed(9) for _ in range(2))
    assert [drawn_from(probabilities, one) for _ in range(5)] == [drawn_from(probabilities, other) for _ in range(5)]
    torch.rand(3, dtype=torch.float64, generator=other)
    for _ in range(3):
        drawn_from(probabilities, one)
    assert torch.equal(one.get_state(), other.get_state())


def test_top_p_keeps_as_many_of_equal_ones_as_it_needs() -> None:
    logits = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    share = float(logits.softmax(-1)[0])
    kept = torch.isfinite(keep_top_p(logits, 1 - 2.5 * share))
    assert kept.tolist() == [True, True, True, False, False]
