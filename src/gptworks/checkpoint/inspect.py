"""What is this checkpoint? Answered from names, shapes and settings; weights are not read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.checkpoint.rules import HeadsUnknownError, OrderUnknownError
from gptworks.checkpoint.systems import registry
from gptworks.checkpoint.systems.contract import Opened
from gptworks.plan import sizes


@dataclass(frozen=True)
class Report:
    opened: Opened
    title: str
    heads_known: bool

    def as_dict(self) -> dict[str, Any]:
        opened, matched = self.opened, self.opened.matched
        model = opened.model.model_dump()
        if not self.heads_known:
            model["num_heads"] = None
        return {
            "kind": "checkpoint",
            "path": str(opened.path),
            "system": opened.system,
            "title": self.title,
            "model": model,
            "parameters": sizes.num_parameters(opened.model),
            "dtype": sorted({str(each.dtype).removeprefix("torch.") for each in opened.tensors.values()}),
            "bytes": sum(each.num_bytes for each in opened.tensors.values()),
            "about": opened.about,
            "tensors": {
                name: {"shape": list(each.shape), "dtype": str(each.dtype).removeprefix("torch.")}
                for name, each in opened.tensors.items()
            },
            "missing": matched.missing,
            "unexpected": matched.unexpected,
            "misshapen": matched.misshapen,
            "files": [str(file) for file in opened.files],
            "remarks": opened.notes,
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, shape, type); what all blocks have alike is one row."""
        layers_of: dict[tuple[str, str, str], list[int]] = {}
        for name, each in self.opened.tensors.items():
            number = re.match(r"blocks\.(\d+)\.", name)
            folded = re.sub(r"^blocks\.\d+\.", "blocks.*.", name)
            key = (folded, str(list(each.shape)), str(each.dtype).removeprefix("torch."))
            layers_of.setdefault(key, []).append(int(number[1]) if number else -1)
        return [(name.replace("*", _span(layers)), shape, dtype) for (name, shape, dtype), layers in layers_of.items()]


def inspect(path: Path, overrides: Mapping[str, object] | None = None, *, name: str | None = None) -> Report:
    overrides = dict(overrides or {})
    heads_known = order_known = True
    while True:
        try:
            opened = registry.open_any(path, overrides, name=name)
        except HeadsUnknownError:
            overrides["num_heads"], heads_known = 1, False  # one divides everything, and no shape depends on it
        except OrderUnknownError:
            overrides["qkv_version"], order_known = 0, False  # nor on this
        else:
            break
    if not order_known:
        opened.about.update(checkpoint_version="not stored", order_of_qkv="not known (-o qkv_version=N states it)")
    return Report(opened, registry.system(opened.system).TITLE, heads_known)


def _span(layers: list[int]) -> str:
    ordered = sorted(layers)
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    return "{" + ",".join(map(str, ordered)) + "}"
