"""GGUF with matrices in 8 bits: a quarter of the size, and what llama.cpp is fastest with on a CPU."""

from pathlib import Path

from gptworks.checkpoint.formats.ggml_blocks import Q8_0
from gptworks.checkpoint.systems import gguf
from gptworks.checkpoint.systems.contract import SplitSpec, Weights

NAME = "gguf-q8_0"
TITLE = "GGUF file of llama.cpp, 8 bits"
CUTS = False
SUFFIX = gguf.SUFFIX
TOLERANCE = 0.05  # measured on three trained models: 0.003 to 0.01
recognise = gguf.recognise
open = gguf.open


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    return gguf.write(path, weights, cut, blocks=Q8_0)
