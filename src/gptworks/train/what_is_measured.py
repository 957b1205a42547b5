"""Which numbers the evaluations of a run have: asked before it begins."""

from pathlib import Path

from gptworks.config.schema import RunConfig
from gptworks.errors import ConfigError
from gptworks.evaluate import registry
from gptworks.tokenizer import Tokenizer

HELD_OUT_LOSS = "held_out_loss"


def check(cfg: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Before anything is trained: tasks that there are, their data, and a number to be best by."""
    problems = []
    numbers = [HELD_OUT_LOSS]
    for name, data in zip(cfg.evaluate.tasks, cfg.evaluate.task_data, strict=True):
        task = registry.TASKS.get(name)
        if task is None or task.own_data is not None:
            known = ", ".join(each.name for each in registry.TASKS.values() if each.own_data is None)
            problems.append(f"evaluate.tasks: no task {name!r} to measure during training. Tasks: {known}.")
            continue
        numbers += [f"{name}_{metric}" for metric in task.metrics]
        if not Path(data).is_file():
            problems.append(f"evaluate.task_data: {data}: no such file. The task {name} reads one file of text.")
    if cfg.checkpoint.best_by not in numbers:
        problems.append(
            f"checkpoint.best_by: {cfg.checkpoint.best_by!r} is not measured. This run measures: {', '.join(numbers)}."
        )
    asked = [
        name
        for name, given in (("evaluate.tasks", cfg.evaluate.tasks), ("train.sample_prompts", cfg.train.sample_prompts))
        if given
    ]
    if asked and tokenizer is None:
        problems.append(
            f"{asked[0]}: is text, but the tokenizer of the data is not known. Name it with data.tokenizer."
        )
    if problems:
        raise ConfigError("evaluate", problems)


def is_higher_better(cfg: RunConfig) -> bool:
    task, _, metric = cfg.checkpoint.best_by.partition("_")
    return (
        task in registry.TASKS
        and metric in registry.TASKS[task].metrics
        and (registry.TASKS[task].metrics[metric].higher_is_better)
    )
