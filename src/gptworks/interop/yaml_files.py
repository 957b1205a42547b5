"""Foreign YAML: plain safe YAML, with the ways those systems let one file build upon another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gptworks.config import yaml_text
from gptworks.errors import ConfigError


def read(path: Path) -> dict[str, Any]:
    try:
        values = yaml_text.read_plain(path)
    except FileNotFoundError:
        raise ConfigError(str(path), ["no such file."]) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(str(path), [f"cannot be read ({' '.join(str(error).split())})."]) from None
    if not isinstance(values, dict):
        raise ConfigError(str(path), [f"holds a {type(values).__name__}, needed keys and values."])
    return values


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any], mark: str = "") -> dict[str, Any]:
    """`mark`: a block of `over` with this key, false, takes the place of the whole block of `base`."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        replaces = both and bool(mark) and value.get(mark) is False
        merged[key] = deep_merge(below, value, mark) if both and not replaces else value  # type: ignore[arg-type]
    return merged


def as_text(value: Any) -> str:
    """As it could have been written: what a table reads is text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return str(value)
