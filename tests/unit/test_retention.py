"""Which checkpoints a run that goes wrong still has."""

import math

import pytest

from gptworks.checkpoint.retention import MUCH_WORSE, choose, newest_sound
from gptworks.config.schema import CheckpointConfig
from gptworks.train.saving import SmoothedLoss


@pytest.mark.parametrize(
    ("losses", "now", "sound"),
    [
        ({}, 3.0, None),
        ({2: 5.0, 4: 4.0}, 3.9, 4),  # all is well: the newest
        ({2: 5.0, 4: 4.0}, 4.0 + MUCH_WORSE, 4),
        ({2: 5.0, 4: 4.0}, 4.1 + MUCH_WORSE, 2),  # the update that made 4 may be what went wrong
        ({2: 5.0, 4: 4.0}, math.inf, 2),
        ({2: 5.0, 4: 4.0, 6: 50.0, 8: 60.0}, 60.0, 2),
        ({2: 5.0, 4: 4.0, 6: math.inf}, math.inf, 2),  # saved while steps were skipped
        ({2: 5.0}, math.inf, None),
        ({2: None, 4: None}, None, 4),  # nothing is known, and nothing held against them
        ({2: None, 4: None}, 3.0, 4),
        ({2: None, 4: 3.0}, 9.0, 2),
    ],
)
def test_the_newest_sound_checkpoint(losses: dict[int, float | None], now: float | None, sound: int | None) -> None:
    assert newest_sound(losses, now) == sound


@pytest.mark.parametrize(
    ("losses", "now", "needed"),
    [
        ({1: 5.0, 2: 4.0, 3: 3.0}, 2.9, set()),
        ({1: 3.0, 2: 4.2, 3: 4.4}, 4.5, {1}),  # slowly, and yet much worse
        ({1: 5.0, 2: 3.0, 3: 3.1}, 8.0, {2}),
        ({1: 3.0, 2: 3.5, 3: 3.4}, 8.0, {1, 2}),  # the lowest, and the newest that went on well
        ({1: 3.0, 2: 8.0, 3: 8.0}, 2.5, {1}),  # recovered, but 2 and 3 are not better for it
    ],
)
def test_what_stays_besides(losses: dict[int, float | None], now: float, needed: set[int]) -> None:
    kept = choose(losses, now, CheckpointConfig(keep_last=1), best=None)
    assert kept.asked == {3}
    assert kept.needed == needed


def test_a_run_that_explodes_never_loses_its_last_sound_checkpoint() -> None:
    """As training does it: delete, then save; at every length of the good part and of the bad one."""
    for good in range(2, 8):
        present: dict[int, float | None] = {}
        for step in range(1, 20):
            loss = 5.0 - 0.1 * step if step <= good else 30.0
            kept = choose(present, loss, CheckpointConfig(keep_last=1), None) if len(present) > 1 else None
            present = {s: v for s, v in present.items() if kept is None or s in kept.asked | kept.needed}
            present[step] = loss
            assert len(present) <= 4
            assert good - 1 in present or step < good - 1 or step == good - 1
        # The update of step `good` is what made the loss of the step after it.
        assert newest_sound(present, 30.0) == good - 1


def test_the_loss_that_is_watched_goes_wrong_at_once_and_recovers_slowly() -> None:
    loss = SmoothedLoss()
    assert (loss.value, loss.recent, loss.untried) == (None, None, True)
    for _ in range(50):
        loss.see(3.0)
    assert loss.value == pytest.approx(3.0) and not loss.untried
    loss.see(8.0)
    assert loss.value == pytest.approx(3.5) and loss.recent == 8.0
    loss.see(3.0)
    assert loss.recent == loss.value == pytest.approx(3.45)
    loss.see(math.nan)
    assert loss.recent == math.inf and loss.value == pytest.approx(3.45)
