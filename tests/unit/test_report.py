"""The report of runs: a page that needs nothing else, with all that the run folders tell."""

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.cli.main import main
from gptworks.cli.report import distinct_names
from gptworks.config import yaml_text
from gptworks.config.load import load
from gptworks.report import chart, page, run_data
from gptworks.report.thinning import thinned
from gptworks.train.plot import smoothed

VOID = {"meta", "input", "line", "circle", "polyline", "path", "br"}


def make_run(folder: Path, lines: list[dict[str, Any]], overrides: tuple[str, ...] = ()) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load(preset="gpt2", overrides=["train.steps=10", *overrides])
    (folder / "config.yaml").write_text(yaml_text.dump(config.model_dump(mode="json")))
    (folder / "environment.json").write_text(json.dumps({"command": ["gptworks", "train"], "python": "3.11.7"}))
    return folder


def falling(steps: int) -> list[dict[str, Any]]:
    return [{"step": k, "loss": 8.0 - 5.0 * k / steps, "lr": 1e-3, "tokens": 64 * k} for k in range(1, steps + 1)]


class Checked(HTMLParser):
    """Every element is closed in order; collects words, and whatever would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []  # to parts of the page
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.loads += [
            f"{tag} {name}={value}"
            for name, value in attrs
            if name in {"src", "href", "style", "onclick"} and not (name == "href" and str(value).startswith("#"))
        ]
        self.links += [str(given["href"])[1:]] if "href" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in {"script", "style"}:
            self.words += data + " "


def parsed(text: str) -> Checked:
    found = Checked()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(6, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float], most: int) -> None:
    points = [(float(number), value) for number, value in enumerate(values)]
    found = thinned(points, most)
    assert len(found) <= max(most, 4)
    assert found == sorted(set(found)) and set(found) <= set(points)
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert {min(y for _, y in found), max(y for _, y in found)} == {min(values), max(values)}


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=300))
def test_the_smoothed_curve_stays_within_the_values(values: list[float]) -> None:
    found = smoothed([(float(number), value) for number, value in enumerate(values)], len(values))
    assert [x for x, _ in found] == list(range(len(values)))
    assert all(min(values) - 1e-6 <= y <= max(values) + 1e-6 for _, y in found)


def test_a_smoothed_curve_is_the_mean_of_a_window() -> None:
    points = [(float(k), float(k % 2)) for k in range(200)]
    assert dict(smoothed(points, 200))[100.0] == pytest.approx(6 / 11)  # 95 to 105, of which six are odd


def test_a_spike_is_forgotten_by_the_smoothed_curve_when_it_has_passed() -> None:
    points = [(float(k), 1e25 if k == 50 else 2.0) for k in range(4000)]
    found = smoothed(points, 100)
    assert len(found) == 101 and found[-1] == (3999.0, pytest.approx(2.0))


@pytest.mark.slow
def test_one_spike_among_100_000_steps_is_drawn(tmp_path: Path) -> None:
    lines = falling(100_000)
    lines[43_210 - 1]["loss"] = 77.125
    (curve, *_) = page.charts_of([run_data.read(make_run(tmp_path / "long", lines))])["loss"]
    assert len(curve.points) <= 600
    assert (43_210.0, 77.125) in curve.points


@pytest.mark.slow
def test_the_page_of_long_runs_is_small_and_loads_nothing(tmp_path: Path) -> None:
    lines = [{**line, "grad_norm": 1 + line["step"] % 7, "mfu": 0.4, "tokens_per_sec": 9.5} for line in falling(30_000)]
    runs = [run_data.read(make_run(tmp_path / name, lines)) for name in "abcd"]
    text = page.written(runs)
    assert len(text.encode()) < 1_000_000
    found = parsed(text)
    assert found.loads == []
    assert len(found.ids) == len(set(found.ids))
    assert found.links and set(found.links) <= set(found.ids)
    assert "http" not in re.sub(r"http-equiv|http://www\.w3\.org/\S+", "", text)


def test_its_policy_admits_its_own_style_and_script_and_no_other(tmp_path: Path) -> None:
    text = page.written([run_data.read(make_run(tmp_path / "run", falling(5)))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and policy[1].startswith("default-src 'none'; ")
    for kind, element in (("style", r"<style>(.*?)</style>"), ("script", r"<script>(.*?)</script>")):
        inside = re.search(element, text, re.S)
        assert inside is not None
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]


def test_names_and_values_are_text_whatever_they_are(tmp_path: Path) -> None:
    name = "<script>alert(1)<" + chr(92) + "script>"
    run = make_run(tmp_path / "run", falling(3), ("data.path=['</script><img src=x>']",))
    text = page.written([run_data.read(run, name), run_data.read(run, "</script><b>")])
    found = parsed(text)
    assert found.loads == [] and "<script>alert" not in text and "<img" not in text and "<b>" not in text
    assert name in found.words and "</script><img src=x>" in found.words


def test_what_differs_between_runs_stands_in_one_table(tmp_path: Path) -> None:
    first = make_run(tmp_path / "one", falling(5), ("optim.lr=0.003",))
    second = make_run(tmp_path / "two", falling(5), ("optim.lr=0.006",))
    words = parsed(page.written([run_data.read(first), run_data.read(second)])).words
    table = words[words.rindex("What differs between the runs") : words.rindex("Bad steps")]
    assert "optim.lr" in table and "0.003" in table and "0.006" in table
    assert "optim.beta1" not in table
    assert "run.out" not in table, "which differs always"


def test_bad_steps_are_flags_of_the_loss_which_go_with_their_run(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, falling(40)) for name in "ab"]
    event = {"step": 60, "rule": "loss", "decision": "rollback", "loss": 9.0, "loss_z": 8.0}  # after the last line
    (runs[1] / "events.jsonl").write_text(json.dumps(event) + "\n")
    (runs[1] / "nonfinite.jsonl").write_text(json.dumps({"step": 20, "sample_ids": [1]}) + "\n")
    text = page.written([run_data.read(run) for run in runs])
    svg = re.search(r'data-chart="loss".*?(<svg class="linear".*?</svg>)', text, re.S)
    assert svg is not None
    flags = re.findall(r'<g class="curve run-(\d)"><title>(.*?)</title><path class="flag" d="M([\d.]+)', svg[1])
    assert [(run, said.partition(":")[0]) for run, said, _ in flags] == [("1", "b"), ("1", "b")]
    assert "not finite, step 20" in flags[0][1] and "step 60: a high loss, rolled back" in flags[1][1]
    (left, _, right, _) = map(float, re.search(r'data-box="([^"]*)"', svg[1])[1].split())  # type: ignore[index]
    assert [round((float(x) - left) / (right - left), 3) for *_, x in flags] == [pytest.approx(1 / 3, abs=0.01), 1.0]


def test_a_flat_curve_is_not_magnified() -> None:
    assert chart.linear_axis(0.0, 0.0).ticks[-1] == 1.0
    axis = chart.linear_axis(388_500_000.0, 388_500_400.0)
    assert axis.low <= 388.5e6 * 0.95 and axis.high >= 388.5e6 * 1.05


def test_the_summary_has_the_lowest_held_out_loss_and_its_perplexity(tmp_path: Path) -> None:
    held_out = [{"step": step, "held_out_loss": loss} for step, loss in ((2, 3.0), (4, 2.0), (6, 2.5))]
    run = run_data.read(make_run(tmp_path / "run", [*falling(6), *held_out]))
    words = parsed(page.written([run])).words
    assert "2.0000" in words and "7.3891" in words  # exp(2)


def test_both_languages_and_every_chart_that_has_numbers(tmp_path: Path) -> None:
    lines = [{**line, "grad_norm": 0.5} for line in falling(40)]
    text = page.written([run_data.read(make_run(tmp_path / "run", lines))])
    assert re.findall(r'<figure data-chart="(\w+)"', text) == ["loss", "lr", "grad_norm"]
    assert "Learning rate" in text and "学习率" in text
    # The loss falls from 8 to 3 and can be seen on a logarithmic scale; a constant rate cannot.
    assert len(re.findall(r'<svg class="log"', text)) == 1


def test_steps_that_were_not_finite_and_lines_that_cannot_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [*falling(3), {"step": 4, "loss": "nan"}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write("not json\n\xff\n{}\n")
    (run / "nonfinite.jsonl").write_text(json.dumps({"step": 4, "samples": [17, 23]}) + "\n")
    words = parsed(page.written([run_data.read(run)])).words
    assert "17, 23" in words
    assert "3 lines of metrics.jsonl that cannot be read are left out" in words.replace("  ", " ")


def test_guard_events_texts_evaluations_origins_and_the_plan(tmp_path: Path) -> None:
    lines = [
        {**line, "memory": 2.5e8, "data_seconds": 0.001, "forward_backward_seconds": 0.2, "optimizer_seconds": 0.05}
        for line in falling(40)
    ]
    lines[20]["saving_seconds"] = 1.25
    lines += [{"step": 40, "held_out_loss": 3.1, "lambada_accuracy": 0.25}]
    run = make_run(tmp_path / "run", lines)
    piece = {"document": 17, "tokens": [0, 9], "characters": [4, 31], "text": "</script><b>bad</b> " * 200}
    event = {
        "step": 9, "rule": "loss", "decision": "rollback", "loss": 9.25, "grad_norm": 1.5, "loss_z": 11.0,
        "grad_norm_z": 0.5, "sample_high_z": 21.5, "usual_loss": 3.5, "usual_grad_norm": 1.25, "back_to": 5,
        "passed_over": [[40, 72]], "rollback": 1, "sample_ids": [64],
        "culprit": {"sample": 64, "loss": 12.5, "store": "s.bin", "pieces": [piece]},
    }  # fmt: skip
    garbage = {"step": 10, "culprit": {"pieces": 5}, "passed_over": [3, ["x", 4]], "back_to": 2, "decision": None}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n" + json.dumps(garbage) + '\n{"step": 11, "cut')
    texts = [{"step": 40, "prompt": "Once", "text": " upon <i>a</i> time"}, {"step": 41, "text": 7}]
    (run / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    result = {"step": 40, "task": "lambada", "protocol": "strict: last word", "values": {"accuracy": 0.25, "x": None}}
    (run / "evaluations.jsonl").write_text(json.dumps({**result, "data": {"path": "l.jsonl"}, "limit": 12}) + "\n")
    told = {"command": ["gptworks"], "origins": {"train.steps": "given as train.steps=10"},
            "plan": {"tensor_bytes_of_a_rank": 123_400_000, "step_seconds": 0.3125}}  # fmt: skip
    (run / "environment.json").write_text(json.dumps(told))

    text = page.written([run_data.read(run)])
    words = " ".join(parsed(text).words.split())
    assert "a high loss 损失过高 loss 损失 9.2500 ( usual 通常 3.5000) +11.0 deviations 个偏差" in words
    assert (
        "highest sample 最高的样本 +21.5 deviations" in words
        and "rolled back 回退 back to step 回到第几步： 5" in words
    )
    assert (
        "samples passed over so far: 至今略过的样本： 40 – 71" in words
        and "s.bin: document 17, characters 4 to 31" in words
    )
    assert "</script><b>bad</b>" in words, "shown as text, and it ends no element"
    assert "Once" in words and "upon <i>a</i> time" in words
    assert "accuracy 0.2500" in words and "strict: last word" in words and "l.jsonl (limit 12)" in words
    assert "given as train.steps=10" in words
    assert "250.0 MB" in words and "123.4 MB" in words
    assert "these three, s per step 以上三项之和，秒/步 0.251 0.3125" in words
    assert "forward and backward, s per step (median)" in words and "1.25" in words
    charts = re.findall(r'<figure data-chart="(\w+)"', text)
    assert "lambada_accuracy" in charts and "memory" in charts
    assert len(text.encode()) < 1_000_000


def test_data_that_has_gone_is_told_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", falling(40))
    stores = [
        {"path": "data/a.bin", "tokens": 1024, "documents": 7},
        {"path": "b.bin", "tokens": 256, "documents": None},
    ]
    (run / "environment.json").write_text(json.dumps({"command": ["gptworks"], "data": [*stores, "garbage"]}))
    words = " ".join(parsed(page.written([run_data.read(run)])).words.split())
    assert "data/a.bin 1,024 7 b.bin 256" in words and "no such dataset" not in words
    assert "2 (2,560 / 1,280)" in words, "epochs"


def test_a_checkpoint_of_another_version_and_a_line_that_was_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", falling(3))
    checkpoint = run / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"version": 99}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 2.')
    found = run_data.read(run)
    assert found.curves["loss"][-1][0] == 3 and found.num_unreadable == 0, "it may be just being written"
    assert f"{checkpoint / 'manifest.json'}: version 99, needed 3" in parsed(page.written([found])).words


def test_a_run_without_configuration_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", falling(3))
    (run / "config.yaml").unlink()
    (run / "environment.json").write_text("{")
    words = parsed(page.written([run_data.read(run)])).words
    assert f"{run / 'config.yaml'}: not there" in words
    assert f"{run / 'environment.json'}: not JSON" in words


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (3.97, 7.62), (-2.0, 2.0), (5.0, 5.0), (1e-9, 2e-9), (1e7, 3e9), (0.0, 0.0)]
)
def test_an_axis_encloses_its_values_with_few_round_numbers(low: float, high: float) -> None:
    axis = chart.linear_axis(low, high)
    assert axis.low <= low and high <= axis.high * (1 + 1e-12) and axis.low < axis.high
    assert 2 <= len(axis.ticks) <= 9


@given(st.floats(1e-12, 1e12), st.floats(1.6, 1e9))
def test_a_logarithmic_axis_encloses_its_values(low: float, factor: float) -> None:
    axis = chart.log_axis(low, low * factor)
    assert axis.low <= low * (1 + 1e-9) and low * factor <= axis.high * (1 + 1e-9)
    assert axis.ticks == sorted(set(axis.ticks)) and len(axis.ticks) <= 12
    assert axis.share(axis.low) == pytest.approx(0) and axis.share(axis.high) == pytest.approx(1)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1500.0, "1,500"), (12000.0, "12k"), (3.4e6, "3.4M"), (2e9, "2G"), (2e-5, "2e-05")]
)
def test_numbers_of_an_axis(value: float, text: str) -> None:
    assert chart.written(value) == text


def test_runs_of_the_same_name_are_told_apart() -> None:
    assert distinct_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert distinct_names([Path("/a/one"), Path("/a/two")]) == ["one", "two"]


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    """A device, too: what is not a file is written to, not replaced."""
    run, pipe = make_run(tmp_path / "run", falling(3)), tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    assert main(["report", str(run), "--out", str(pipe)]) == 0
    assert pipe.is_fifo()
    reader.join()
    assert read[0].startswith("<!doctype html>") and read[0].endswith("</html>\n")


def test_the_command_writes_the_page_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", falling(5))
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(run.glob(".*.new"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (lambda run: [run / "nowhere"], "nowhere: no such folder. Needed: the folder of a training run."),
        (lambda run: [run.parent], "no metrics.jsonl and no environment.json. Needed: the folder of a training run."),
        (lambda run: [run, "--out", run], "is a folder. Needed: the name of a file"),
        (lambda run: [run, "--out", run / "no" / "report.html"], "there is no folder"),
        (lambda run: [run, "--out", "/proc/report.html"], "/proc"),
    ],
)
def test_what_cannot_be_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: Callable[[Path], list[Any]], message: str
) -> None:
    run = make_run(tmp_path / "run", falling(5))
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *map(str, args(run))]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
