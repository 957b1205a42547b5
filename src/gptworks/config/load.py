"""Defaults < checkpoint's model < preset < base files < file < overrides, merged in one place.

Every value remembers where it came from.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gptworks.config import checks, presets, yaml_text
from gptworks.config.explain import explain, keys_of, unknown
from gptworks.config.schema import ModelConfig, RunConfig, Section
from gptworks.errors import ConfigError

# The model section of a checkpoint; the second: what of it is stated, for systems whose files do not carry all of it.
ShapeOf = Callable[[str, dict[str, Any]], dict[str, Any]]
# How many tokens the tokenizer of datasets has; the second: what data.tokenizer says. None where it is not known.
VocabularyOf = Callable[[list[str], str], int | None]


class OriginKind(Enum):
    FILE = "file"
    PRESET = "preset"
    CHECKPOINT = "checkpoint"
    TOKENIZER = "tokenizer"
    OVERRIDE = "override"  # of the command line
    ARGUMENT = "argument"  # of a program
    DERIVED = "derived"  # from another value


class Origin(str):
    """Where a value came from, in words: `run.yaml:12`, `preset gpt2`, `override optim.lr=1e-4`."""

    kind: OriginKind

    def __new__(cls, text: str, kind: OriginKind) -> "Origin":
        origin = super().__new__(cls, text)
        origin.kind = kind
        return origin


@dataclass(frozen=True)
class Leaf:
    """One value and where it came from."""

    value: Any
    origin: Origin | None


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    origins: dict[str, Origin]  # dotted path -> origin, for every value that is not a default
    preset: str = ""  # the one that the model is of


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
    """`values` are overrides of a program, dotted or nested; `without`: functions of checks.py to leave out.

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
    leaves |= {
        key: Leaf(value, Origin("argument", OriginKind.ARGUMENT)) for key, value in flatten(values or {}).items()
    }
    below: dict[str, Leaf] = {}
    checkpoint = leaves.get("init.checkpoint")
    is_complete = all(key in leaves for key in keys_of(ModelConfig, "model."))
    if shape_of and checkpoint and checkpoint.value and not is_complete:
        stated = presets.find(preset) if preset else {}
        stated |= {key.removeprefix("model."): leaf.value for key, leaf in leaves.items() if key.startswith("model.")}
        shape = dict(shape_of(str(checkpoint.value), stated))
        if any(key in stated and stated[key] != shape.get(key) for key in ("hidden_size", "num_heads")):
            shape.pop("head_size", None)  # of another model than is asked for: what differs is said when it is opened
        origin = Origin(f"checkpoint {checkpoint.value}", OriginKind.CHECKPOINT)
        below |= {key: Leaf(value, origin) for key, value in flatten({"model": shape}).items()}
    if preset:
        origin = Origin(f"preset {preset}", OriginKind.PRESET)
        below |= {key: Leaf(value, origin) for key, value in flatten({"model": presets.find(preset)}).items()}
    if vocabulary_of and "model.vocab_size" not in below | leaves:
        below |= _vocabulary(leaves, vocabulary_of)
    return replace(_validate(below | leaves, str(path or "config"), problems, without), preset=preset)


def _vocabulary(leaves: dict[str, Leaf], vocabulary_of: VocabularyOf) -> dict[str, Leaf]:
    values = {key: leaves[key].value for key in ("data.path", "data.tokenizer") if key in leaves}
    path = values.get("data.path") or []
    paths = list(path) if isinstance(path, list | tuple) else [path]
    if not paths or not all(isinstance(each, str) for each in paths):
        return {}  # what is wrong with it is said with all that is wrong
    size = vocabulary_of(paths, str(values.get("data.tokenizer") or ""))
    origin = Origin(f"tokenizer of {', '.join(paths)}", OriginKind.TOKENIZER)
    return {"model.vocab_size": Leaf(size, origin)} if size else {}


