"""The campaign itself, in short: its states are those that a disk can have, and faults that are planted are found."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from load_clock import LoadClock

from soak import crash_states, driver, recorded
from soak.campaign import Campaign, Found
from soak.crashes import add_run, material, states_of

needs_strace = pytest.mark.skipif(not recorded.has_strace(), reason="strace is missing, or may not trace here")

PUBLISH = """
import os, sys
def write(name, text, synced):
    with open(name, "w") as file:
        file.write(text)
        if synced:
            file.flush()
            os.fsync(file.fileno())
folder, synced = sys.argv[1:]
write(folder + "/part", "the new text", "file" in synced)
os.rename(folder + "/part", folder + "/file")
if "folder" in synced:
    os.fsync(os.open(folder, os.O_RDONLY))
os.remove(folder + "/kept/backup")
"""


def contents_after(folder: Path, synced: str, count: int = 200) -> set[tuple[str | None, bool]]:
    """States of a little program that replaces a file and then removes a backup: (the file, is the backup there)."""
    place = folder / "place"
    (place / "kept").mkdir(parents=True)
    (place / "file").write_text("the old text")
    (place / "kept" / "backup").write_text("the old text")
    recording = recorded.record([sys.executable, "-c", PUBLISH, str(place), synced], place, folder / "log")
    found = set()
    for number in range(count):
        state = folder / str(number)
        crash_states.build(recording, random.Random(number), state)
        text = (state / "file").read_text() if (state / "file").exists() else None
        found.add((text, (state / "kept" / "backup").exists()))
    return found


@needs_strace
def test_states_of_a_publish_that_is_synced(tmp_path: Path) -> None:
    """Old, new, or new without the backup, and nothing else."""
    assert contents_after(tmp_path, "file and folder") == {
        ("the old text", True),
        ("the new text", True),
        ("the new text", False),
    }


@needs_strace
@pytest.mark.parametrize("synced", ["nothing", "folder"])
def test_states_of_a_publish_whose_file_is_not_synced(synced: str, tmp_path: Path) -> None:
    """Files that are empty, cut or zeros under the final name, and with the backup gone as well."""
    found = contents_after(tmp_path, synced)
    texts = {text for text, has_backup in found if not has_backup}
    assert {"", "\0" * 12, "the new text"} <= texts
    assert any(text and text != "the new text" and "the new text".startswith(text) for text in texts)


@needs_strace
def test_states_of_a_publish_whose_folder_is_not_synced(tmp_path: Path) -> None:
    """The backup is gone and the new name has not arrived."""
    assert ("the old text", False) in contents_after(tmp_path, "file")


@needs_strace
def test_a_store_through_a_mapping_counts_as_not_synced(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    program = (
        "import mmap, os, sys\n"
        "file = open(sys.argv[1] + '/file', 'w+b'); file.truncate(4); os.fsync(file.fileno())\n"
        "mapped = mmap.mmap(file.fileno(), 4); mapped[:] = b'data'; mapped.close(); file.close()\n"
    )
    recording = recorded.record([sys.executable, "-c", program, str(place)], place, tmp_path / "log")
    found = set()
    for number in range(150):
        crash_states.build(recording, random.Random(number), tmp_path / str(number))
        file = tmp_path / str(number) / "file"
        found.add(file.read_bytes() if file.exists() else None)
    assert {b"data", b"\0\0\0\0"} <= found


class Fails:
    """A part whose every third try fails."""

    name, share = "fails", 1.0
    goal = 0

    def ready(self, folder: Path) -> None:
        pass

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        if chance.random() < 1 / 3:
            raise Found(f"drawn {chance.random():.6f}")
        return Counter(["one"])


def test_a_failure_is_repeated_alone_by_its_seed(tmp_path: Path) -> None:
    campaign = Campaign([Fails()], tmp_path / "all", seed=3)
    campaign.run(1.0, jobs=2)
    (tally,) = campaign.tallies
    assert tally.failures and tally.faults.total() == tally.tries - len(tally.failures)
    seed, told = tally.failures[0]
    assert any(f"make soak REPEAT=fails:{seed}" in line and told in line for line in campaign.table())
    again = Campaign([Fails()], tmp_path / "again", seed=99)
    again.repeat("fails", seed)
    assert again.tallies[0].failures == [(seed, told)]


def test_a_part_that_is_behind_its_goal_comes_first(tmp_path: Path) -> None:
    class Aims(Fails):
        name, goal = "aims", 3000

    campaign = Campaign([Fails(), Aims()], tmp_path, seed=3)
    fails, aims = campaign.tallies
    aims.seconds = 1000.0  # it has had far more than its share
    assert campaign._next() is aims
    assert campaign._next() is fails  # one try at a time is enough
    aims.under_way = 0
    aims.faults["one"] = 299  # of a tenth: it begins three minutes ahead
    assert campaign._next() is aims
    aims.under_way = 0
    aims.faults["one"] = 400
    assert campaign._next() is fails


BUSY = "import time\nwhile True: pass"
ASLEEP = "import time\ntime.sleep(1000)"


@pytest.mark.slow
@pytest.mark.parametrize("program", [BUSY, ASLEEP])
def test_who_turns_in_a_loop_or_sleeps_comes_to_the_limit(program: str, tmp_path: Path) -> None:
    with (
        pytest.raises(Found, match="had not ended after 1 s"),
        driver.started([sys.executable, "-c", program], tmp_path / "log", seconds=1.0) as process,
    ):
        process.wait()


@pytest.mark.slow
def test_waiting_for_a_core_is_not_counted(tmp_path: Path) -> None:
    """Eight processes on one core: each has an eighth of it, and by its own clock as long as if it were alone."""
    core = min(os.sched_getaffinity(0))
    children = [
        subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        for _ in range(8)
    ]
    try:
        clock, began = LoadClock(lambda: [children[0].pid]), time.monotonic()
        time.sleep(4)
        assert clock.seconds() < (time.monotonic() - began) / 2
    finally:
        for child in children:
            child.kill()
            child.wait()


READERS = """
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path[:0] = [".", "unit", "cli"]
from soak import read_mutated
from soak.campaign import Found
from soak.readers import Reader
read_mutated.SECONDS, read_mutated.EVERY = 3, 1
def suspended(folder):
    subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
