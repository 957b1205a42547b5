"""Packages that can be called: `gptworks.train` is a package with files in it, and the function people mean by it.

Importing a subpackage binds its name in `gptworks`, so a function of the same name would be replaced by it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    __target__: tuple[str, str]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        module, function = self.__target__
        return getattr(import_module(module), function)(*args, **keywords)


def make_callable(package: str, module: str, function: str) -> None:
    """Calling the package calls the function, whose module is imported at that moment."""
    target = sys.modules[package]
    target.__class__ = CallablePackage
    target.__target__ = (module, function)  # type: ignore[attr-defined]
