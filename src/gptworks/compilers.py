"""The compilers of this machine."""

import os
import shutil


def cxx_compilers() -> list[str]:
    return _installed("CXX", "g++", "clang++", "c++")


def c_compilers() -> list[str]:
    return _installed("CC", "gcc", "clang", "cc")


def _installed(variable: str, *names: str) -> list[str]:
    """Paths in the order of preference, what the environment names first; each once, since c++ is often g++."""
    paths = (shutil.which(name) for name in (os.environ.get(variable, ""), *names) if name)
    return list({os.path.realpath(path): path for path in paths if path}.values())
