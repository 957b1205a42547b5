"""gptworks export: a model as a folder for another runtime."""

import argparse
import json

from gptworks.cli import options

HELP = "a model for another runtime: transformers, onnxruntime, torch.export, llama.cpp, CTranslate2"

# Written here as well as in the registry, whose import would need torch; a test compares them.
TARGETS = "hf, onnx, torch, gguf or ctranslate2"
WEIGHTS = "fp32 (default); int8 for onnx, gguf, ctranslate2; fp16 for hf, gguf, ctranslate2; bf16 for hf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="run folder, checkpoint of any system, or a name")
    parser.add_argument("--to", required=True, metavar="TARGET", help=TARGETS)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--weights", metavar="KIND", help=WEIGHTS)
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="tokenizer for weights that have none beside them, such as gpt2"
    )
    parser.add_argument(
        "--name", metavar="NAME", default="model", help="name of the files, without suffix (default: model)"
    )
    parser.add_argument(
        "-o", "--override", metavar="KEY=VALUE", action="append", default=[],
        help="what the source does not carry, such as model.num_heads=16",
    )  # fmt: skip
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from gptworks.export.folder import export

    done = export(
        args.model,
        args.to,
        args.out,
        weights=args.weights,
        name=args.name,
        tokenizer=args.tokenizer,
        overrides=options.stated_model(args.override),
    )
    if args.json:
        values = {
            "folder": str(done.folder),
            "to": done.target.NAME,
            "weights": done.weights,
            "files": {name: about["bytes"] for name, about in done.info["files"].items()},
            "parameters": len(done.info["parameters"]),
            "notes": done.notes,
        }
        print(json.dumps(values))
        return 0
    print(f"{args.model} -> {done.folder}: {done.target.TITLE}, {done.weights}")
    for file in done.files:
        print(f"  {file.name:<24} {file.stat().st_size:>14,} bytes")
    for note in done.notes:
        print(f"note: {note}")
    print(f'run it: python {done.folder / "run.py"} "Once upon a time", or gptworks infer {done.folder} --prompt ...')
    return 0
