"""What somebody asks to be measured, in the words of every task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    task: str
    data: str
    protocol: str = ""  # empty = the task's first
    settings: Mapping[str, Any] = field(default_factory=dict)  # the task's own options; those left out have defaults
    limit: int = 0  # samples, windows or passages; 0 = all
    batch_size: int = 8
    device: str = "auto"
    weights: str = "fp32"  # how matrices are kept: fp32, bf16, int8 or int4
    tokenizer: str | None = None  # instead of that beside the weights
    shape: Mapping[str, object] = field(default_factory=dict)  # of the model, where its files do not say
    per_document: Path | None = None
    published: bool = False  # others' figures beside the result
