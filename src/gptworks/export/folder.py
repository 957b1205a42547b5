"""A model into a folder that needs nothing of ours: weights, graph, tokenizer, info, README and a script that runs."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptworks import __version__, json_text
from gptworks.architecture import require_known
from gptworks.checkpoint import staging
from gptworks.checkpoint.pretrained import Pretrained
from gptworks.checkpoint.systems.contract import Opened
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, UsageError
from gptworks.export import registry, tokenizer_files
from gptworks.export.contract import Source, Target, Written
from gptworks.model.dtypes import DTYPES
from gptworks.tokenizer import Tokenizer

INFO_SUFFIX = ".info.json"
_STEM = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Exported:
    folder: Path
    target: Target
    weights: str
    files: list[Path]
    info: dict[str, Any]
    notes: list[str]


def export(
    model: str | Path,
    to: str,
    out: str | Path,
    *,
    weights: str | None = None,
    name: str = "model",
    tokenizer: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Exported:
    """Nothing appears at `out` before all of it is there.

    `model`: a checkpoint of any known system, or the name of one. `name`: what files are called before their suffix.
    `tokenizer`: for weights that have none beside them. `overrides`: numbers of the model that its files do not carry.

    >>> export("runs/stories", "onnx", "stories-onnx", weights="int8")   # doctest: +SKIP
    """
    target, folder = registry.target(to), Path(out)
    kind = weights or target.WEIGHTS[0]
    if kind not in target.WEIGHTS:
        raise UsageError(f"--weights {kind}: --to {to} has {', '.join(target.WEIGHTS)}.")
    if not _STEM.fullmatch(name):
        raise UsageError(f"--name {name}: needs letters, digits, '.', '-' and '_' only; it begins file names.")
    staging.require_free(folder, is_folder=True)
    target.require()
    pretrained = Pretrained.open(model, tokenizer=tokenizer, shape=overrides)
    opened, words = pretrained.weights, pretrained.require_tokenizer()
    require_known(opened.model, target.KNOWN, f"--to {to}: its {target.TITLE.partition(',')[0]}", UsageError)
    with staging.staged(folder, is_folder=True) as staged:
        source = _source(opened, words, kind)
        tokenizer_files.write(staged, words)
        written = target.write(staged, name, source, kind)
        (staged / "run.py").write_text(_script(target, name, source), encoding="utf-8")
        (staged / "README.md").write_text(_readme(target, name, source, kind, written), encoding="utf-8")
        info = _info(target, source, kind, written, staged)
        (staged / f"{name}{INFO_SUFFIX}").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    return Exported(folder, target, kind, sorted(folder.iterdir()), info, [*opened.notes, *source.notes])


def _source(opened: Opened, tokenizer: Tokenizer, kind: str) -> Source:
    """Rows beyond the tokenizer are padding for the sake of training; a runtime could choose one of them."""
    cfg, wanted = opened.model, tokenizer.vocab_size
    tensors, notes = dict(opened.tensors), []
    if wanted < cfg.vocab_size:
        for name in ("wte.weight", "head.weight"):
            if name in tensors:
                tensors[name] = tensors[name].first_rows(wanted)
        notes.append(f"{cfg.vocab_size - wanted:,} rows of the vocabulary that no token has were left out")
    cast = {name: each.cast(DTYPES.get(kind, torch.float32)) for name, each in tensors.items()}
    return Source(cfg.model_copy(update={"vocab_size": wanted}), cast, tokenizer, notes)


def _script(target: Target, name: str, source: Source) -> str:
    imports, encode, decode = tokenizer_files.script(source.tokenizer)
    more, lines = target.script(name, source)
    return "\n".join(
        [
            '"""Continues a text greedily: python run.py "Once upon a time" 40"""',
            "import os, sys",
            *dict.fromkeys([*more, *imports]),
            "",
            "os.chdir(os.path.dirname(os.path.abspath(__file__)))",
            "text, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20",
            *encode,
            *lines,
            f"print({decode})",
            "",
        ]
    )


def _readme(target: Target, name: str, source: Source, kind: str, written: Written) -> str:
    cfg, end = source.model, source.tokenizer.eod_token
    packages = " ".join([*target.RUNTIME, *tokenizer_files.packages(source.tokenizer)])
    shapes = [f"- input `{key}`: {value}" for key, value in written.inputs.items()]
    shapes += [f"- output `{key}`: {value}" for key, value in written.outputs.items()]
    first_layer = [line for line in shapes if not re.search(r"\.[1-9]\d*\.", line)]  # of the layers the first one
    more = ["", "The other layers have the same with .1, .2, ..."] if len(first_layer) < len(shapes) else []
    return "\n".join(
        [
            f"# GPT of {cfg.num_layers} layers of {cfg.hidden_size}: {target.TITLE}",
            "",
            "```",
            f"pip install {packages}",
            'python run.py "Once upon a time" 40',
            "```",
            "",
            f"Weights: {kind}. {cfg.vocab_size:,} tokens, at most {cfg.max_positions:,} in a text"
            + (f"; `{end}` ends one." if end else "."),
            f"`{name}{INFO_SUFFIX}` lists parameters, files and their sha256. `gptworks infer` runs the folder too.",
            *(["", *first_layer, *more] if first_layer else []),
            "",
        ]
    )


def _info(target: Target, source: Source, kind: str, written: Written, staged: Path) -> dict[str, Any]:
    return {
        "gptworks": __version__,
        "target": target.NAME,
        "weights": kind,
        "model": source.model.model_dump(),
        "tokenizer": {"sha256": source.tokenizer.identity, "eod_id": source.tokenizer.eod_id},
        "inputs": written.inputs,
        "outputs": written.outputs,
        "parameters": written.parameters,
        "files": {path.name: _described(path) for path in sorted(staged.iterdir())},
    }


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_info(folder: Path) -> dict[str, Any] | None:
    """What `export` wrote down, if it is there."""
    for path in sorted(folder.glob(f"*{INFO_SUFFIX}")):
        try:
            info = json_text.loads(path.read_text(encoding="utf-8"))
            ModelConfig.model_validate(info["model"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: not the info of an export ({error}). Export the model again.") from None
        return dict(info)
    return None
