"""A layout as the text of a configuration file."""

from typing import Any

from gptworks.config import yaml_text
from gptworks.config.load import Loaded, OriginKind, flatten, nest
from gptworks.plan.report import Report

# What nobody has written down: it follows from the rest of the file again.
_FOLLOWS = (OriginKind.PRESET, OriginKind.CHECKPOINT, OriginKind.DERIVED)
_CHOSEN_ANEW = ("batch.accumulation", "parallel.zero", "parallel.schedule", "parallel.virtual_stages")


def as_yaml(loaded: Loaded, made: Report, tokens: float | None) -> str:
    """What was said, with the layout of the report, and above it what is predicted. `tokens`: to train on, if the
    configuration does not say how long."""
    choice, config = made.choice, loaded.config
    values = flatten(config.model_dump(mode="json"))
    kept = {key: values[key] for key, origin in loaded.origins.items() if origin.kind not in _FOLLOWS}
    kept = {key: value for key, value in kept.items() if key not in _CHOSEN_ANEW}
    chosen = {key: value for key, value in choice.settings().items() if key != "batch.accumulation"}
    ends = any(config.train.ends().values())
    if tokens is not None and not ends:
        chosen["train.tokens"] = int(tokens)
    has_preset = any(origin.kind is OriginKind.PRESET for origin in loaded.origins.values())
    sections = list(type(config).model_fields)
    settings = sorted((kept | chosen).items(), key=lambda each: sections.index(each[0].partition(".")[0]))
    tree: dict[str, Any] = {"preset": loaded.preset} if has_preset else {}
    missing = [] if config.data.path else ["# Still to be said: data.path."]
    if not ends and "train.tokens" not in chosen:
        missing.append("# Still to be said: train.steps, epochs or tokens.")
    needed, capacity = (f"{size / 2**30:,.2f}" for size in (made.needed, made.device.capacity))
    lines = [
        f"# {choice}, on {made.devices} x {made.device.name} ({made.machines} machines).",
        f"# Predicted: {needed} of {capacity} GiB, {made.time.total:,.2f} s a step, "
        f"{made.tokens_per_second:,.0f} tokens/s, MFU {made.mfu:.0%}.",
        *missing,
    ]
    return "\n".join([*lines, yaml_text.dump(tree | nest(dict(settings)))])
