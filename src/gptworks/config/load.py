"""Defaults < checkpoint's model < preset < base files < file < overrides, merged in one place.

Every value remembers where it came from.
"""

import difflib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gptworks.config import contradictions, other_names, presets, yaml_text
from gptworks.config.schema import ModelConfig, RunConfig, Section
from gptworks.errors import ConfigError

NOT_SECTIONS = ("base", "preset")


# The model section of a checkpoint; the second: what of it is stated, for systems whose files do not carry all of it.
ShapeOf = Callable[[str, dict[str, Any]], dict[str, Any]]
# How many tokens the tokenizer of datasets has; the second: what data.tokenizer says. None where it is not known.
VocabularyOf = Callable[[list[str], str], int | None]


@dataclass(frozen=True)
class Leaf:
    """One value and where it came from: `run.yaml:12`, `preset gpt2`, `override`."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    origins: dict[str, str]  # dotted path -> origin, for every value that is not a default


def load(path: str | Path | None = None, *, preset: str = "", overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of a run from a YAML file, a preset and `a.b=c` overrides.

    >>> config = load(preset="gpt2", overrides=["optim.lr=1e-4"])
    >>> config.model.num_layers, config.optim.lr
    (12, 0.0001)
    """
    return load_with_origins(path, preset=preset, overrides=overrides).config


def load_with_origins(
    path: str | Path | None = None,
    *,
    preset: str = "",
    overrides: Iterable[str] = (),
    values: dict[str, Any] | None = None,
    shape_of: ShapeOf | None = None,
    vocabulary_of: VocabularyOf | None = None,
    without: Collection[Callable[..., list[str]]] = (),
) -> Loaded:
    """`values` are overrides of a program, dotted or nested; `without`: checks of contradictions.py to leave out.

    `shape_of` gives the model section of the folder in `init.checkpoint`, so that fine-tuning need not repeat it;
    `vocabulary_of` the vocabulary of the data, where neither file, preset nor checkpoint says the model's.
    """
    leaves: dict[str, Leaf] = {}
    problems: list[str] = []
    if path is not None:
        leaves, file_preset = _read_with_bases(Path(path), seen=())
        preset = preset or file_preset
    for text in overrides:
        key, leaf, problem = _parse_override(text)
        if problem:
            problems.append(problem)
        else:
            leaves[key] = leaf
    leaves |= {key: Leaf(value, "argument") for key, value in flatten(values or {}).items()}
    below: dict[str, Leaf] = {}
    checkpoint = leaves.get("init.checkpoint")
    is_complete = all(f"model.{key}" in leaves for key in ModelConfig.model_fields)
    if shape_of and checkpoint and checkpoint.value and not is_complete:
        stated = presets.find(preset) if preset else {}
        stated |= {key.removeprefix("model."): leaf.value for key, leaf in leaves.items() if key.startswith("model.")}
        shape = shape_of(str(checkpoint.value), stated)
        below |= {f"model.{key}": Leaf(value, f"checkpoint {checkpoint.value}") for key, value in shape.items()}
    if preset:
        below |= {f"model.{key}": Leaf(value, f"preset {preset}") for key, value in presets.find(preset).items()}
    if vocabulary_of and "model.vocab_size" not in below | leaves:
        below |= _vocabulary(leaves, vocabulary_of)
    return _validate(below | leaves, str(path or "config"), problems, without)


def _vocabulary(leaves: dict[str, Leaf], vocabulary_of: VocabularyOf) -> dict[str, Leaf]:
    given = {key: leaves[key].value for key in ("data.path", "data.tokenizer") if key in leaves}
    path = given.get("data.path") or []
    paths = list(path) if isinstance(path, list | tuple) else [path]
    if not paths or not all(isinstance(each, str) for each in paths):
        return {}  # what is wrong with it is said with all that is wrong
    found = vocabulary_of(paths, str(given.get("data.tokenizer") or ""))
    return {"model.vocab_size": Leaf(found, f"tokenizer of {', '.join(paths)}")} if found else {}


