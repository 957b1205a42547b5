"""Tasks are asked for by name, here as in MindFormers and Hugging Face."""

from collections.abc import Iterable

from gptworks.errors import UsageError

TEXT_GENERATION = "text_generation"


def require_task(task: object, known: Iterable[str], where: str) -> str:
    """The task as we spell it; a hyphen is as good as an underscore."""
    known = list(known)
    name = task.replace("-", "_") if isinstance(task, str) else task
    if name not in known:
        raise UsageError(
            f"{where}: no task {task!r}. Tasks: {', '.join(known)}. If it is a model, write model={task!r}."
        )
    return str(name)
