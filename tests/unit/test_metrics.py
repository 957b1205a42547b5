"""metrics.jsonl: every line whole, every step once, whatever happened to the run."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.train import metrics
from gptworks.train.metrics import Metrics
from gptworks.train.trackers import Begun, TensorBoard


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = Metrics(tmp_path, resumed_step=0)
    log.log(1, {"loss": 6.25, "tokens": 64})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 6.25, "tokens": 64}\n'
    log.log(1, {"held_out_loss": 6.0})
    log.close()
    assert metrics.read(tmp_path) == [{"step": 1, "loss": 6.25, "tokens": 64}, {"step": 1, "held_out_loss": 6.0}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_text(value: float, tmp_path: Path) -> None:
    log = Metrics(tmp_path, resumed_step=0)
    log.log(3, {"loss": value, "lr": 0.5})
    log.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 3, "loss": str(value), "lr": 0.5}


def test_resuming_forgets_what_will_be_done_again(tmp_path: Path) -> None:
    log = Metrics(tmp_path, resumed_step=0)
    for step in range(1, 8):
        log.log(step, {"loss": 1 / step})
    log.close()
    log = Metrics(tmp_path, resumed_step=4)
    log.log(5, {"loss": 0.0})
    log.close()
    assert [(line["step"], line["loss"]) for line in metrics.read(tmp_path)] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
        (4, 0.25),
        (5, 0.0),
    ]
    assert {path.name for path in tmp_path.iterdir()} <= {"metrics.jsonl", "tensorboard"}


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_last_line_that_was_cut_off_is_left_out(cut: int, tmp_path: Path) -> None:
    whole = '{"step": 1, "loss": 6.25}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 2, "loss": 3.125, "x": 1}\n'[:cut])
    assert metrics.read(tmp_path) == [{"step": 1, "loss": 6.25}]
    log = Metrics(tmp_path, resumed_step=9)
    log.log(10, {"loss": 1.0})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == whole + '{"step": 10, "loss": 1.0}\n'


GARBAGE = [
    b"not JSON",
    b"\xff\xfe\x00",
    b"\x00" * 40,
    b'{"loss": 3.0}',
    b'{"step": "two"}',
    b'{"step": -1}',
    b'{"step": true}',
    b'{"step": 1.5}',
    b"[1, 2]",
    b"null",
    b'{"step": 2, "loss": 3.0} {"step": 3}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": 2, "loss": 1' + b"0" * 400 + b"}",
    b'{"step": 2, "text": "\\ud800"}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("name", ["metrics.jsonl", "nonfinite.jsonl"])
def test_lines_that_are_none_are_set_aside_and_counted(name: str, tmp_path: Path) -> None:
    path, said = tmp_path / name, []
    good = [b'{"step": 1, "loss": 6.25}', b'{"step": 2, "loss": "nan"}']
    path.write_bytes(b"\n".join([good[0], *GARBAGE, b"", good[1], b'{"step": 3, "lo']))
    if name == "metrics.jsonl":
        assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2]
        assert metrics.num_unreadable(tmp_path) == len(GARBAGE)
    Metrics(tmp_path, resumed_step=5, say=said.append).close()
    assert path.read_bytes().splitlines() == good
    aside = tmp_path / f"{name}.bad"
    assert aside.read_bytes() == b"\n".join(GARBAGE) + b"\n"
    assert said == [f"{path}: {len(GARBAGE)} lines that cannot be read set aside in {aside}"]
    path.write_bytes(good[0] + b"\nmore\n")
    Metrics(tmp_path, resumed_step=5, say=said.append).close()
    assert aside.read_bytes() == b"\n".join([*GARBAGE, b"more"]) + b"\n", "what was set aside before is still there"
    assert said[1:] == [f"{path}: 1 line that cannot be read set aside in {aside}"]


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert metrics.read(tmp_path) == []
    metrics.forget_after(tmp_path / "metrics.jsonl", 3)
    assert not (tmp_path / "metrics.jsonl").exists()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), st.integers(0, 25))
def test_kept_numbers_keep_every_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float], kept: int) -> None:
    path = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "loss": value}) + "\n" for n, value in enumerate(values)))
    metrics.forget_after(path, kept)
    assert [line["loss"].hex() for line in metrics.read(path.parent)] == [value.hex() for value in values[: kept + 1]]


def test_tensorboard_gets_the_same_numbers_and_purges_on_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps in ((0, range(1, 6)), (3, range(4, 7))):
        board = TensorBoard(Begun(tmp_path, resumed, {}, "ours"))
        log = Metrics(tmp_path, resumed_step=resumed, trackers=[board])
        for step in steps:
            log.log(step, {"loss": float(step + 100 * resumed)})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(line["step"], line["loss"]) for line in metrics.read(tmp_path)]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6], "each step once"
