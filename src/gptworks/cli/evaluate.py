"""gptworks eval: how well a model predicts text it has not seen."""

import argparse
import json
from pathlib import Path
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

    shares = ",".join(f"{share:g}" for share in result["shares"])
    where = f"{args.split} text of {args.data} (shares {shares})"
    print(f"{where}: {result['tokens']:,} tokens, {result['bytes']:,} bytes")
    table = Table()
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
    from gptworks.checkpoint import folder
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
    # A run of ours cut its data in a certain way: held-out means the same here as in training.
    trained = folder.config_of(Path(args.model))
    cut = trained.get("data", {})
    data |= {key: value for key, value in cut.items() if key not in {"path", "held_out_path", "weights", "tokenizer"}}
    if args.split == "held-out" and cut.get("held_out_path") and args.data in cut.get("path", ()):
        raise UsageError(
            f"--split held-out: the run held out text of its own and trained on this share of {args.data} too. "
            f"Evaluate what it held out: --data {cut['held_out_path'][0]} --split all."
        )
    if args.split == "all":
        data["split"] = "1,0,0"
    elif args.shares:
        data["split"] = args.shares
    config = from_dict({"model": model.cfg.model_dump(), "data": data | {"path": args.data}}, "eval").data
    # With an order of another system the seed decides where the samples begin.
    seed = trained.get("train", {}).get("seed", 0)
    dataset = Dataset(config, vocab_size=model.cfg.vocab_size, seed=seed)
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
        rows += _baselines(dataset, part, tokenizer)
    return {
        "task": args.task,
        "split": args.split,
        "shares": list(config.split),
        "tokens": measured.tokens,
        "bytes": measured.text_bytes,
        "rows": rows,
    }


def _baselines(dataset, part: str, tokenizer) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]
    from gptworks.data.windows import Windows
    from gptworks.errors import UsageError
    from gptworks.evaluate import baselines

    if part == "train":
        raise UsageError(
            "--baselines: they learn from the training part, so measure another one (--split held-out or test)."
        )
    if dataset.has_foreign_order:
        raise UsageError(
            f"--baselines: need text in the order of the store, but the model was trained with data.order: "
            f"{dataset.cfg.order}, which is evaluated as it cuts its samples."
        )
    if len(dataset.stores) != 1 or tokenizer is None or tokenizer.byte_lengths is None:
        raise UsageError("--baselines: needs one store of plain text with a known byte-level tokenizer.")
    train, measured = (dataset.samples(name).sources[0] for name in ("train", part))
    if not isinstance(train, Windows) or not isinstance(measured, Windows):
        raise UsageError("--baselines: needs a store of plain text, not of prompts and completions.")
    tokens = measured.tokens[measured.first : measured.first + len(measured) * measured.seq_len + 1]
    learned = train.tokens[train.first : train.end]
    vocab_size = tokenizer.vocab_size
    text_bytes = int(tokenizer.byte_lengths[tokens[1:]].sum())
    text = tokenizer.decode(tokens[1:][tokens[1:] != tokenizer.eod_id])
    bits = {
        "unigram (tokens)": baselines.unigram_bits(learned, tokens[1:], vocab_size),
        "bigram (tokens)": baselines.bigram_bits(learned, tokens[:-1], tokens[1:], vocab_size),
        "gzip -9": baselines.gzip_bits(text),
    }
    return [{"model": name, "bits_per_byte": value / text_bytes} for name, value in bits.items()]
