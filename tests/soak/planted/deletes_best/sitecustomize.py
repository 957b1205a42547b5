"""A fault to be found: the best checkpoint is deleted as the others are."""

import importlib.abc
import importlib.machinery
import sys


class _Patched(importlib.abc.MetaPathFinder):
    """What is done to one module as soon as it is imported; to import it here would take seconds of every Python."""

    def find_spec(self, name, path, target=None):
        if name != "gptworks.checkpoint.retention":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            choose = module.choose
            module.choose = lambda losses, now, cfg, best: choose(losses, now, cfg, None)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Patched())
