"""The next token of a few rows on a CPU: the whole model in one C++ function, which is built at first use.

torch multiplies a single row at half the speed of the memory (with one thread), and the hundreds of small operations
between the products cost as much again. Where there is no compiler the model is called as usual; `why_not()` tells why.
"""

import ctypes
import functools
import hashlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gptworks import architecture, child_process, cpu, names
from gptworks.compilers import cxx_compilers
from gptworks.config.schema import ModelConfig
from gptworks.model.cache import KVCache
from gptworks.model.gpt import GPT, Attention, Block, CoreAttention, FeedForward, LayerNorm, Linear
from gptworks.model.inference import WEIGHTS, StoredEmbedding, StoredLinear, StoredMatrix, store_weights
from gptworks.model.loss import LinearCrossEntropy

KNOWN = architecture.GPT2  # the variants that the function computes
MAX_ROWS = 16  # with more of them torch's products are as fast
OFF = "GPTWORKS_KERNELS"  # "off" in the environment: torch alone
# Not linked with OpenMP: the function shares the threads of the OpenMP that torch has loaded.
_FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC")
_SOURCE = Path(__file__).with_suffix(".cpp")
_GELUS = {"tanh": 0, "erf": 1, "sigmoid": 2}
_HUGE, _MADV_COLLAPSE = 2 * 2**20, 25  # linux/mman.h, since Linux 6.1
_LANES = 8  # as in the source
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("values", "scale", "bias")),
        *((name, _NUMBER) for name in ("outputs", "depth", "width")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("ln1_weight", "ln1_bias", "ln2_weight", "ln2_bias")),
        *((name, _Matrix) for name in ("qkv", "out", "up", "down")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", _POINTER),
        *((name, _Matrix) for name in ("embedding", "head")),
        *((name, _POINTER) for name in ("positions", "ln_f_weight", "ln_f_bias")),
        *((name, _NUMBER) for name in ("num_layers", "hidden", "num_heads", "head_size", "ffn", "gelu")),
        ("eps", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("tokens", "lengths", "keys", "values", "logits", "work")),
        *((name, _NUMBER) for name in ("rows", "cache_len", "threads")),
    ]


