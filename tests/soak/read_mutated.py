"""In a child: damaged files are read one after another.

It writes how many were read and how many were refused; exit 1 with the number of the file that did something else.
"""

import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from load_clock import of_thread

from soak.campaign import Found
from soak.mutate import mutated
from soak.readers import Reader, all_readers

MEMORY = 2 << 30  # beyond what the process has when the first file comes
SECONDS = 30  # without those that it waits for a core
EVERY = 5  # seconds between two looks at the clock
THIS = Path("/proc/self/schedstat")


def read_all(seed: int, place: Path, asked: dict[str, int], log: Path) -> None:
    """`asked`: how many files of each reader. What did something else is left in the place."""
    os.setsid()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.exit(not all(_survives(name, seed, count, place / name) for name, count in asked.items()))


def _survives(name: str, seed: int, count: int, folder: Path) -> bool:
    folder.mkdir()
    readers = all_readers()
    reader = readers[name]()
    other = readers[random.Random(seed).choice([each for each in readers if not each.startswith("run-")])]()
    whole, strange = _files(reader, folder / "whole"), _files(other, folder / "other")
    reader.read(folder / "whole")  # undamaged, it must be read; and whatever is imported for it is there now
    _bound_memory()
    refused = 0
    for number in range(count):
        if number == 0 or reader.writes:
            shutil.rmtree(folder / "damaged", ignore_errors=True)
            shutil.copytree(folder / "whole", folder / "damaged")
        chance = random.Random(f"{seed}/{number}")
        victim = chance.choice(sorted(whole))
        data = mutated(whole[victim], chance.choice(list(strange.values())), chance)
        (folder / "damaged" / victim).write_bytes(data)
        try:
            refused += _is_refused(reader, folder / "damaged")
        except BaseException:
            print(f"file {number} ({victim}) of {name}:\n{traceback.format_exc()}")
            return False
        (folder / "damaged" / victim).write_bytes(whole[victim])
    print(name, count, refused)
    shutil.rmtree(folder)
    return True


def _files(reader: Reader, folder: Path) -> dict[Path, bytes]:
    reader.make(folder)
    files = {file.relative_to(folder): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if file.suffix not in reader.skip}


def _is_refused(reader: Reader, folder: Path) -> bool:
    from gptworks.errors import GPTWorksError

    taken, last = 0.0, (time.monotonic(), *of_thread(THIS))
    late: list[Found] = []

    def look(*_: object) -> None:
        nonlocal taken, last
        now = (time.monotonic(), *of_thread(THIS))
        wall, ran, waited = now[0] - last[0], (now[1] - last[1]) / 1e9, (now[2] - last[2]) / 1e9
        # What one look adds is limited, but for what it computed: a process that was suspended has not been reading.
        taken, last = taken + max(ran, min(wall - waited, EVERY + 1)), now
        if taken > SECONDS:
            late.append(Found(f"not read after {SECONDS} s"))
            raise late[0]
        signal.alarm(EVERY)

    signal.signal(signal.SIGALRM, look)
    signal.alarm(EVERY)
    try:
        reader.read(folder)
    except GPTWorksError as error:
        if late:  # taken for a fault of the file
            raise late[0] from None
        if len(str(error)) > 20_000:
            raise Found(f"a message of {len(str(error)):,} characters: {str(error)[:500]}") from None
        return True
    finally:
        signal.alarm(0)
    return False


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
