"""Problems of a configuration in words: what pydantic found, and keys that nobody knows."""

import difflib
from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ValidationError

from gptworks.config import other_names

NOT_SECTIONS = ("base", "preset")


def keys_of(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of the schema."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += keys_of(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def meant(key: str, known: Collection[str]) -> list[str]:
    """The keys that an unknown one may mean: of that name in another section, by what other tools call it, or by its
    spelling."""
    elsewhere = {k.rpartition(".")[2]: k for k in sorted(known)}
    last = key.rpartition(".")[2]
    if last in elsewhere:
        return [elsewhere[last]]
    by_meaning = [k for k in other_names.find(key) if k in known]
    here = [k for k in by_meaning if k.partition(".")[0] == key.partition(".")[0]]
    by_meaning = here or by_meaning  # max_tokens of `generate` is another one than that of `train`
    near = by_meaning or difflib.get_close_matches(key, sorted(known), 1, 0.6)
    return near or [elsewhere[name] for name in difflib.get_close_matches(last, elsewhere, 1, 0.8)]


def unknown(key: str, whole: type[BaseModel], value: Any) -> str:
    """`whole`: the configuration that has no such key."""
    known = set(keys_of(whole))
    section, _, name = key.partition(".")
    if key in {k.rpartition(".")[0] for k in known}:
        own = [k for k in other_names.find(key) if k.startswith(f"{key}.")]
        first = own[0] if own else next(k for k in keys_of(whole) if k.startswith(f"{key}."))
        preset = (
            f" A preset is --preset {value}, or preset: {value} in a file."
            if key == "model" and isinstance(value, str)
            else ""
        )
        return f"{key}: {value!r} is not a section. A section has keys, such as {first!r}.{preset}"
    if reason := other_names.why_not(key):
        return f"{key}: no such setting: {reason}. Leave it out."
    near = meant(key, known)
    if near:
        listed = [k.partition(".")[2] if k.partition(".")[0] == section and name else k for k in near]
        return f"{key}: unknown key; did you mean {' or '.join(repr(k) for k in listed)}?"
    if section in whole.model_fields:
        names = [k.partition(".")[2] for k in keys_of(whole) if k.startswith(f"{section}.")]
        return f"{key}: unknown key. Keys of {section}: {', '.join(names)}."
    return f"{key}: unknown key. Sections: {', '.join([*whole.model_fields, *NOT_SECTIONS])}."


def explain(section: str, error: ValidationError, whole: type[BaseModel]) -> list[tuple[str, str]]:
    """(dotted key, message) for each thing pydantic found."""
    explained = []
    for item in error.errors():
        if item["type"] == "default_factory_not_called":
            continue  # follows from another error of the same section
        path = ".".join([section, *(str(part) for part in item["loc"] if isinstance(part, str))])
        if item["type"] == "extra_forbidden":
            explained.append((path, unknown(path, whole, item["input"])))
            continue
        message = item["msg"].removeprefix("Value error, ")
        if not item["loc"]:  # a check over the whole section names its key itself
            for complaint in message.split("\n"):
                explained.append((f"{section}.{complaint.partition(':')[0]}", f"{section}.{complaint}"))
            continue
        value = item["input"] if not isinstance(item["input"], dict) else "a block"
        near = other_names.value(path, item["input"]) if item["type"] == "literal_error" else ""
        hint = f" Did you mean {near}?" if near else ""
        explained.append((path, f"{path}: got {value!r}; {message[0].lower()}{message[1:]}.{hint}"))
    return explained
