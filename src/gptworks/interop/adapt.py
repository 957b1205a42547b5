"""What the user says beside a foreign command: on which device, how small, how strict."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptworks.errors import ConfigError, UsageError
from gptworks.interop import shrink as shrinking
from gptworks.interop.shrink_to_data import heads_of_checkpoint, vocabulary_of_data
from gptworks.interop.translation import Translation

_SERVED = {"", "cpu", "cuda", "gpu", "mps", "auto"}


def _as_options(stated: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in stated.items():
        section, _, name = key.rpartition(".")
        if section == "model":
            words += ["-o", f"{key}={value}"]
        elif section != "parallel":
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def adapted(
    translation: Translation,
    remarks: list[str],
    *,
    device: str | None,
    shrink: bool,
    strict: bool,
    folder: Path = Path(),
    runs: bool = True,
) -> Translation:
    """`folder`: where the command is run, and its data are. `runs`: here, so that its device must be one of ours."""
    if strict:
        ignored = [f"{note.theirs}: ignored ({note.why})." for note in translation.notes if note.how == "ignored"]
        if ignored:
            raise ConfigError("--strict", ignored)
    asked = translation.device.lower()
    remarks = [*translation.remarks, *remarks]
    if device is None and asked not in _SERVED and not runs:
        remarks.append(f"the command asks for {translation.device}, which torch cannot serve: run.device is auto")
        device = "auto"
    if device is None and asked not in _SERVED:
        raise UsageError(
            f"{translation.system}: the command asks for {translation.device}, which torch cannot serve here. "
            "Run it with --device cpu (or cuda)."
        )
    config, arguments = dict(translation.config), list(translation.arguments)
    chosen = device or {"gpu": "cuda", "": "auto"}.get(asked, asked)
    if config:
        config["run.device"] = chosen
    elif translation.verb in ("generate", "eval"):
        arguments += ["--device", chosen]
    elif translation.inside:  # there it is translated, with what is said here
        options = [*(["--device", device] if device else []), *(["--shrink", "tiny"] if shrink else [])]
        arguments += ["--gpus", "none"] if chosen == "cpu" else []
        arguments += ["--", "gptworks", "run", *options, *(["--strict"] if strict else []), "--", *translation.inside]
    if translation.stated:
        stated = shrinking.tiny(translation.stated) if shrink else translation.stated
        arguments += _as_options({key: stated[key] for key in translation.stated})
    if shrink and config:
        small = shrinking.tiny(config)
        small |= vocabulary_of_data(config, folder) | heads_of_checkpoint(config, small, folder)
        small["train.log_every"] = 1  # so few are all shown
        remarks.append(shrinking.describe(config, small))
        if chosen == "cpu" and config.get("precision.compute") == "fp16":
            remarks.append("fp16 on a CPU is many times slower than fp32; of a tiny model, too")
        config = small
    elif shrink and "--model" in arguments:
        at = arguments.index("--model") + 1
        path = shrinking.newest_step(arguments[at], folder)
        if path != arguments[at]:
            remarks.append(f"--shrink tiny: {arguments[at]} is not here; a shrunk run has fewer steps, so it is {path}")
            arguments[at] = path
    if shrink and "lambada" in arguments and "--shorten" not in arguments:
        arguments.append("--shorten")
        remarks.append("--shrink tiny: the context of a shrunk model is short; longer passages lose their beginning")
    if shrink and "--max-new-tokens" in arguments:  # the context of a shrunk model is short
        at = arguments.index("--max-new-tokens") + 1
        arguments[at] = str(min(int(arguments[at]), shrinking.NEW_TOKENS))
    return replace(translation, config=config, arguments=arguments, remarks=remarks)
