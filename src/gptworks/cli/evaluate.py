"""gptworks eval: how well a model predicts text it has not seen."""

import argparse
import json
from typing import Any

from gptworks.cli import options

HELP = "held-out loss, perplexity and bits per byte"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="run folder, checkpoint, or Hugging Face GPT-2 folder"
    )
    parser.add_argument("--task", choices=["heldout"], default="heldout", help="what to measure")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a store made by `gptworks prepare`")
    parser.add_argument(
        "--split", choices=["train", "held-out", "test", "all"], default="held-out", help="which documents"
    )
    parser.add_argument(
        "--shares", metavar="A,B,C", help="shares of the split (default: those the model was trained with)"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="samples per forward pass")
    parser.add_argument("--baselines", action="store_true", help="unigram, bigram and gzip beside it")
    options.add_device_option(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    result = _evaluate(args)
    if args.json:
        print(json.dumps(result))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{args.split} text of {args.data}: {result['tokens']:,} tokens, {result['bytes']:,} bytes")
    table.add_column("model")
    for name in ("loss", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        shown = [
            f"{row[key]:.4f}" if row.get(key) is not None else "" for key in ("loss", "perplexity", "bits_per_byte")
        ]
        table.add_row(row["model"], *shown)
    Console().print(table)
    return 0


def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from gptworks.checkpoint.pretrained import PretrainedGPT
    from gptworks.config.load import from_dict
    from gptworks.data.dataset import Dataset
    from gptworks.errors import UsageError
    from gptworks.evaluate.heldout import held_out_loss

    if args.batch_size < 1:
        raise UsageError(f"--batch-size: got {args.batch_size}; needs 1 or more.")
    model = PretrainedGPT.from_pretrained(args.model, device=args.device)
    part = {"train": "train", "held-out": "held_out", "test": "test", "all": "train"}[args.split]
    data: dict[str, Any] = {"path": args.data, "seq_len": model.cfg.max_positions}
    data |= _data_section_of_run(args.model)
    if args.split == "all":
        data["split"] = "1,0,0"
    elif args.shares:
        data["split"] = args.shares
    config = from_dict({"model": model.cfg.model_dump(), "data": data | {"path": args.data}}, "eval").data
    dataset = Dataset(config, vocab_size=model.cfg.vocab_size)
    if model.tokenizer and dataset.tokenizer:
        dataset.tokenizer.require(model.tokenizer.identity, what=args.model)
    tokenizer = dataset.tokenizer or model.tokenizer
    measured = held_out_loss(
        model,
        dataset.samples(part),
        dataset.borders,
        micro_size=args.batch_size,
        device=model.wpe.weight.device,
        byte_lengths=tokenizer.byte_lengths if tokenizer else None,
    )
    rows = [
        {
            "model": args.model,
            "loss": measured.loss,
            "perplexity": measured.perplexity,
            "bits_per_byte": measured.bits_per_byte,
        }
    ]
    if args.baselines:
        rows += _baselines(dataset, part, tokenizer, measured.text_bytes)
    return {
        "task": args.task,
        "split": args.split,
        "tokens": measured.tokens,
        "bytes": measured.text_bytes,
        "rows": rows,
    }


def _data_section_of_run(model: str) -> dict[str, Any]:
    """How a run of ours cut its data, so that held-out means the same as in training."""
    from pathlib import Path

    from gptworks.checkpoint import folder, manifest
    from gptworks.errors import CheckpointError

    try:
        config = manifest.read(folder.find(Path(model))).config
    except CheckpointError:
        return {}  # a folder from elsewhere
    return {key: value for key, value in config["data"].items() if key not in {"path", "weights", "tokenizer"}}


def _baselines(dataset, part: str, tokenizer, text_bytes: int) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]
    import numpy as np

    from gptworks.data.windows import Windows
    from gptworks.errors import UsageError
    from gptworks.evaluate import baselines

    if len(dataset.stores) != 1 or tokenizer is None or not text_bytes:
        raise UsageError("--baselines: needs one store of plain text with a known byte-level tokenizer.")
    train, measured = (dataset.samples(name).sources[0] for name in ("train", part))
    if not isinstance(train, Windows) or not isinstance(measured, Windows):
        raise UsageError("--baselines: needs a store of plain text, not of prompts and completions.")
    tokens = np.asarray(measured.tokens[: len(measured) * measured.seq_len + 1])
    vocab_size = tokenizer.vocab_size
    bits = {
        "unigram (tokens)": baselines.unigram_bits(train.tokens, tokens[1:], vocab_size),
        "bigram (tokens)": baselines.bigram_bits(train.tokens, tokens[:-1], tokens[1:], vocab_size),
        "gzip -9": baselines.gzip_bits(tokenizer.decode(tokens[1:])),
    }
    return [{"model": name, "bits_per_byte": value / text_bytes} for name, value in bits.items()]
