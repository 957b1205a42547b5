"""In a child: read damaged files one after another. python -m soak.read_mutated SEED FOLDER READER:COUNT...

Prints how many were read and how many of them were refused; exit 1 with the number of the file that did something else.
"""

import random
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit"), str(TESTS / "cli")]

from soak.campaign import Found  # noqa: E402
from soak.mutate import mutated  # noqa: E402
from soak.readers import Reader, all_readers  # noqa: E402

MEMORY = 2 << 30  # beyond what the process has when the first file comes
SECONDS = 30


def main() -> int:
    seed, folder = int(sys.argv[1]), Path(sys.argv[2])
    for asked in sys.argv[3:]:
        name, _, count = asked.rpartition(":")
        if not _survives(name, seed, int(count), folder / name):
            return 1
    return 0


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

    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        reader.read(folder)
    except GPTWorksError as error:
        if len(str(error)) > 20_000:
            raise Found(f"a message of {len(str(error)):,} characters: {str(error)[:500]}") from None
        return True
    finally:
        signal.alarm(0)
    return False


def _too_long(*_: object) -> None:
    raise Found(f"not read after {SECONDS} s")


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    raise SystemExit(main())
