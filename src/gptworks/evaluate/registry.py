"""The tasks there are: every file of `evaluate/tasks`."""

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from gptworks.errors import UsageError
from gptworks.evaluate import tasks
from gptworks.evaluate.task import Option, Task

DEFAULT = "heldout"


def _load_tasks() -> dict[str, Task]:
    modules = [import_module(f"{tasks.__name__}.{each.name}") for each in pkgutil.iter_modules(tasks.__path__)]
    return {module.TASK.name: module.TASK for module in modules}


TASKS = _load_tasks()


def find(name: str) -> Task:
    if name not in TASKS:
        raise UsageError(f"--task: no task '{name}'. Tasks: {', '.join(TASKS)}.")
    return TASKS[name]


def accepted(task: Task) -> list[Option]:
    """Options that may be given with a task: its own, and those of others that have no effect with it."""
    others = [option for each in TASKS.values() if each is not task for option in each.options]
    return [*task.options, *(option for option in others if not option.is_refused_elsewhere)]


def settings_of(task: Task, values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a task. One of another task is refused, unless it says no more than its default does."""
    known = accepted(task)
    for other in TASKS.values():
        for option in other.options:
            if option not in known and values.get(option.name, option.default) != option.default:
                raise UsageError(f"{option.flag}: is for --task {other.name}, got --task {task.name}. Leave it out.")
    return {option.name: values.get(option.name, option.default) for option in task.options}
