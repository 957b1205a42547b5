"""hf: the folder that transformers reads, and that we read ourselves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gptworks.checkpoint.rules import split
from gptworks.checkpoint.systems import huggingface, huggingface_families
from gptworks.checkpoint.systems.huggingface_families import family_of
from gptworks.config.schema import ModelConfig
from gptworks.export.contract import Source, Written, described, import_or_explain

NAME = "hf"
TITLE = "Hugging Face folder, for transformers"
WEIGHTS = ("fp32", "fp16", "bf16")
KNOWN = huggingface_families.KNOWN
RUNTIME = ("transformers", "torch")


def require() -> None:
    """Nothing: the format is ours as well."""


def write(folder: Path, stem: str, source: Source, weights: str) -> Written:
    huggingface.write(folder, source.weights())
    words = source.tokenizer
    begin = words.eod_id if words.bos_id is None else words.bos_id
    settings = {"eos_token_id": words.eod_id, "bos_token_id": begin, "pad_token_id": words.eod_id}
    text = json.dumps({name: value for name, value in settings.items() if value is not None}, indent=2)
    (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    theirs = split(family_of(source.model).table, source.tensors, source.model)
    return Written(
        [described(name, each.shape, each.dtype) for name, each in theirs.items()],
        {"input_ids": "int64 [batch, length]"},
        {"logits": f"[batch, length, {source.model.vocab_size}]"},
    )


def script(stem: str, source: Source) -> tuple[list[str], list[str]]:
    return (
        ["import torch", "from transformers import AutoModelForCausalLM"],
        [
            'model = AutoModelForCausalLM.from_pretrained(".")',
            "given = torch.tensor([ids])",
            "found = model.generate(given, attention_mask=given * 0 + 1, max_new_tokens=count, do_sample=False)",
            "new = found[0, len(ids) :].tolist()",
        ],
    )


def recognise(folder: Path) -> Path | None:
    return folder / "config.json" if huggingface.recognise(folder) else None


def open(file: Path, model: ModelConfig) -> "_Runner":
    return _Runner(file.parent)


class _Runner:
    def __init__(self, folder: Path) -> None:
        transformers = import_or_explain("transformers", f"{folder}: a Hugging Face folder", "export")
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()

    def continue_greedily(self, tokens: Sequence[int], max_new_tokens: int, eod_id: int | None) -> list[int]:
        prompt = torch.tensor([list(tokens)])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=eod_id,
            pad_token_id=eod_id,
        )
        return [int(token) for token in output[0, len(tokens) :]]
