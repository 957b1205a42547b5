"""The C++ library: built once, for an instruction set that works here, or not at all and it is said why."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gptworks import child_process, cpu, model_hub, staging_folder
from gptworks.errors import UsageError
from gptworks.generate import fast_decode, kernel_library
from gptworks.generate.kernel_library import INSTRUCTION_SETS

needs_compiler = pytest.mark.skipif(
    fast_decode.why_not() is not None, reason=f"no C++ function: {fast_decode.why_not()}"
)


def _why_not(home: Path, **env: str) -> str:
    code = "from gptworks.generate import fast_decode; print(fast_decode.why_not())"
    environment = {**os.environ, model_hub.HOME: str(home), **env}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the library has been built. Copy it to write to it."""
    home = tmp_path_factory.mktemp("built")
    assert _why_not(home) == "None"
    return home


@pytest.mark.slow
@needs_compiler
def test_it_is_built_once_and_kept(built: Path) -> None:
    (library,) = (built / "kernels").iterdir()
    before = library.stat().st_mtime_ns
    assert _why_not(built) == "None"
    assert library.stat().st_mtime_ns == before


@needs_compiler
@pytest.mark.slow
def test_a_damaged_library_is_built_anew(built: Path, tmp_path: Path) -> None:
    (library,) = Path(shutil.copytree(built, tmp_path / "home") / "kernels").iterdir()
    whole = library.read_bytes()
    library.write_bytes(b"not a library")
    assert _why_not(tmp_path / "home") == "None"
    assert len(library.read_bytes()) == len(whole)


SOURCE = """
extern "C" {
const char* gptworks_instructions() { return "tiny"; }
long gptworks_read(void*, void*) { return -1; }
long gptworks_work_size(void*, void*) { return 0; }
}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[kernel_library.Functions | None, str]]:
    """Builds and opens a library of three functions that do nothing, in a home of its own."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "read.cpp").write_text(SOURCE)
    compiler = kernel_library.cxx_compilers()[0]
    monkeypatch.setattr(kernel_library, "SOURCES", tmp_path / "source")
    monkeypatch.setattr(kernel_library, "cxx_compilers", lambda: [compiler])
    monkeypatch.setattr(kernel_library, "possible", lambda: [INSTRUCTION_SETS[-1]])
    monkeypatch.setenv(model_hub.HOME, str(tmp_path / "home"))
    return lambda: kernel_library.loaded.__wrapped__(lambda _: iter(()))


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _zeros(data: bytes) -> bytes:
    """As after a power failure: the name and the size are there, some blocks are not."""
    return data[:4096] + bytes(len(data) - 4096)