def from_dict(values: dict[str, Any], source: str = "config") -> RunConfig:
    """The configuration from nested dictionaries, with the same checks and messages as from a file."""
    return _validate({key: Leaf(value, "") for key, value in flatten(values).items()}, source, []).config


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key of the schema."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += known_keys(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _parse_override(text: str) -> tuple[str, Leaf, str]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        return "", Leaf(None, ""), f"{text}: an override has the form section.key=value, such as optim.lr=1e-4."
    return key, Leaf(yaml_text.parse_scalar(value), f"override {text}"), ""


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Leaf], str]:
    """The leaves of a file over those of its `base:` files, and the preset it names."""
    if path.resolve() in seen:
        chain = " -> ".join(str(p) for p in (*seen, path))
        raise ConfigError(str(path), [f"base: files include each other: {chain}."])
    tree = yaml_text.read(path)
    leaves: dict[str, Leaf] = {}
    preset = ""
    for name in _names(tree.pop("base", None), "base", path):
        base_leaves, base_preset = _read_with_bases(path.parent / name, (*seen, path.resolve()))
        leaves |= base_leaves
        preset = base_preset or preset
    own_presets = _names(tree.pop("preset", None), "preset", path)
    if len(own_presets) > 1:
        raise ConfigError(str(path), [f"preset: got {own_presets}; needs one name."])
    preset = own_presets[0] if own_presets else preset
    for key, leaf in flatten(tree).items():
        if isinstance(leaf, yaml_text.Value):
            leaves[key] = Leaf(leaf.value, f"{path}:{leaf.line}")
    return leaves, preset


def _names(given: Any, key: str, path: Path) -> list[str]:
    """What `base:` or `preset:` says: nothing, a name or a list of names."""
    value = given.value if isinstance(given, yaml_text.Value) else given
    if value is None:
        return []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        shown = "a block" if isinstance(value, dict) else repr(value)
        raise ConfigError(str(path), [f"{key}: got {shown}; needs a name" + (" or a list." if key == "base" else ".")])
    return names


def _validate(
    leaves: dict[str, Leaf], source: str, problems: list[str], without: Collection[Callable[..., list[str]]] = ()
) -> Loaded:
    known = set(known_keys())
    blocks = {key.rpartition(".")[0] for key in known}
    given: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for key, leaf in leaves.items():
        if key in blocks and leaf.value is None:
            continue  # `model:` with nothing below it
        if key not in known:
            problems.append(_located(_unknown(key, known, leaf.value), leaf))
        elif leaf.value is not None:
            _place(given, key, leaf.value)
            origins[key] = leaf.origin

    sections: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():  # `model` comes before `data`
        if name == "data" and "model" in sections and "seq_len" not in given.get("data", {}):
            given.setdefault("data", {})["seq_len"] = sections["model"].max_positions
            origins["data.seq_len"] = "model.max_positions"
        section_type = field.annotation
        assert isinstance(section_type, type) and issubclass(section_type, Section)
        try:
            sections[name] = section_type.model_validate(given.get(name, {}))
        except ValidationError as error:
            for key, problem in explain(name, error):
                problems.append(_located(problem, leaves.get(key)))
    origins.setdefault("model.ffn_size", "4 x model.hidden_size")
    problems += contradictions.find(sections, without)
    if problems:
        raise ConfigError(source, problems)
    return Loaded(RunConfig.model_validate(sections), origins)


def _place(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _located(problem: str, leaf: Leaf | None) -> str:
    return f"{problem} ({leaf.origin})" if leaf is not None and leaf.origin else problem


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
    return near or [elsewhere[found] for found in difflib.get_close_matches(last, elsewhere, 1, 0.8)]


def _unknown(key: str, known: set[str], value: Any) -> str:
    section, _, name = key.partition(".")
    if key in {k.rpartition(".")[0] for k in known}:
        return f"{key}: {value!r} is not a section. Put its keys below it, indented."
    if reason := other_names.why_not(key):
        return f"{key}: no such setting: {reason}. Leave it out."
    near = meant(key, known)
    if near:
        shown = [k.partition(".")[2] if k.partition(".")[0] == section and name else k for k in near]
        return f"{key}: unknown key; did you mean {' or '.join(repr(k) for k in shown)}?"
    if section in RunConfig.model_fields:
        names = [k.partition(".")[2] for k in known_keys() if k.startswith(f"{section}.")]
        return f"{key}: unknown key. Keys of {section}: {', '.join(names)}."
    return f"{key}: unknown key. Sections: {', '.join([*RunConfig.model_fields, *NOT_SECTIONS])}."


def explain(section: str, error: ValidationError) -> list[tuple[str, str]]:
    """(dotted key, message) for each thing pydantic found."""
    explained = []
    for item in error.errors():
        if item["type"] == "default_factory_not_called":
            continue  # follows from another error of the same section
        path = ".".join([section, *(str(part) for part in item["loc"] if isinstance(part, str))])
        if item["type"] == "extra_forbidden":
            explained.append((path, _unknown(path, set(known_keys()), item["input"])))
            continue
        message = item["msg"].removeprefix("Value error, ")
        if not item["loc"]:  # a check over the whole section names its key itself
            key = f"{section}.{message.partition(':')[0]}"
            explained.append((key, f"{section}.{message}"))
            continue
        shown = item["input"] if not isinstance(item["input"], dict) else "a block"
        explained.append((path, f"{path}: got {shown!r}; {message[0].lower()}{message[1:]}."))
    return explained
