"""The C++ function that updates parameters, beside torch's AdamW."""

import pytest
import torch
from torch import nn

from gptworks.train import block_library, native_blocks, optim
from gptworks.train.native_update import NativeUpdate

SIZES = [(3, 5), (1,), (17,), (64, 33), (2048,)]  # tensors that end within a register, and within a thread's share


@pytest.fixture(scope="module")
def functions() -> block_library.Functions:
    found, reason = block_library.loaded(native_blocks.compute_a_little)
    if found is None:
        pytest.skip(reason)
    return found


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def adamw(each: list[nn.Parameter], beta2: float = 0.95) -> optim.AdamW:
    groups = [{"params": each[:2], "weight_decay": 0.1}, {"params": each[2:], "weight_decay": 0.0}]
    return optim.AdamW(groups, lr=1e-2, betas=(0.9, beta2), eps=1e-8, fused=True)


def give_gradients(step: int, *of: list[nn.Parameter]) -> None:
    for each in of:
        generator = torch.Generator().manual_seed(step)
        for parameter in each:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(("threads", "beta2"), [(1, 0.95), (2, 0.999), (3, 0.9999)])
def test_updates_are_torchs(functions: block_library.Functions, threads: int, beta2: float) -> None:
    ours, torchs = parameters(), parameters()
    mine, theirs = adamw(ours, beta2), adamw(torchs, beta2)
    mine.native = NativeUpdate(functions)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(1, 6):
            optim.set_lr(mine, 1e-2 / step)
            optim.set_lr(theirs, 1e-2 / step)
            give_gradients(step, ours, torchs)
            mine.update(ours, 0.37)
            theirs.update(torchs, 0.37)
    finally:
        torch.set_num_threads(before)
    for number, (one, other) in enumerate(zip(ours, torchs, strict=True)):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            found, expected = mine.state[one][name], theirs.state[other][name]
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-8, msg=f"{name} of {number}")


def test_what_has_no_gradient_stays(functions: block_library.Functions) -> None:
    ours, start = parameters(), parameters()
    mine = adamw(ours)
    mine.native = NativeUpdate(functions)
    give_gradients(1, ours)
    ours[3].grad = None
    mine.update([each for each in ours if each.grad is not None], 1.0)
    same = [torch.equal(now, then) for now, then in zip(ours, start, strict=True)]
    assert same == [False, False, False, True, False] and ours[3] not in mine.state


def test_one_whose_gradients_begin_later_counts_its_own_updates(functions: block_library.Functions) -> None:
    ours, torchs = parameters(), parameters()
    mine, theirs = adamw(ours, 0.999), adamw(torchs, 0.999)
    mine.native = NativeUpdate(functions)
    for step in range(1, 6):
        give_gradients(step, ours, torchs)
        for each in (ours, torchs):
            each[2].grad = each[2].grad if step > 3 else None  # the first of its group
        mine.update(ours, 1.0)
        theirs.update([each for each in torchs if each.grad is not None], 1.0)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)
        assert mine.state[one]["step"] == theirs.state[other]["step"]


def test_a_training_goes_on_with_torchs_state(functions: block_library.Functions) -> None:
    """State that torch has made, and the reverse: a run may be resumed where there is no compiler."""
    ours, torchs = parameters(), parameters()
    mine, theirs = adamw(ours), adamw(torchs)
    for step in range(1, 5):
        mine.native = NativeUpdate(functions) if step % 2 else None
        give_gradients(step, ours, torchs)
        mine.update(ours, 1.0)
        theirs.update(torchs, 1.0)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)
