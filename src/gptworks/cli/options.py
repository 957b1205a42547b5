"""Options that several verbs share."""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.config.load import ShapeOf


DEVICES = ["auto", "cpu", "cuda", "mps"]


def add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file (see `gptworks config show`)")
    parser.add_argument(
        "--preset", metavar="NAME", default="", help="model shape by name; `gptworks config presets` lists them"
    )
    parser.add_argument(
        "-o", "--override", metavar="KEY=VALUE", action="append", default=[], help="such as optim.lr=1e-4; repeatable"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="a setting, the same as -o: data.path=TEXT train.steps=100"
    )


def load_config(
    args: argparse.Namespace,
    *more: str,
    shape_of: "ShapeOf | None" = None,
    without: Collection[Callable[..., list[str]]] = (),
) -> Any:
    """The configuration and its origins; `more` are overrides that come from other options."""
    from gptworks.config.load import load_with_origins

    overrides = [*args.override, *args.overrides, *more]
    return load_with_origins(
        args.config,
        preset=args.preset,
        overrides=overrides,
        shape_of=shape_of,
        vocabulary_of=vocabulary_of_data,
        without=without,
    )


def vocabulary_of_data(paths: list[str], tokenizer: str) -> int | None:
    from gptworks.data.store import vocabulary_of

    return vocabulary_of(paths, tokenizer)


def shape_of_checkpoint(checkpoint: str, overrides: dict[str, Any]) -> dict[str, Any]:
    from gptworks.checkpoint.pretrained import Pretrained, fields_not_stored

    return Pretrained.open(checkpoint, shape=fields_not_stored(overrides)).model.model_dump()


def default_run_folder(args: argparse.Namespace) -> str:
    return str(Path("runs") / (Path(args.config).stem if args.config else args.preset or "run"))


def add_model_argument(parser: argparse.ArgumentParser, *, repeatable: bool = False) -> None:
    """--model DIR, or DIR alone, as plot and report take it: main() gives it to take_models."""
    about = "run folder, checkpoint of any known system, or name; --model may be left out"
    if repeatable:
        parser.add_argument("--model", metavar="DIR", action="append", help=f"{about}; repeatable")
    else:
        parser.add_argument("--model", metavar="DIR", help=about)
    parser.set_defaults(most_models=None if repeatable else 1)


_TEXT_ENDINGS = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".md")


def take_models(args: argparse.Namespace, words: list[str]) -> list[str]:
    """The words of a command line that are left when one that names no --model has taken its model from them."""
    if not hasattr(args, "most_models") or args.model or getattr(args, "server", None):
        return words
    if any(word.startswith("-") for word in words):
        return words
    if not words:
        other = ", or --server URL" if hasattr(args, "server") else ""
        raise UsageError(f"{args.verb}: no model. Needed: --model DIR, such as the folder of a run (runs/...){other}.")
    text = next((word for word in words[1:] if Path(word).suffix in _TEXT_ENDINGS), "")
    if text and hasattr(args, "data"):
        raise UsageError(f"{args.verb}: {text} is not a model. What to measure on is --data {text}.")
    args.model = words[0] if args.most_models == 1 else words
    return words[1:] if args.most_models == 1 else []


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="tokenizer by name or folder, where none lies beside the weights"
    )
    parser.add_argument(
        "-o",
        "--override",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="what the files do not say, such as model.num_heads=16; repeatable",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=["fp32", "bf16", "int8", "int4"],
        default="fp32",
        help="how matrices are kept: fewer bits need less memory and are less exact",
    )


# Written here as well as in the registries of formats, whose import would need numpy and torch; a test compares them.
DATASET_FORMATS = "megatron, tnt, paddle, paddle-npz, mindrecord, nanogpt or llmc"
WEIGHT_FORMATS = (
    "gptworks, hf, megatron, megatron-core, fleetx, paddlenlp, mindspore, oneflow, nanogpt, llmc, llama2c, "
    "gguf, gguf-q8_0 or gguf-q4_0"
)


def is_checkpoint(path: str, *formats: str | None) -> bool:
    """Whether a path (or the name of a model) means weights; a dataset is what is not.

    `formats`: what --from and --to say, which decides where a name is one of weights only, or of datasets only.
    """
    from gptworks.checkpoint.systems import registry
    from gptworks.errors import UsageError

    weights, datasets = listed(WEIGHT_FORMATS), listed(DATASET_FORMATS)
    of_weights = [each for each in formats if each in weights and each not in datasets]
    of_datasets = [each for each in formats if each in datasets and each not in weights]
    if of_weights and of_datasets:
        raise UsageError(f"{of_weights[0]} is a format of checkpoints, and {of_datasets[0]} one of datasets.")
    if of_weights or of_datasets:
        return bool(of_weights)
    local = _local_path(path)
    is_torch_name = local.is_file() and local.suffix in (".pt", ".pth")
    return is_torch_name or registry.recognise(local) is not None


def checkpoint_path(source: str) -> Path:
    """The path, or the folder of a name such as gpt2; an error that says what to do where there is neither."""
    from gptworks import model_hub

    return Path(source) if Path(source).exists() else model_hub.resolve(source)


def _local_path(source: str) -> Path:
    from gptworks import model_hub

    return Path(source) if Path(source).exists() else model_hub.find(source) or Path(source)


def listed(formats: str) -> tuple[str, ...]:
    return tuple(formats.replace(" or ", ", ").split(", "))


def stated_model(overrides: list[str]) -> dict[str, object]:
    """model.KEY=VALUE pairs of -o."""
    from gptworks.config import yaml_text
    from gptworks.config.schema import ModelConfig
    from gptworks.errors import UsageError

    model_overrides: dict[str, object] = {}
    for each in overrides:
        key, equals, value = each.partition("=")
        if key.strip() == "qkv_version" and equals:  # of Megatron's files without their wrapper
            model_overrides["qkv_version"] = yaml_text.parse_scalar(value)
            continue
        name = key.strip().removeprefix("model.")
        if not equals or not key.strip().startswith("model.") or name not in ModelConfig.model_fields:
            known = ", ".join(ModelConfig.model_fields)
            raise UsageError(f"-o {each}: needed model.KEY=VALUE, such as model.num_heads=16. Keys: {known}.")
        model_overrides[name] = yaml_text.parse_scalar(value)
    return model_overrides


def dtype(name: str | None):  # type: ignore[no-untyped-def]
    from gptworks.model.dtypes import DTYPES

    return None if name is None else DTYPES[name]


def dataset_format(name: str, option: str):  # type: ignore[no-untyped-def]
    from gptworks.data.formats.registry import FORMATS
    from gptworks.errors import UsageError

    if name not in FORMATS:
        raise UsageError(f"{option}: no format '{name}'. Formats: {', '.join(FORMATS)}.")
    return FORMATS[name]
