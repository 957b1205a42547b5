"""Which numbers the evaluations of a run have: asked before it begins."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gptworks.config.schema import EvaluateConfig, RunConfig
from gptworks.errors import ConfigError, GPTWorksError
from gptworks.evaluate import registry
from gptworks.evaluate.request import Request
from gptworks.tokenizer import Tokenizer

HELD_OUT_LOSS = "held_out_loss"


def requests(cfg: EvaluateConfig, device: str = "cpu") -> list[Request]:
    """What is measured at each evaluation, task by task."""
    protocols = cfg.task_protocols or ("",) * len(cfg.tasks)
    return [
        Request(
            name, data, protocol, registry.settings_of(registry.find(name), {}), limit=cfg.task_limit, device=device
        )
        for name, data, protocol in zip(cfg.tasks, cfg.task_data, protocols, strict=True)
    ]


def check(cfg: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Before anything is trained: tasks that there are, their data, and a number to be best by."""
    during = {name: task for name, task in registry.TASKS.items() if task.read}
    problems = [
        f"evaluate.tasks: no task {name!r} to measure during training. Tasks: {', '.join(during)}."
        for name in cfg.evaluate.tasks
        if name not in during
    ]
    numbers = [HELD_OUT_LOSS, *(f"{name}_{each}" for name in cfg.evaluate.tasks for each in _metrics_of(name))]
    if not problems:
        for request in requests(cfg.evaluate):
            problems += _of_request(request, cfg.model.max_positions, tokenizer)
    if cfg.checkpoint.best_by not in numbers:
        problems.append(
            f"checkpoint.best_by: {cfg.checkpoint.best_by!r} is not measured. This run measures: {', '.join(numbers)}."
        )
    asked = [
        name
        for name, value in (("evaluate.tasks", cfg.evaluate.tasks), ("train.sample_prompts", cfg.train.sample_prompts))
        if value
    ]
    if asked and tokenizer is None:
        problems.append(
            f"{asked[0]}: is text, but the tokenizer of the data is not known. Name it with data.tokenizer."
        )
    if problems:
        raise ConfigError("evaluate", problems)


def _metrics_of(name: str) -> Iterable[str]:
    return registry.TASKS[name].metrics if name in registry.TASKS else ()


def _of_request(request: Request, max_positions: int, tokenizer: Tokenizer | None) -> list[str]:
    """Why this could not be measured; otherwise it would be known at the first evaluation, after hours perhaps."""
    task = registry.find(request.task)
    if not Path(request.data).is_file():
        return [f"evaluate.task_data: {request.data}: no such file. The task {task.name} reads one file of text."]
    if request.protocol and request.protocol not in task.protocols:
        listed = ", ".join(task.protocols)
        return [f"evaluate.task_protocols: {task.name} has none called {request.protocol!r}. Protocols: {listed}."]
    if tokenizer is None or task.read is None:
        return []
    try:
        task.read(replace(request, protocol=task.protocol(request.protocol)), tokenizer, max_positions)
    except GPTWorksError as error:
        more = " Its protocol is set by evaluate.task_protocols." if task.protocols else ""
        return [f"evaluate.task_data: the task {task.name} cannot be measured: {error}{more}"]
    return []


def is_higher_better(best_by: str) -> bool:
    task, _, metric = best_by.partition("_")
    return (
        task in registry.TASKS
        and metric in registry.TASKS[task].metrics
        and (registry.TASKS[task].metrics[metric].higher_is_better)
    )