class Decoder:
    """Reads one more token of each row, as `model(tokens, cache=cache, last_only=True)` does."""

    def __init__(self, model: GPT) -> None:
        self.cfg = cfg = model.cfg
        self._kept: list[Tensor] = []  # what the function points at must live as long as this
        layers = (_Layer * cfg.num_layers)(*(self._layer(block) for block in model.blocks.values()))
        self._layers = layers
        self._model = _Model(
            ctypes.addressof(layers),
            self._matrix(model.wte),
            self._matrix(model.head),
            *(self._vector(v) for v in (model.wpe.weight, model.ln_f.weight, model.ln_f.bias)),
            cfg.num_layers,
            cfg.hidden_size,
            cfg.num_heads,
            cfg.head_size,
            cfg.ffn_size,
            _GELUS[cfg.gelu],
            cfg.layernorm_eps,
        )

    @classmethod
    def of(cls, model: nn.Module) -> "Decoder | None":
        """Only for a whole model in fp32 on the CPU whose modules are those we know; else None."""
        if not isinstance(model, GPT):
            return None
        matrices = {id(module.values) for module in model.modules() if isinstance(module, StoredMatrix)}
        tensors = [*model.parameters(), *model.buffers()]
        fits = (
            not model.training
            and type(model).forward is GPT.forward
            and not architecture.unknown(model.cfg, KNOWN)
            and len(model.blocks) == model.cfg.num_layers
            and model.compute_dtype == torch.float32
            and all(type(module) in _KINDS for module in model.modules() if module is not model)
            and not any(_has_more(module) for module in model.modules())
            and all(type(t.data) is Tensor and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
            and all(t.dtype == torch.float32 for t in tensors if id(t) not in matrices)
        )
        return cls(model) if fits and why_not() is None else None

    def __call__(self, tokens_B1: Tensor, cache: KVCache) -> Tensor:
        return self.decode(_function(), tokens_B1, cache)

    def decode(self, function: Any, tokens_B1: Tensor, cache: KVCache) -> Tensor:
        cfg, rows = self.cfg, len(tokens_B1)
        logits_BV = torch.empty(rows, cfg.vocab_size)
        in_lanes = -(-rows // _LANES) * _LANES * max(cfg.hidden_size, cfg.ffn_size)
        work = torch.empty(rows * (6 * cfg.hidden_size + cfg.ffn_size + cfg.num_heads * cache.length) + in_lanes)
        step = _Step(
            *(
                t.data_ptr()
                for t in (tokens_B1, cache.lengths_B, cache.keys_LBNSH, cache.values_LBNSH, logits_BV, work)
            ),
            rows,
            cache.length,
            torch.get_num_threads(),
        )
        function(ctypes.byref(self._model), ctypes.byref(step))
        cache.advance(1)
        return logits_BV

    def suits(self, tokens_BT: Tensor, cache: KVCache) -> bool:
        """One token of few rows, each of which has room for it."""
        return (
            tokens_BT.shape[1] == 1
            and len(tokens_BT) <= MAX_ROWS
            and cache.counts_B is None
            and cache.used < min(cache.length, self.cfg.max_positions)
            and cache.keys_LBNSH.dtype == torch.float32
            and cache.keys_LBNSH.is_contiguous()
            and cache.values_LBNSH.is_contiguous()
        )

    def _layer(self, block: Any) -> _Layer:
        norms = (block.ln1.weight, block.ln1.bias, block.ln2.weight, block.ln2.bias)
        matrices = (block.attn.qkv, block.attn.out, block.mlp.up, block.mlp.down)
        return _Layer(*(self._vector(v) for v in norms), *(self._matrix(m) for m in matrices))

    def _matrix(self, module: Any) -> _Matrix:
        is_stored = isinstance(module, StoredLinear | StoredEmbedding)
        values, scale = (module.matrix.values, module.matrix.scale) if is_stored else (module.weight, None)
        pointers = (self._vector(v) for v in (values, scale, getattr(module, "bias", None)))
        return _Matrix(*pointers, *values.shape, values.element_size())

    def _vector(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        _use_huge_pages(tensor)
        return tensor.data_ptr()


def _has_more(module: nn.Module) -> bool:
    """Something hung on it that a call would do besides."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


# The modules whose part of the work is in the function; one of any other type is left to torch.
_KINDS = {
    *(nn.Embedding, nn.Dropout, nn.ModuleDict),
    *(Block, Attention, CoreAttention, FeedForward, LayerNorm, Linear, LinearCrossEntropy),
    *(StoredMatrix, StoredLinear, StoredEmbedding),
}


def why_not(model: ModelConfig | None = None) -> str | None:
    """The reason why torch computes alone, this model or any; None where the function is in use."""
    if model is not None and (found := architecture.unknown(model, KNOWN)):
        return f"the C++ function does not know {found}"
    return _loaded()[1]


def _function() -> Any:
    return _loaded()[0]


@functools.cache
def _loaded() -> tuple[Any, str | None]:
    if os.environ.get(OFF) == "off":
        return None, f"{OFF}=off"
    reasons = []
    for compiler in cxx_compilers():
        try:
            library = _built(compiler)
            try:
                return _open(library), None
            except OSError:  # cut short or overwritten since it was built
                library.unlink(missing_ok=True)
                return _open(_built(compiler)), None
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{compiler}: {_reason(error)}")
    return None, "; ".join(reasons) or "no C++ compiler found (g++)"


def _built(compiler: str) -> Path:
    """The library, from $GPTWORKS_HOME/kernels or built anew (about two seconds)."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    key = "\n".join([_SOURCE.read_text(encoding="utf-8"), *_FLAGS, version, _processor()])
    folder = names.home() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_ours(folder)  # what lies there is run
    library = folder / f"{_SOURCE.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    refused = library.with_suffix(".refused")
    if library.is_file():
        return library
    if refused.is_file():
        raise OSError(refused.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(dir=folder) as work:
        compiled, linked = Path(work) / "a.o", Path(work) / "a.so"
        for command in ([*_FLAGS, "-c", _SOURCE, "-o", compiled], ["-shared", compiled, "-o", linked]):
            subprocess.run([compiler, *map(str, command)], capture_output=True, text=True, check=True, timeout=300)
        if died := child_process.run(lambda: _decode_a_little(_open(linked))).ended_by:
            # Written down: the next process need not build it again to know.
            refused.write_text(f"what it builds dies of {died} on {cpu.name()}", encoding="utf-8")
            raise OSError(refused.read_text(encoding="utf-8"))
        linked.replace(library)  # in one go: another process may be waiting for it
    return library


def _require_ours(folder: Path) -> None:
    """Nobody else may put a library there."""
    if not hasattr(os, "getuid"):
        return  # not a POSIX system
    about = folder.stat()
    if about.st_uid not in (os.getuid(), 0) or about.st_mode & stat.S_IWOTH:
        raise PermissionError(
            f"{folder} belongs to user {about.st_uid} and has mode {stat.filemode(about.st_mode)}: others could have "
            "put a library there. Needed: a folder that only you can write (chmod go-w), or another GPTWORKS_HOME"
        )


def _processor() -> str:
    """-march=native means another program on another processor, and home folders are shared between machines."""
    return " ".join(cpu.flags()) or cpu.name()


def _open(library: Path) -> Any:
    try:
        function = ctypes.CDLL(str(library)).gptworks_decode
    except AttributeError as error:
        raise OSError(f"{library}: {error}") from None
    function.argtypes = [ctypes.POINTER(_Model), ctypes.POINTER(_Step)]
    function.restype = None
    return function


def _decode_a_little(function: Any) -> Iterator[str]:
    """In a child: -march=native believes what the processor advertises, and it may not have it."""
    torch.set_num_threads(1)  # those of the process that was copied are not here
    for kind in WEIGHTS:
        model = GPT(ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=32, max_positions=8)).eval()
        store_weights(model, kind)
        Decoder(model).decode(function, torch.zeros(2, 1, dtype=torch.long), model.new_cache(2, 8))
        yield kind


def _use_huge_pages(tensor: Tensor) -> None:
    """Weights are read from end to end: with pages of 2 MB a fifth to a third faster than with pages of 4 KB."""
    if sys.platform != "linux" or tensor.nbytes < _HUGE:
        return
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    length = (tensor.data_ptr() + tensor.nbytes - first) // _HUGE * _HUGE
    with suppress(AttributeError):  # where the kernel cannot, nothing happens
        ctypes.CDLL(None).madvise(_POINTER(first), ctypes.c_size_t(length), _MADV_COLLAPSE)


def _reason(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