def from_dict(values: dict[str, Any], source: str = "config") -> RunConfig:
    """The configuration from nested dictionaries, with the same checks and messages as from a file."""
    return _validate({key: Leaf(value, None) for key, value in flatten(values).items()}, source, []).config


def known_keys() -> list[str]:
    """Every dotted key of the schema."""
    return keys_of(RunConfig)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """The reverse of flatten: dotted keys as sections within each other."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        _place(tree, key, value)
    return tree


def _parse_override(text: str) -> tuple[str, Leaf, str]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        problem = f"{text}: an override has the form section.key=value, such as optim.lr=1e-4."
        return "", Leaf(None, None), problem + ("" if equals else _meant_by_word(text))
    return key, Leaf(yaml_text.parse_scalar(value), Origin(f"override {text}", OriginKind.OVERRIDE)), ""


def _meant_by_word(word: str) -> str:
    """What a word without = may stand for."""
    if word in keys_of(RunConfig):
        return f" Here the value is missing; there are no blanks around the = of {word}=VALUE."
    if Path(word).suffix in (".yaml", ".yml"):
        return f" A configuration is -c {word}."
    if Path(word).suffix == ".py":
        return f" A configuration of nanoGPT goes with its command: gptworks run -- python train.py {word}."
    is_path = "/" in word or Path(word).suffix or Path(word).exists()
    return f" A text or dataset to train on is data.path={word}." if is_path and word else ""


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
            leaves[key] = Leaf(leaf.value, Origin(f"{path}:{leaf.line}", OriginKind.FILE))
    return leaves, preset


def _names(node: Any, key: str, path: Path) -> list[str]:
    """What `base:` or `preset:` says: nothing, a name or a list of names."""
    value = node.value if isinstance(node, yaml_text.Value) else node
    if value is None:
        return []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        got = "a block" if isinstance(value, dict) else repr(value)
        raise ConfigError(str(path), [f"{key}: got {got}; needs a name" + (" or a list." if key == "base" else ".")])
    return names


def _validate(
    leaves: dict[str, Leaf], source: str, problems: list[str], without: Collection[Callable[..., list[str]]] = ()
) -> Loaded:
    known = set(known_keys())
    blocks = {key.rpartition(".")[0] for key in known}
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, Origin] = {}
    for key, leaf in leaves.items():
        if key in blocks and leaf.value is None:
            continue  # `model:` with nothing below it
        if key not in known:
            problems.append(_located(unknown(key, RunConfig, leaf.value), leaf))
        elif leaf.value is not None:
            _place(values, key, leaf.value)
            origins[key] = leaf.origin or Origin("", OriginKind.ARGUMENT)

    sections: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():  # `model` comes before `data`
        if name == "data" and "model" in sections and "seq_len" not in values.get("data", {}):
            values.setdefault("data", {})["seq_len"] = sections["model"].max_positions
            origins["data.seq_len"] = Origin("model.max_positions", OriginKind.DERIVED)
        section_type = field.annotation
        assert isinstance(section_type, type) and issubclass(section_type, Section)
        try:
            sections[name] = section_type.model_validate(values.get(name, {}))
        except ValidationError as error:
            for key, problem in explain(name, error, RunConfig):
                problems.append(_located(problem, leaves.get(key)))
    if "model" in sections:
        for key, text in _derived(sections["model"]).items():
            origins.setdefault(f"model.{key}", Origin(text, OriginKind.DERIVED))
    problems += checks.find(sections, without)
    if problems:
        raise ConfigError(source, problems)
    return Loaded(RunConfig.model_validate(sections), origins)


def _derived(model: ModelConfig) -> dict[str, str]:
    """From what the keys of a model follow where they are not given."""
    return {
        "ffn_size": "4 x model.hidden_size" if model.mlp == "gelu" else "8/3 x model.hidden_size",
        "num_kv_heads": "model.num_heads",
        "head_size": "model.hidden_size / model.num_heads",
    }


def _place(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _located(problem: str, leaf: Leaf | None) -> str:
    return f"{problem} ({leaf.origin})" if leaf is not None and leaf.origin else problem
