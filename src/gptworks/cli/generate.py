"""gptworks generate: text from a checkpoint."""

import argparse
import json
from pathlib import Path

from gptworks.cli import options

HELP = "text from a checkpoint"

# option -> key of the generate section
_SETTINGS = ("strategy", "max_new_tokens", "temperature", "top_k", "top_p", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="run folder, checkpoint, or Hugging Face GPT-2 folder"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", action="append", help="repeatable")
    source.add_argument("--prompts", metavar="FILE", help="one prompt per line")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: the run's generate section, else 64")
    parser.add_argument("--strategy", choices=["greedy", "sampling"], help="likewise, else sampling")
    parser.add_argument("--temperature", type=float, metavar="X", help="likewise, else 1.0")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (likewise, else all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens up to this mass (likewise, else 1)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="likewise, else 1234")
    options.add_device_option(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from gptworks.checkpoint import folder
    from gptworks.checkpoint.pretrained import Pretrained, PretrainedGPT
    from gptworks.config.load import from_dict
    from gptworks.generate.engine import generate

    given = folder.config_of(Path(args.model)).get("generate", {})
    given |= {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    settings = from_dict({"generate": given}, "generate").generate
    prompts = args.prompt or _read_prompts(Path(args.prompts))
    Pretrained.open(args.model).require_tokenizer()
    model = PretrainedGPT.from_pretrained(args.model, device=args.device)
    texts = generate(model, prompts, **settings.model_dump())
    for prompt, text in zip(prompts, texts, strict=True):
        if args.json:
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
        else:
            print(prompt + text)
    return 0


def _read_prompts(path: Path) -> list[str]:
    from gptworks.errors import UsageError

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read ({error}). Needed: a UTF-8 text file with one prompt per line."
        ) from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"{path}: no prompt in it. Needed: one prompt per line.")
    return prompts
