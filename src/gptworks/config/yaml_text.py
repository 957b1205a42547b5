"""YAML as people write it: 1e-5 is a number, a key twice is an error, and every value knows its line."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gptworks import file_errors, limits, run_paths
from gptworks.errors import ConfigError, UsageError


class _Loader(yaml.SafeLoader):
    """SafeLoader follows YAML 1.1, where 1e-5 is a string, `on` is true, 010 is eight, 1:30 is ninety and 2024-01-01 is
    a date. We follow the YAML 1.2 core schema, and accept 1_000 as a number."""


_OWN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("float", "int", "bool", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _OWN_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+(_[0-9]+)*$|^0o[0-7]+$|^0x[0-9a-fA-F]+$"), list("-+0123456789")
)
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda loader, node: int(node.value, 0 if node.value[:2] in {"0o", "0x"} else 10),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


_ENDLESS = "blocks are nested without end (an alias inside its own anchor?)."
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Value:
    """A value of a YAML file and where it stands."""

    value: Any
    line: int


def parse_scalar(text: str) -> Any:
    """The value of `key=TEXT` on a command line, read as YAML would read it."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def read_plain(path: Path) -> Any:
    """What PyYAML's `safe_load` makes of a file, whose size and aliases are bounded. Errors of PyYAML pass through."""
    loader = yaml.SafeLoader(_bounded_text(path))
    try:
        node = loader.get_single_node()
        _require_few_values(node, path)
        return None if node is None else _constructed(loader, node, path)
    except RecursionError:
        raise ConfigError(str(path), [_ENDLESS]) from None
    finally:
        loader.dispose()


def _constructed(loader: yaml.SafeLoader, node: yaml.Node, path: Path) -> Any:
    try:
        return loader.construct_document(node)  # type: ignore[no-untyped-call]
    except ValueError as error:  # a number of thousands of digits, a date in a thirteenth month
        raise ConfigError(str(path), [f"not valid YAML: {error}"]) from None


def _bounded_text(path: Path) -> str:
    """PyYAML reads some 50 KB a second, also of comments."""
    most = limits.YAML_BYTES.value
    with path.open("rb") as file:
        size = path.stat().st_size
        data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(
            str(path),
            [f"{size:,} bytes, and a configuration has at most {most:,}. {limits.YAML_BYTES.advice(size)}"],
        )
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _require_few_values(node: yaml.Node | None, path: Path) -> None:
    """Aliases of aliases may stand for more values than any memory holds: they are counted before they are built."""
    sizes: dict[int, int] = {}
    most = limits.YAML_VALUES.value
    under_way: set[int] = set()

    def size_of(each: yaml.Node) -> int:
        if id(each) in under_way:
            raise ConfigError(str(path), [f"line {each.start_mark.line + 1}: {_ENDLESS}"])
        if id(each) not in sizes:
            under_way.add(id(each))
            inside = each.value if isinstance(each, yaml.SequenceNode) else []
            if isinstance(each, yaml.MappingNode):
                inside = [part for pair in each.value for part in pair]
            sizes[id(each)] = 1 + sum(map(size_of, inside))
            under_way.remove(id(each))
            if sizes[id(each)] > most:
                raise ConfigError(
                    str(path),
                    [
                        f"line {each.start_mark.line + 1}: stands for {sizes[id(each)]:,} values once its aliases are "
                        f"written out, and a configuration has at most {most:,}. "
                        + limits.YAML_VALUES.advice(sizes[id(each)])
                    ],
                )
        return sizes[id(each)]

    if node is not None:
        size_of(node)


def read(path: Path) -> dict[str, Value | dict[str, Any]]:
    """The file as nested dictionaries whose leaves are `Value`s."""
    try:
        text = _bounded_text(path)
    except FileNotFoundError:
        raise ConfigError(str(path), ["no such file. Check the path, and `base:` if a file names it."]) from None
    except IsADirectoryError:
        inside = path / run_paths.CONFIG
        hint = f" The configuration of this run is {inside}." if inside.is_file() else ""
        raise ConfigError(str(path), [f"is a folder; needs a YAML file.{hint}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"cannot be read as UTF-8 text: {error}"]) from None
    except OSError as error:
        raise UsageError(file_errors.explain(error, path) or f"{path}: cannot be read ({error.strerror}).") from None
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return {}
            _require_few_values(node, path)
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(
                    str(path), [f"line {node.start_mark.line + 1}: needs `section:` blocks at the top level."]
                )
            return _mapping(loader, node, path)
        finally:
            loader.dispose()
    except RecursionError:
        raise ConfigError(str(path), [_ENDLESS]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}"
        raise ConfigError(str(path), [f"line {line}: the control character {character}. Remove it."]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        if mark and "\t" in [*text.splitlines(), ""][mark.line][: mark.column + 1]:
            problem = "a tab is used for indentation; YAML allows only spaces. Replace the tab with spaces."
        else:
            problem = f"not valid YAML: {error.problem or error}"
        raise ConfigError(str(path), [where + problem]) from None
    except ValueError as error:  # a number that is none, such as `!!int x`
        raise ConfigError(str(path), [f"not valid YAML: {error}"]) from None


def _mapping(loader: _Loader, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
    """What `<<: *anchor` brings in comes first, so that the block's own keys stand above it."""
    result: dict[str, Any] = {}
    inherited: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        is_merge = key_node.tag == _MERGE
        key = "<<" if is_merge else str(loader.construct_object(key_node))  # type: ignore[no-untyped-call]
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(
                str(path), [f"line {line}: key '{key}' again; it is already set on line {lines[key]}. Keep one."]
            )
        lines[key] = line
        if is_merge:
            inherited = _merged(loader, value_node, path)
        elif isinstance(value_node, yaml.MappingNode):
            result[key] = _mapping(loader, value_node, path)
        else:
            result[key] = Value(loader.construct_object(value_node, deep=True), line)  # type: ignore[no-untyped-call]
    return inherited | result


def _merged(loader: _Loader, node: yaml.Node, path: Path) -> dict[str, Any]:
    """The value of `<<`: a block or a list of blocks, of which an earlier one stands above a later one."""
    blocks = node.value if isinstance(node, yaml.SequenceNode) else [node]
    merged: dict[str, Any] = {}
    for block in blocks:
        if not isinstance(block, yaml.MappingNode):
            line = block.start_mark.line + 1
            raise ConfigError(
                str(path), [f"line {line}: `<<` needs a block, or a list of blocks, such as `<<: *name`; got a value."]
            )
        merged = _mapping(loader, block, path) | merged
    return merged


def dump(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