for read in (suspended, lambda folder: time.sleep(60)):
    try:
        print(read_mutated._is_refused(Reader(print, read), Path()))
    except Found as late:
        print(late)
"""


@pytest.mark.slow
def test_a_reader_that_was_suspended_is_not_late_and_one_that_hangs_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READERS], cwd=driver.TESTS, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["False", "not read after 3 s"], done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    material(folder)
    return folder


@needs_strace
@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        ("prepare-again", 12),
        pytest.param("prepare", 20, marks=pytest.mark.slow),
        pytest.param("prepare-nanogpt", 20, marks=pytest.mark.slow),
        pytest.param("save", 10, marks=pytest.mark.slow),
        pytest.param("save-keep-one", 20, marks=pytest.mark.slow),
        pytest.param("convert-hf", 10, marks=pytest.mark.slow),
    ],
)
def test_crash_states(scenario: str, count: int, made: Path, tmp_path: Path) -> None:
    if scenario.startswith("convert"):
        add_run(made)
    killed, crashed = states_of(scenario, 1, count, tmp_path, made)
    assert killed > 10 and crashed == count


def soak(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "soak", "--jobs", "1", *args]
    return subprocess.run(command, cwd=driver.TESTS, capture_output=True, text=True, check=False)


# A fault that is planted, and a try that finds it.
PLANTED = {
    "no_fsync": ("crashes:1000001", "is none of old, new and refused"),  # of a save that keeps one
    "no_file_fsync": ("crashes:1000001", "is none of old, new and refused"),
    "no_folder_fsync": ("crashes:1000001", "is none of old, new and refused"),
    "no_rename": ("crashes:1000009", "is none of old, new and refused"),  # of a conversion
    "flipped_byte": ("crashes:1000000", "no checkpoint is whole"),  # of a save
    "deletes_best": ("crashes:1000003", "best names step-00000001, which is gone"),  # of a save that keeps the best
    "no_limit": ("bombs:1000005", "nested: exit 0"),
    "leak": ("long:1000000", "grew from"),
}


@pytest.mark.slow
@needs_strace
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    attempt, words = PLANTED[fault]
    found = soak("--repeat", attempt, "--plant", fault, "--folder", str(tmp_path))
    assert found.returncode == 1, found.stdout
    assert words in found.stderr
    assert f"make soak REPEAT={attempt}" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kills", "ranks", "writers", "disks", "files", "bombs"])
def test_one_try_of_each_part(part: str, tmp_path: Path) -> None:
    done = soak("--repeat", f"{part}:1000000", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
