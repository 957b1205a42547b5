"""Runs that go on: shown as they are now, renewed when they have changed, in a terminal and as a page."""

import http.client
import io
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from test_report import falling, make_run, parsed

from gptworks.cli.main import main
from gptworks.errors import UsageError
from gptworks.report import live, page, run_data
from gptworks.report.live import Followed
from gptworks.train import metrics


def grow(run: Path, **line: Any) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", falling(5))


def test_a_run_is_read_again_when_it_has_grown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(run, "run")
    reads: list[Path] = []
    real = run_data.read
    monkeypatch.setattr(run_data, "read", lambda folder, *more: (reads.append(folder), real(folder, *more))[1])
    followed.renew()
    assert reads == []
    grow(run, step=6, loss=1.25)
    followed.renew()
    followed.renew()
    assert reads == [run] and followed.data.last("loss") == 1.25


def test_only_what_was_added_is_read(run: Path) -> None:
    followed, path = Followed(run, "run"), run / "metrics.jsonl"
    before = followed.data.curves["loss"][:]
    path.write_bytes(b"x" * path.stat().st_size)  # whoever reads it again finds nothing
    grow(run, step=6, loss=1.25)
    assert followed.renew() and followed.data.curves["loss"] == [*before, (6.0, 1.25)]
    assert followed.data.num_unreadable == 0


def test_a_line_that_is_being_written_is_read_when_it_is_whole(run: Path) -> None:
    followed, path = Followed(run, "run"), run / "metrics.jsonl"
    for piece, last in (
        ('{"step": 6, "lo', 3.0),
        ('ss": 1.25}', 1.25),
        ("\nno line\n", 1.25),
        ('{"step": 7, "loss": 1', 1.25),
    ):
        with path.open("a") as file:
            file.write(piece)
        followed.renew()
        assert followed.data.last("loss") == last
    assert followed.data.num_unreadable == 1 and len(followed.data.curves["loss"]) == 6


