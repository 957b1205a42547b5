"""gptworks config: look at configurations without running anything."""

import argparse
import json

from gptworks.cli import options

HELP = "show, check, diff, schema, presets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="the resolved configuration; FILE may stand without -c")
    options.add_config_options(show)
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    options.add_json_option(show)
    options.add_config_options(actions.add_parser("check", help="report every problem; FILE may stand without -c"))
    diff = actions.add_parser("diff", help="what differs between two files")
    diff.add_argument("first", metavar="FILE")
    diff.add_argument("second", metavar="FILE")
    actions.add_parser("schema", help="JSON schema, for editors")
    actions.add_parser("presets", help="model shapes by name")


def run(args: argparse.Namespace) -> int:
    return {"show": _show, "check": _check, "diff": _diff, "schema": _schema, "presets": _presets}[args.action](args)


def _take_file(args: argparse.Namespace) -> None:
    """`config check FILE`: a word that is no override is the file, where -c names none."""
    files = [word for word in args.overrides if "=" not in word]
    if args.config is None and len(files) == 1:
        args.config = files[0]
        args.overrides.remove(files[0])


def _show(args: argparse.Namespace) -> int:
    from gptworks.config import yaml_text
    from gptworks.config.derive import derived
    from gptworks.config.load import flatten

    _take_file(args)
    loaded = options.load_config(args, shape_of=options.shape_of_checkpoint)
    values = loaded.config.model_dump(mode="json")
    if args.json:
        print(json.dumps(values, indent=2))
    elif args.origin:
        derived_values = derived(loaded.config)
        flat = flatten(values) | {key: value for key, (value, _) in derived_values.items()}
        origins = loaded.origins | {key: f"derived: {why}" for key, (_, why) in derived_values.items()}
        width = max(len(f"{key}: {json.dumps(value)}") for key, value in flat.items())
        for key, value in flat.items():
            print(f"{f'{key}: {json.dumps(value)}':<{width}}  # {origins.get(key, 'default')}")
    else:
        print(yaml_text.dump(values), end="")
    return 0


def _check(args: argparse.Namespace) -> int:
    _take_file(args)
    options.load_config(args, shape_of=options.shape_of_checkpoint)
    print(f"{args.config or 'config'}: no problems")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from gptworks.config.load import flatten, load

    first, second = (flatten(load(path).model_dump(mode="json")) for path in (args.first, args.second))
    for key in first:
        if first[key] != second[key]:
            print(f"{key}: {first[key]} -> {second[key]}")
    return 0


def _schema(args: argparse.Namespace) -> int:
    from gptworks.config.schema import editor_schema

    print(json.dumps(editor_schema(), indent=2))
    return 0


def _presets(args: argparse.Namespace) -> int:
    from gptworks.config import presets
    from gptworks.plan import sizes

    also = {name: [alias for alias, target in presets.aliases().items() if target == name] for name in presets.names()}
    for name in presets.names():
        model = presets.model_config(name)
        aliases = f"  also {', '.join(also[name])}" if also[name] else ""
        print(
            f"{name:<12} {sizes.num_parameters(model):>15,} parameters  {model.num_layers} layers x "
            f"{model.hidden_size}, "
            f"{model.num_heads} heads, vocabulary {model.vocab_size}, context {model.max_positions}{aliases}"
        )
    return 0
