"""What the user says beside a foreign command: on which device, how small, how strict."""

from dataclasses import replace
from pathlib import Path

from gptworks.errors import ConfigError, UsageError
from gptworks.interop import shrink as shrinking
from gptworks.interop.translation import Translation

_SERVED = {"", "cpu", "cuda", "gpu", "auto"}


def adapted(
    translation: Translation,
    remarks: list[str],
    *,
    device: str | None,
    shrink: bool,
    strict: bool,
    folder: Path = Path(),
) -> Translation:
    if strict:
        ignored = [f"{note.theirs}: ignored ({note.why})." for note in translation.notes if note.how == "ignored"]
        if ignored:
            raise ConfigError("--strict", ignored)
    asked = translation.device.lower()
    if device is None and asked not in _SERVED:
        raise UsageError(
            f"{translation.system}: the command asks for {translation.device}, which torch cannot serve here. "
            "Run it with --device cpu (or cuda)."
        )
    config, arguments, told = dict(translation.config), list(translation.arguments), [*translation.remarks, *remarks]
    chosen = device or {"gpu": "cuda", "": "auto"}.get(asked, asked)
    if config:
        config["run.device"] = chosen
    elif translation.verb in ("generate", "eval"):
        arguments += ["--device", chosen]
    if shrink and config:
        small = shrinking.tiny(config)
        told.append(shrinking.describe(config, small))
        config = small
    elif shrink and "--model" in arguments:
        at = arguments.index("--model") + 1
        found = shrinking.newest_step(arguments[at], folder)
        if found != arguments[at]:
            told.append(f"--shrink tiny: {arguments[at]} is not here; a shrunk run has fewer steps, so it is {found}")
            arguments[at] = found
    if shrink and "--max-new-tokens" in arguments:  # the context of a shrunk model is short
        at = arguments.index("--max-new-tokens") + 1
        arguments[at] = str(min(int(arguments[at]), shrinking.NEW_TOKENS))
    return replace(translation, config=config, arguments=arguments, remarks=told)