def test_a_run_that_went_back_is_read_from_the_beginning(run: Path) -> None:
    """Resuming writes the lines that stay into a new file of the same name."""
    followed = Followed(run, "run")
    metrics.forget_after(run / "metrics.jsonl", 3)
    for step in (4, 5, 6, 7):
        grow(run, step=step, loss=9.0)
    followed.renew()
    assert [step for step, _ in followed.data.curves["loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert followed.data.last("loss") == 9.0


def test_a_folder_that_is_gone_for_a_while_leaves_what_was_read(run: Path) -> None:
    followed = Followed(run, "run")
    run.rename(run.with_name("away"))
    followed.renew()
    assert "no such folder" in followed.trouble and followed.data.last("loss") == 3.0
    run.with_name("away").rename(run)
    grow(run, step=6, loss=1.5)
    followed.renew()
    assert (followed.trouble, followed.data.last("loss")) == ("", 1.5)


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    lines = [{"step": k, "loss": 2.0, "lr": 0.001, "tokens": 1000 * k, "tokens_per_sec": 50.0} for k in (1, 2, 4)]
    data = run_data.read(make_run(tmp_path / "run", lines))  # of 10 steps, so that 6,000 tokens are left
    assert live.numbers(data) == ["step 4 of 10", "loss 2.0000", "lr 0.001", "50 tokens/s", "2 min left"]
    # The last line came after two steps of 20 s each: ten times as long is waited for the next.
    assert live.numbers(data, 399.0)[-1] == "2 min left"
    assert live.numbers(data, 401.0)[-1] == "nothing new for 7 min"
    empty = run_data.read(make_run(tmp_path / "empty", []))
    assert live.numbers(empty) == ["no losses yet"]


def test_a_chart_in_the_terminal_shows_the_highest_of_each_column() -> None:
    values = [4.0] * 1000
    values[700] = 12.0
    lines = live.blocks([(float(k), value) for k, value in enumerate(values)], 50)
    assert lines[0].startswith("   12.000") and lines[0][10:].count("█") == 1
    assert lines[0].index("█") == 10 + 35
    assert lines[-2].startswith("    4.000") and " " not in lines[-2][10:]


def test_a_chart_has_no_holes_where_nothing_was_logged() -> None:
    lines = live.blocks([(float(step), 3.0 + step % 2) for step in (1, 2, 3, 50, 100)], 60)
    assert " " not in lines[-2][10:]


def test_the_other_curves_have_a_line_each(tmp_path: Path) -> None:
    lines = [{"step": k, "loss": 2.0, "grad_norm": 9.0 if k == 3 else 1.0, "lr": k / 8} for k in range(1, 9)]
    rate, gradient = live.small_charts(run_data.read(make_run(tmp_path / "run", lines)), 60)
    assert gradient == " gradient ▁▁█▁▁▁▁▁ 1"
    assert rate == "       lr ▁▂▃▄▅▆▇█ 1"


def test_once_for_a_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grow(run, step=5, held_out_loss=3.5)
    (run / "nonfinite.jsonl").write_text('{"step": 3}\n')
    assert main(["watch", "--once", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step 5 of 10" in out and "loss 3.0000" in out
    assert "held-out 3.5000, lowest 3.5000 at step 5" in out and "1 not finite, the last at step 3" in out


@pytest.mark.parametrize(("width", "is_beside"), [(140, True), (120, False)])
def test_runs_stand_side_by_side_where_there_is_room(tmp_path: Path, run: Path, width: int, is_beside: bool) -> None:
    other = make_run(tmp_path / "other", falling(4))
    (other / "events.jsonl").write_text('{"step": 3, "rule": "loss", "decision": "skip", "loss": 9.5}\n')
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(live.drawn([Followed(run, "first run"), Followed(other, "second run")], width))
    lines = console.export_text().splitlines()
    assert any("first run" in line and "second run" in line for line in lines) == is_beside
    assert all(len(line) <= width for line in lines)
    assert any("step 3: a high loss, skipped; loss 9.5" in line for line in lines)


def test_markup_in_a_name_is_text(run: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(live.drawn([Followed(run, "[red]x[/red]")], 80))
    assert "[red]x[/red]" in console.export_text()


@pytest.fixture
def address(run: Path) -> Iterator[tuple[str, int]]:
    said: list[str] = []
    is_said = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        is_said.set()

    threading.Thread(target=live.serve, args=([Followed(run, "run")], "127.0.0.1", 0, 1.0, say), daemon=True).start()
    assert is_said.wait(60)
    yield "127.0.0.1", int(said[0].split(":")[2].partition("/")[0])


class Answer(NamedTuple):
    status: int
    tag: str
    text: str


def ask(address: tuple[str, int], path: str = "/", tag: str = "") -> Answer:
    with closing(http.client.HTTPConnection(*address, timeout=60)) as connection:
        connection.request("GET", path, headers={"If-None-Match": tag})
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers.get("ETag", ""), answer.read().decode())


def test_the_page_renews_itself_only_when_the_run_has_changed(run: Path, address: tuple[str, int]) -> None:
    first = ask(address)
    assert first.status == 200 and "data-every" in first.text and "connect-src 'self'" in first.text
    assert "3.0000" in parsed(first.text).words
    assert ask(address, tag=first.tag).status == 304
    grow(run, step=6, loss=0.125)
    second = ask(address, tag=first.tag)
    assert second.status == 200 and second.tag != first.tag and "0.1250" in parsed(second.text).words


def test_the_page_says_that_a_folder_is_gone(run: Path, address: tuple[str, int]) -> None:
    first = ask(address)
    run.rename(run.with_name("away"))
    gone = ask(address, tag=first.tag)
    words = parsed(gone.text).words
    assert gone.status == 200 and f"run: {run}: no such folder" in words and "3.0000" in words
    assert ask(address, tag=gone.tag).status == 304
    run.with_name("away").rename(run)
    back = ask(address, tag=gone.tag)
    assert (back.status, back.text) == (200, first.text), "though nothing was added meanwhile"


def test_a_page_is_written_once_for_all_who_look(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[float] = []
    real = page.written
    monkeypatch.setattr(
        page, "written", lambda runs, every, *more: (written.append(every), real(runs, every, *more))[1]
    )
    live_page = live.LivePage([Followed(run, "run")], 2.0)
    first = live_page.now()
    assert live_page.now() == first and written == [2.0]
    grow(run, step=6, loss=1.5)
    assert live_page.now()[1] != first[1] and written == [2.0, 2.0]


def test_a_browser_that_goes_away_leaves_no_traceback(
    address: tuple[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(address) as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
        browser.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
    assert ask(address).status == 200  # answered after the one that went
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("path", ["/config.yaml", "/../run/config.yaml", "//etc/passwd", "/%2e%2e/x"])
def test_nothing_but_the_page_is_served(address: tuple[str, int], path: str) -> None:
    assert ask(address, path).status == 404


def test_a_port_that_is_taken(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"--port: cannot listen at 127.0.0.1:{port} \(.*in use\)"):
            live.serve([Followed(run, "run")], "127.0.0.1", port, 1.0, print)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--every", "0"], "--every: got 0; needed: seconds"),
        (["--port", "70000"], "--port: got 70000; needed: 0 to 65535"),
        (["--port", "0", "--once"], "--once: not with --port"),
    ],
)
def test_what_cannot_be_watched(run: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert main(["watch", str(run), *args]) == 2
    assert message in capsys.readouterr().err
