"""The loss curve as a picture: well-formed, inside its frame, and true."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptworks.train import plot

SVG = "{http://www.w3.org/2000/svg}"


def points_of(polyline: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in polyline.attrib["points"].split())]


def write_metrics(run: Path, *lines: dict[str, object]) -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_both_curves_are_drawn(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [{"step": step, "loss": 8.0 - step} for step in range(1, 5)]
    write_metrics(tmp_path, *lines, {"step": 2, "held_out_loss": 7.0}, {"step": 4, "held_out_loss": 5.0})
    plot.write(tmp_path)
    root = ElementTree.fromstring((tmp_path / "loss.svg").read_text(encoding="utf-8"))
    training, held_out = root.findall(f"{SVG}polyline")
    assert len(points_of(training)) == 4
    assert len(points_of(held_out)) == len(root.findall(f"{SVG}circle")) == 2
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert texts[0] == f"loss of {tmp_path.name}"
    assert {"training", "held-out", "step"} <= set(texts)
    # Down is a lower loss, right is a later step, and both curves share their axes.
    xs, ys = zip(*points_of(training), strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys)
    assert points_of(held_out)[0][0] == xs[1]
    assert points_of(held_out)[0][1] == pytest.approx(ys[0])


def test_the_axes_say_what_they_show(tmp_path: Path) -> None:
    root = ElementTree.fromstring(plot.svg({"training": [(1, 2.0), (2, 1.0)]}, "x"))
    labels = {text.text: text.attrib for text in root.findall(f"{SVG}text")}
    assert "step" in labels and "rotate(-90" in labels["loss (nats per token)"]["transform"]


def test_many_losses_have_a_smoothed_line_beside_them() -> None:
    """Of a line with waves of three steps around it: the line, whose ends are not those of the waves."""
    training = [(step, 8.0 - step / 50 + (0.5, 0.0, -0.5)[step % 3]) for step in range(1, 301)]
    root = ElementTree.fromstring(plot.svg({"training": training, "held-out": [(300, 2.0)]}, "x"))
    raw, smoothed, _ = root.findall(f"{SVG}polyline")
    assert float(raw.attrib["stroke-opacity"]) < 1 and "stroke-opacity" not in smoothed.attrib
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"training", "training, smoothed", "held-out"} <= set(texts)
    assert [x for x, _ in points_of(smoothed)] == [x for x, _ in points_of(raw)]
    means = plot._with_smoothed({"training": training})["training, smoothed"]
    assert all(mean == pytest.approx(8.0 - step / 50, abs=0.2) for step, mean in means[5:])
    few = ElementTree.fromstring(plot.svg({"training": training[:10]}, "x"))
    assert len(few.findall(f"{SVG}polyline")) == 1


@pytest.mark.parametrize("name", ["a<b", "x&y", 'quo"te', "损失", "]]>"])
def test_any_name_of_a_run_gives_a_well_formed_picture(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    write_metrics(run, {"step": 1, "loss": 2.0})
    plot.write(run)
    root = ElementTree.fromstring((run / "loss.svg").read_text(encoding="utf-8"))
    assert root.find(f"{SVG}text").text == f"loss of {name}"  # type: ignore[union-attr]


losses = st.floats(min_value=0, max_value=1e300, allow_nan=False)


@settings(max_examples=4 * settings().max_examples)
@example([(1, 1e8)], [])
@example([(1, 0.0), (2, 0.0)], [])
@given(
    st.lists(st.tuples(st.integers(1, 10**7), losses), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 10**7), losses), max_size=3),
)
def test_everything_stays_inside_the_frame(
    training: list[tuple[int, float]], held_out: list[tuple[int, float]]
) -> None:
    found = {"training": sorted(training)} | ({"held-out": sorted(held_out)} if held_out else {})
    root = ElementTree.fromstring(plot.svg(found, "x"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for polyline in root.findall(f"{SVG}polyline"):
        for x, y in points_of(polyline):
            assert 64 <= x <= width - 20
            assert 40 <= y <= height - 48


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_and_enclose_the_range(low: float, span: float) -> None:
    ticks = plot.ticks(low, low + span)
    assert ticks[0] <= low + 1e-6 * span
    assert ticks[-1] >= (low + span) - 1e-6 * span
    assert 2 <= len(ticks) <= 9
    assert ticks == sorted(ticks)


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": 1.0})
    assert plot.curves(tmp_path) == {"training": [(1, 2.0), (3, 1.0)]}


def test_nothing_is_written_before_there_is_a_loss(tmp_path: Path) -> None:
    plot.write(tmp_path)
    write_metrics(tmp_path, {"step": 2, "loss": "inf"})
    plot.write(tmp_path)
    assert not (tmp_path / "loss.svg").exists()
    assert plot.text(tmp_path) == "no losses yet"


def test_the_line_of_blocks(tmp_path: Path) -> None:
    write_metrics(tmp_path, *({"step": n, "loss": 9.0 - n} for n in range(1, 9)))
    assert plot.text(tmp_path) == "loss 8.00 █▇▆▅▄▃▂▁ 1.00"
    write_metrics(tmp_path, *({"step": n, "loss": 1000.0 - n} for n in range(1000)))
    bar = re.fullmatch(r"loss 1000\.00 ([▁▂▃▄▅▆▇█]+) 1\.00", plot.text(tmp_path, width=20))
    assert bar
    assert len(bar[1]) == 20
    assert list(bar[1]) == sorted(bar[1], reverse=True)
    write_metrics(tmp_path, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 3.0})
    assert plot.text(tmp_path) == "loss 3.00 ▁▁ 3.00"
