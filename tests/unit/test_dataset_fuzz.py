"""Damage to the files of every dataset format. Each case is read as something possible or refused with the file's name.

Never another exception, never a large allocation, and never a different number of tokens: a flipped bit changes the
sequence it is in, or nothing.
"""

import os
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gptworks.data.formats import registry
from gptworks.data.formats.contents import Contents
from gptworks.errors import DataError

SEQUENCES, LENGTH = 6, 7
TOKENS = (np.arange(SEQUENCES * LENGTH) * 37 % 251 + 1).astype(np.uint16)
WHOLE = Contents(TOKENS, np.full(SEQUENCES, LENGTH), np.arange(SEQUENCES + 1, dtype=np.int64), is_rows=True)
VOCAB = 300
MANY = 1200  # places tried in one file; in a longer one some are chosen

every_format = pytest.mark.parametrize("format_", registry.FORMATS.values(), ids=registry.FORMATS)


def dataset(format_: registry.Format, folder: Path) -> tuple[Path, list[Path]]:
    """(main file, all files that are read) of a whole dataset in an empty folder. MindRecord's .db is not read."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written = format_.write(folder / "s", WHOLE, VOCAB)
    main = next(main for main in map(format_.find, written) if main)
    return main, [file for file in format_.files(main) if file.suffix != ".db"]


def outcome(format_: registry.Format, main: Path) -> np.ndarray | None:
    """All tokens, after a look at what holds them together; None when it was refused as it should be."""
    try:
        contents = format_.read(main)
        tokens = np.array(contents.tokens[0 : len(contents.tokens)])
    except DataError as error:
        assert any(str(file) in str(error) for file in format_.files(main)), f"no file is named: {error}"
        return None
    sizes, documents = contents.sizes, contents.documents
    assert len(tokens) == len(contents.tokens) == sizes.sum() and (sizes >= 0).all()
    assert documents[0] == 0 and documents[-1] == len(sizes) and (documents[1:] >= documents[:-1]).all()
    assert tokens.dtype.kind in "iu"
    return tokens


def located_outcome(main: Path) -> np.ndarray | None:
    """The same, the way a user comes to it."""
    try:
        located = registry.locate(main)
    except DataError as error:
        assert str(main.with_suffix("")) in str(error)
        return None
    return outcome(located.format, located.main)


def places(size: int) -> list[int]:
    """All, or the first and last and some between them."""
    if size <= MANY:
        return list(range(size))
    between = random.Random(size).sample(range(size), MANY // 2)
    return sorted({*range(MANY // 4), *range(size - MANY // 4, size), *between})


@contextmanager
def bounded_memory(files: list[Path]) -> Iterator[None]:
    size = sum(file.stat().st_size for file in files)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 8 * size
    finally:
        tracemalloc.stop()


@every_format
def test_undamaged(format_, tmp_path: Path) -> None:
    main, files = dataset(format_, tmp_path / "d")
    assert all(file.is_file() for file in files)
    assert outcome(format_, main).tolist() == located_outcome(main).tolist() == TOKENS.tolist()


@every_format
def test_truncations(format_, tmp_path: Path) -> None:
    for number in range(len(dataset(format_, tmp_path / "d")[1])):
        main, files = dataset(format_, tmp_path / "d")
        for length in reversed(places(files[number].stat().st_size)):
            os.truncate(files[number], length)
            tokens = outcome(format_, main)
            # A bare stream cut between two tokens is a shorter one; nothing else has a beginning that is whole.
            assert tokens is None or (len(files) == 1 and tokens.tolist() == TOKENS[: len(tokens)].tolist())
        files[number].unlink()
        assert outcome(format_, main) is None


@pytest.mark.slow
@every_format
def test_flipped_bits(format_, tmp_path: Path) -> None:
    main, files = dataset(format_, tmp_path / "d")
    for damaged in files:
        whole = damaged.read_bytes()
        with damaged.open("r+b", buffering=0) as file:
            for place in places(len(whole)):
                for bit in range(8) if len(whole) < 150 else {place % 8, (place // 8 + 5) % 8}:
                    file.seek(place)
                    file.write(bytes([whole[place] ^ 1 << bit]))
                    tokens = located_outcome(main)
                    if tokens is not None:
                        assert len(tokens) == len(TOKENS), f"{damaged.name}: bit {bit} of byte {place}"
                        changed = (tokens != TOKENS).reshape(SEQUENCES, LENGTH).any(axis=1)
                        assert changed.sum() <= 1, f"{damaged.name}: bit {bit} of byte {place}"
                file.seek(place)
                file.write(whole[place : place + 1])
        assert damaged.read_bytes() == whole


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("number", [2**31 - 1, 2**32 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 1])
def test_absurd_numbers_anywhere(format_, number: int, tmp_path: Path) -> None:
    """Counts, sizes and offsets: wherever they are, this is where a huge one is."""
    main, files = dataset(format_, tmp_path / "d")
    wrong = number.to_bytes(8 if number >= 2**32 else 4, "little")
    with bounded_memory(files):
        for damaged in files:
            whole = damaged.read_bytes()
            with damaged.open("r+b", buffering=0) as file:
                for place in places(len(whole) - len(wrong))[::3]:
                    file.seek(place)
                    file.write(wrong)
                    tokens = outcome(format_, main)
                    assert tokens is None or len(tokens) == len(TOKENS)
                    file.seek(place)
                    file.write(whole[place : place + len(wrong)])


@pytest.mark.slow
@every_format
def test_several_wrong_bytes(format_, tmp_path: Path) -> None:
    main, files = dataset(format_, tmp_path / "d")
    chance = random.Random(1)
    for damaged in files:
        whole = damaged.read_bytes()
        with damaged.open("r+b", buffering=0) as file, bounded_memory(files):
            for _ in range(150):
                # Most of a long file is filling: stay near its ends.
                near = [chance.randrange(min(len(whole), 400)) for _ in range(6)]
                changed = [place if chance.random() < 0.5 else len(whole) - 1 - place for place in near]
                for place in changed:
                    file.seek(place)
                    file.write(bytes([chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])]))
                tokens = outcome(format_, main)
                assert tokens is None or len(tokens) == len(TOKENS)
                for place in changed:
                    file.seek(place)
                    file.write(whole[place : place + 1])


@every_format
def test_something_else_in_its_place(format_, tmp_path: Path) -> None:
    """Nothing, noise, text, an array of other things, a file of another format."""
    others = [b"", b"\0", b"hello\n", random.Random(2).randbytes(500), bytes(500), b"[" * 5001]
    for number, values in enumerate([[1.5, np.nan], [None, "x"], ["text"], [True], [[1, 2]], [1 + 2j]]):
        file = tmp_path / f"{number}.npy"
        kind = object if None in values else None
        np.save(file, np.array(values, kind))
        others.append(file.read_bytes())
        np.savez(tmp_path / f"{number}.npz", **dict.fromkeys(("ids", "lens", "docs"), np.array(values, kind)))
        others.append((tmp_path / f"{number}.npz").read_bytes())
    for number, other in enumerate(registry.FORMATS.values()):
        if other is not format_:
            others += [file.read_bytes() for file in dataset(other, tmp_path / f"other{number}")[1]]
    main, files = dataset(format_, tmp_path / "d")
    for damaged in files:
        whole = damaged.read_bytes()
        with bounded_memory(files):
            for data in others:
                damaged.write_bytes(data)
                tokens = outcome(format_, main)
                # Any even number of bytes may be a bare stream. Tokens of the same size may replace each other.
                assert tokens is None or len(files) == 1 or len(tokens) == len(TOKENS)
                if len(files) > 1:
                    located_outcome(main)
        damaged.write_bytes(whole)
