"""gptworks: a run folder or one of its training checkpoints. What is written is the portable form, a Hugging Face
folder: a training checkpoint without its optimizer could not be continued."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gptworks import run_paths
from gptworks.checkpoint import folder as folders
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import Matched, conflicts_with, our_shapes, require_layers, settle
from gptworks.checkpoint.systems import huggingface
from gptworks.checkpoint.systems.contract import EXACT, Opened, model_config
from gptworks.parallel.slices import Region, Slice, size_of

NAME = "gptworks"
TITLE = "gptworks run or training checkpoint"
CUTS = False
SUFFIX = ""
TOLERANCE = EXACT
write = huggingface.write


def recognise(path: Path) -> bool:
    return run_paths.is_ours(path)


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    if not recognise(path) and huggingface.recognise(path):  # what is written here
        return huggingface.open(path, overrides)
    step = folders.find(path)
    manifest = manifests.read(step)
    about = {"step": manifest.step, "layout": manifest.layout, "samples": manifest.consumed}
    portable = step / folders.PORTABLE
    if (portable / "config.json").is_file():
        opened = huggingface.open(portable, overrides)
        return replace(opened, path=step, system=NAME, about=about)
    from gptworks.checkpoint.formats import dcp  # slow to import, and only needed where there is no portable folder

    values = manifest.config.get("model", {})
    model = model_config(settle(values, overrides, str(step)), str(step))
    state = step / folders.STATE
    shapes = dcp.shapes(state)

    def stored(name: str, shape: torch.Size) -> LazyTensor:
        def read_region(region: Region) -> Tensor:
            """Read only those of the slices that ranks saved that have something of the region."""
            offsets = torch.Size(each.start for each in region)
            piece = Slice(torch.empty(size_of(region)), offsets, shape)
            dcp.load_into(state, {f"model.{name}": piece})
            return piece.here

        everything = tuple(slice(0, size) for size in shape)
        return LazyTensor(shape, torch.float32, lambda: read_region(everything), read_region)

    require_layers(model.num_layers, [shapes], str(step))
    needed = our_shapes(model)
    present = {name: shape for name, shape in needed.items() if f"model.{name}" in shapes}
    misshapen = [
        f"'{name}' has shape {list(shapes[f'model.{name}'])}, needed {list(shape)}"
        for name, shape in present.items()
        if shapes[f"model.{name}"] != shape
    ]
    return Opened(
        step,
        NAME,
        model,
        Matched(
            {name: stored(name, shape) for name, shape in present.items()},
            [name for name in needed if name not in present],
            [],
            misshapen,
        ),
        about=about,
        files=sorted(file for file in state.rglob("*") if file.is_file()),
        tokenizer=step / folders.TOKENIZER,
        conflicts=conflicts_with(values, overrides),
    )
