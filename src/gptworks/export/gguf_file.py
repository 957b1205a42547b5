"""gguf: one file for llama.cpp, which carries its tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptworks.checkpoint.formats import gguf_file as gguf_bytes
from gptworks.checkpoint.systems import gguf, registry
from gptworks.checkpoint.systems.contract import SplitSpec
from gptworks.config.schema import ModelConfig
from gptworks.errors import UsageError
from gptworks.export.contract import Source, Written, described, import_or_explain

NAME = "gguf"
TITLE = "GGUF file, for llama.cpp"
WEIGHTS = ("fp32", "fp16", "int8")
KNOWN = gguf.KNOWN
RUNTIME = ("llama-cpp-python",)
_SYSTEMS = {"fp32": "gguf", "fp16": "gguf", "int8": "gguf-q8_0"}


def require() -> None:
    registry.system(_SYSTEMS["fp32"])


def write(folder: Path, stem: str, source: Source, weights: str) -> Written:
    file = folder / f"{stem}.gguf"
    system = registry.system(_SYSTEMS[weights])
    system.write(file, source.weights(), SplitSpec())
    stored = gguf_bytes.read(file).tensors  # under the file's own names
    return Written([described(name, each.shape, each.dtype) for name, each in stored.items()])


def script(stem: str, source: Source) -> tuple[list[str], list[str]]:
    return (
        ["from llama_cpp import Llama"],
        [
            f'model = Llama("{stem}.gguf", n_ctx=0, verbose=False)',
            "new = []",
            "for token in model.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):",
            f"    if len(new) == count or new[-1:] == [{source.tokenizer.eod_id}]:",
            "        break",
            "    new.append(token)",
        ],
    )


def recognise(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.gguf"))), None)


def open(file: Path, model: ModelConfig) -> "_Runner":
    return _Runner(file)


class _Runner:
    def __init__(self, file: Path) -> None:
        llama_cpp = import_or_explain("llama_cpp", f"{file}: a GGUF file", "llama")
        try:
            self.llama: Any = llama_cpp.Llama(str(file), n_ctx=0, verbose=False)  # 0: as long as the model's own
        except (ValueError, RuntimeError, AssertionError) as error:
            raise UsageError(f"{file}: llama.cpp cannot read it ({error}). Export it again.") from None

    def continue_greedily(self, tokens: Sequence[int], max_new_tokens: int, eod_id: int | None) -> list[int]:
        new: list[int] = []
        for token in self.llama.generate(list(tokens), top_k=1, temp=0.0, repeat_penalty=1.0):
            new.append(int(token))
            if len(new) == max_new_tokens or token == eod_id:
                break
        return new