@needs_compiler
@pytest.mark.skipif(not child_process.POSSIBLE, reason="what dies does so in a forked child")
@pytest.mark.parametrize("damage", [_cut, _zeros, lambda _: b"", lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_library_that_was_cut_short_is_never_loaded(
    damage: Callable[[bytes], bytes], tiny: Any, tmp_path: Path
) -> None:
    """The loader would map what is not there, and the process would end with SIGBUS, each time it is started."""

    def in_a_child() -> tuple[list[Any], str]:
        outcome = child_process.run(lambda: iter([tiny()[1]]))
        return outcome.answers, outcome.failure

    assert in_a_child() == ([None], "")
    (library,) = (tmp_path / "home" / "kernels").iterdir()
    whole = library.read_bytes()
    library.write_bytes(damage(whole))
    assert in_a_child() == ([None], "")
    assert kernel_library._is_whole(library) and len(library.read_bytes()) == len(whole)


@needs_compiler
def test_what_a_killed_process_left_is_removed_and_a_refusal_that_is_no_text_is_said(tiny: Any, tmp_path: Path) -> None:
    assert tiny()[1] is None
    (library,) = (tmp_path / "home" / "kernels").iterdir()
    with staging_folder.beside(library) as work:
        left = shutil.copytree(work, work.with_name(f"{work.name}x"))
    library.with_suffix(".refused").write_bytes(b"\xff dies")
    library.unlink()
    assert tiny()[1].endswith("(portable): \ufffd dies")
    library.with_suffix(".refused").write_bytes(b"")  # the power went before the reason was there
    assert tiny()[1] is None
    assert library.is_file() and not left.exists()


@needs_compiler
def test_two_processes_build_at_once(tiny: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert [reason for _, reason in pool.map(lambda _: tiny(), range(3))] == [None] * 3
    (library,) = (tmp_path / "home" / "kernels").iterdir()
    assert kernel_library._is_whole(library)


@pytest.mark.slow
def test_without_a_place_for_it_that_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = _why_not(tmp_path / "file")
    assert told.startswith(f"{tmp_path / 'file' / 'kernels'}: {tmp_path / 'file'} is not a folder.")
    assert told.count("not a folder") == 1


@pytest.mark.slow
def test_it_can_be_switched_off(tmp_path: Path) -> None:
    assert _why_not(tmp_path, **{kernel_library.OFF: "off"}) == f"{kernel_library.OFF}=off"
    assert not (tmp_path / "kernels").exists()


@pytest.mark.slow
def test_without_a_compiler_torch_multiplies(tmp_path: Path) -> None:
    assert _why_not(tmp_path, PATH="", CXX="") == "no C++ compiler found (g++)"


@pytest.mark.slow
def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    broken.chmod(0o755)
    assert _why_not(tmp_path, PATH="", CXX=str(broken)).startswith(f"{broken} (")
    assert _why_not(tmp_path, PATH="", CXX=str(broken)).endswith("): out of luck")


@needs_compiler
@pytest.mark.skipif(not child_process.POSSIBLE, reason="it is tried in a forked child")
def test_a_function_that_dies_on_this_processor_is_refused_and_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-march=native for a processor that advertises what it has not: the first instruction of it is the last."""
    folder = tmp_path / "source"
    folder.mkdir()
    functions = (
        'const char* gptworks_instructions() { return "none"; } long gptworks_work_size(void*, void*) { return 0; }'
    )
    death = "long gptworks_read(void*, void*) { __builtin_trap(); }"
    (folder / "read.cpp").write_text(f'extern "C" {{ {functions} {death} }}')
    monkeypatch.setattr(kernel_library, "SOURCES", folder)
    compiler = kernel_library.cxx_compilers()[0]
    monkeypatch.setattr(kernel_library, "cxx_compilers", lambda: [compiler])
    monkeypatch.setenv("GPTWORKS_HOME", str(tmp_path))
    loaded = kernel_library.loaded.__wrapped__
    tried = [each.name for each in kernel_library.possible()]
    assert tried[-1] == "portable"
    reasons = "; ".join(f"{compiler} ({name}): what it builds dies of SIGILL on {cpu.name()}" for name in tried)
    assert loaded(fast_decode.read_a_little) == (None, reasons)
    assert [file.suffix for file in (tmp_path / "kernels").iterdir()] == [".refused"] * len(tried)
    monkeypatch.setattr(child_process, "run", lambda *_: pytest.fail("it was built again"))
    assert "dies of SIGILL" in str(loaded(fast_decode.read_a_little)[1])


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_library.OFF, "avx9000")
    with pytest.raises(
        UsageError,
        match=r"GPTWORKS_KERNELS: got 'avx9000'; needs one of off, avx512-vnni, avx512, avx2, neon, portable",
    ):
        kernel_library.possible()


def test_the_best_that_the_processor_advertises_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(machine: str, *flags: str) -> list[str]:
        monkeypatch.setattr(kernel_library.platform, "machine", lambda: machine)
        monkeypatch.setattr(cpu, "flags", lambda: list(flags))
        return [each.name for each in kernel_library.possible()]

    monkeypatch.delenv(kernel_library.OFF, raising=False)
    wide = INSTRUCTION_SETS[0].advertised
    assert chosen("x86_64", *wide) == ["avx512-vnni", "avx512", "avx2", "portable"]
    assert chosen("x86_64", *INSTRUCTION_SETS[1].advertised) == ["avx512", "avx2", "portable"]
    assert chosen("x86_64", "avx2", "fma", "avx512f") == ["avx2", "portable"]
    assert chosen("x86_64", "sse2") == ["portable"]
    assert chosen("aarch64", "asimd") == ["neon", "portable"]
    monkeypatch.setenv(kernel_library.OFF, "avx2")
    assert chosen("x86_64", *wide) == ["avx2"]
