"""Tokens of many texts through a GPT on a CPU, in one C++ function (`kernels/`).

torch multiplies a single row at half the speed of the memory (with one thread), and the hundreds of small operations
between the products cost as much again. Where there is no compiler the model is called as usual; `why_not()` tells why.

Shapes: N tokens, M of them whose logits are wanted, V vocabulary; L layers, B slots of the cache, N heads, S tokens in
a slot, H head size.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gptworks import architecture, cpu
from gptworks.config.schema import ModelConfig
from gptworks.errors import UsageError
from gptworks.generate import kernel_library
from gptworks.generate.kernel_library import OFF, Functions
from gptworks.model.cache import KVCache
from gptworks.model.gpt import GPT, Attention, Block, CoreAttention, FeedForward, LayerNorm, Linear, RMSNorm
from gptworks.model.inference import WEIGHTS, StoredEmbedding, StoredLinear, StoredMatrix, store_weights
from gptworks.model.loss import LinearCrossEntropy
from gptworks.model.rope import turns_of

__all__ = ["KNOWN", "OFF", "Decoder", "why_not"]
KNOWN = dict(architecture.LLAMA)
MOST_TOKENS = 512  # that are read in one call; more are cut, which changes no number
_GELUS = {"tanh": 0, "erf": 1, "sigmoid": 2}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}  # as in kernels/model.h
_HUGE, _MADV_COLLAPSE = 2 * 2**20, 25  # linux/mman.h, since Linux 6.1
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
Ids = Tensor | Sequence[int]


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _Matrix(ctypes.Structure):
    _fields_ = [*_fields(_POINTER, "values", "scale", "bias"), *_fields(_NUMBER, "outputs", "depth", "type")]


class _Norm(ctypes.Structure):
    _fields_ = _fields(_POINTER, "weight", "bias")


class _Layer(ctypes.Structure):
    _fields_ = [
        *_fields(_Norm, "ln1", "ln2", "q_norm", "k_norm"),
        *_fields(_Matrix, "qkv", "out", "gate", "up", "down"),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", _POINTER),
        *_fields(_Matrix, "embedding", "head"),
        *_fields(_POINTER, "positions", "turns"),
        ("ln_f", _Norm),
        *_fields(_NUMBER, "num_layers", "hidden", "num_heads", "num_kv_heads", "head_size", "ffn", "max_positions"),
        *_fields(_NUMBER, "is_rms", "window", "gelu", "is_apart"),
        ("eps", ctypes.c_float),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "tokens", "slots", "positions", "wanted", "keys", "values", "logits", "work"),
        *_fields(_NUMBER, "num_tokens", "num_wanted", "num_slots", "cache_len", "threads"),
    ]


class Decoder:
    """Reads tokens into the slots of a KV cache.

    What comes out for a token depends, bit for bit, on what its slot holds and on nothing else in the batch: alone or
    among others, in chunks of any size.
    """

    def __init__(self, model: GPT, functions: Functions | None = None, *, is_apart: bool | None = None) -> None:
        """is_apart: whether rows that are multiplied together are far from each other. It changes no number: an Intel
        Xeon reads its memory a fifth to a third faster so; an AMD EPYC was faster without, as far as was measured."""
        self.cfg = cfg = model.cfg
        self._functions = functions or _functions()
        self._kept: list[Tensor] = []  # what the function points at must live as long as this
        self._spare: list[Tensor] = []  # working memory that no call is using
        layers = (_Layer * cfg.num_layers)(*(self._layer(block) for block in model.blocks.values()))
        self._layers = layers
        self._model = _Model(
            ctypes.addressof(layers),
            self._matrix(model.wte),
            self._matrix(model.head),
            self._pointer(None if model.wpe is None else model.wpe.weight),
            self._pointer(_turns(cfg)),
            self._norm(model.ln_f),
            cfg.num_layers,
            cfg.hidden_size,
            cfg.num_heads,
            cfg.num_kv_heads,
            cfg.head_size,
            cfg.ffn_size,
            cfg.max_positions,
            cfg.norm == "rmsnorm",
            cfg.sliding_window,
            _GELUS[cfg.gelu],
            cpu.is_intel() if is_apart is None else is_apart,
            cfg.layernorm_eps,
        )

    @classmethod
    def of(cls, model: nn.Module) -> "Decoder | None":
        """Only for a whole model in fp32 on the CPU whose modules are those we know; else None."""
        if not isinstance(model, GPT):
            return None
        matrices = {id(t) for m in model.modules() if isinstance(m, StoredMatrix) for t in (m.values, m.scale)}
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

    def read(
        self,
        tokens_N: Ids,
        slots_N: Ids,
        positions_N: Ids,
        wanted_M: Ids,
        cache: KVCache,
        out_V: Tensor | None = None,
    ) -> Tensor:
        """Logits [M, V] of the tokens at the places wanted_M; in `out_V`, a flat tensor, where that is large enough.

        Token i belongs to slot slots_N[i] of the cache and stands at positions_N[i] there; those of a slot follow each
        other. Its key and value are written there, and it looks at positions 0 to its own: what is before it has been
        read, now or earlier. Lengths that the cache keeps of its rows are not used and not changed.
        """
        tokens_N, slots_N, positions_N, wanted_M = (
            torch.as_tensor(each, dtype=torch.long).contiguous() for each in (tokens_N, slots_N, positions_N, wanted_M)
        )
        if not len(tokens_N) == len(slots_N) == len(positions_N):
            raise UsageError(
                f"read: got {len(tokens_N)} tokens, {len(slots_N)} slots and {len(positions_N)} positions; "
                "needs one of each for every token."
            )
        if len(wanted_M) and not 0 <= int(wanted_M.min()) <= int(wanted_M.max()) < len(tokens_N):
            raise UsageError(f"read: wanted is {wanted_M.tolist()}; needs places among {len(tokens_N)} tokens.")
        if not self.suits(cache):
            raise UsageError("read: the cache is not in fp32 and contiguous, or not of this model.")
        logits_MV = logits_in(out_V, len(wanted_M), self.cfg.vocab_size)
        for first in range(0, len(tokens_N), MOST_TOKENS):
            part = slice(first, first + MOST_TOKENS)
            here = (wanted_M >= first) & (wanted_M < first + MOST_TOKENS)
            is_all = len(tokens_N) <= MOST_TOKENS
            to_MV = logits_MV if is_all else torch.empty(int(here.sum()), self.cfg.vocab_size)
            ids = (tokens_N[part], slots_N[part], positions_N[part], wanted_M if is_all else wanted_M[here] - first)
            self._read(ids, cache, to_MV)
            if not is_all:
                logits_MV[here] = to_MV
        return logits_MV

    @property
    def instructions(self) -> str:
        """The instruction set that it was built for."""
        return self._functions.instructions

    def suits(self, cache: KVCache) -> bool:
        keys, values = cache.keys_LBNSH, cache.values_LBNSH
        expected = (self.cfg.num_layers, keys.shape[1], self.cfg.num_kv_heads, cache.length, self.cfg.head_size)
        return all(
            each.dtype == torch.float32
            and each.is_contiguous()
            and each.device.type == "cpu"
            and each.shape == expected
            for each in (keys, values)
        )

    def _read(self, ids: tuple[Tensor, ...], cache: KVCache, logits_MV: Tensor) -> None:
        tokens_N, slots_N, positions_N, wanted_M = ids
        batch = _Batch(
            *(t.data_ptr() for t in (*ids, cache.keys_LBNSH, cache.values_LBNSH, logits_MV)),
            None,
            len(tokens_N),
            len(wanted_M),
            cache.keys_LBNSH.shape[1],
            cache.length,
            torch.get_num_threads(),
        )
        model, at = ctypes.byref(self._model), ctypes.byref(batch)
        size = self._functions.work_size(model, at)
        work = self._spare.pop() if self._spare else torch.empty(0, dtype=torch.uint8)
        if work.nbytes < size:
            work = torch.empty(size, dtype=torch.uint8)
        batch.work = work.data_ptr()
        bad = self._functions.read(model, at)
        self._spare.append(work)
        if bad >= 0:
            raise UsageError(
                f"read: token {int(tokens_N[bad])} of slot {int(slots_N[bad])} at position {int(positions_N[bad])}; "
                f"needs a token below {self.cfg.vocab_size}, a slot below {cache.keys_LBNSH.shape[1]} and a "
                f"position below {min(cache.length, self.cfg.max_positions)}, none negative."
            )

    def _layer(self, block: Any) -> _Layer:
        norms = (block.ln1, block.ln2, block.attn.q_norm, block.attn.k_norm)
        matrices = (block.attn.qkv, block.attn.out, block.mlp.gate, block.mlp.up, block.mlp.down)
        return _Layer(*(self._norm(module) for module in norms), *(self._matrix(module) for module in matrices))

    def _norm(self, module: Any) -> _Norm:
        return (
            _Norm()
            if module is None
            else _Norm(self._pointer(module.weight), self._pointer(getattr(module, "bias", None)))
        )

    def _matrix(self, module: Any) -> _Matrix:
        if module is None:
            return _Matrix()
        is_stored = isinstance(module, StoredLinear | StoredEmbedding)
        values, scale = (module.matrix.values, module.matrix.scale) if is_stored else (module.weight, None)
        pointers = (self._pointer(v) for v in (values, scale, getattr(module, "bias", None)))
        depth = module.matrix.depth if is_stored else values.shape[1]
        return _Matrix(*pointers, len(values), depth, _TYPES[values.dtype])

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        _use_huge_pages(tensor)
        return tensor.data_ptr()


def logits_in(out_V: Tensor | None, num_rows: int, vocab_size: int) -> Tensor:
    """Room for logits: new memory is slower to write than memory that is there, by more than an argmax of it costs."""
    if out_V is None or len(out_V) < num_rows * vocab_size:
        return torch.empty(num_rows, vocab_size)
    return out_V[: num_rows * vocab_size].view(num_rows, vocab_size)


def _turns(cfg: ModelConfig) -> Tensor | None:
    """[positions, H]: the cosines, then the sines, of every position; each once for a pair."""
    turns = turns_of(cfg, cfg.max_positions, torch.device("cpu"))
    if turns is None:
        return None
    cos, sin = turns
    half = cfg.head_size // 2
    return torch.cat((cos[:, :half], sin[:, half:]), dim=-1).contiguous()


def _has_more(module: nn.Module) -> bool:
    """Something hung on it that a call would do besides."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


# The modules whose part of the work is in the function; one of any other type is left to torch.
_KINDS = {
    *(nn.Embedding, nn.Dropout, nn.ModuleDict),
    *(Block, Attention, CoreAttention, FeedForward, LayerNorm, RMSNorm, Linear, LinearCrossEntropy),
    *(StoredMatrix, StoredLinear, StoredEmbedding),
}


def why_not(model: ModelConfig | None = None) -> str | None:
    """The reason why torch computes alone, this model or any; None where the function is in use."""
    if model is not None and (missing := architecture.unknown(model, KNOWN)):
        return f"the C++ function does not know {missing}"
    return kernel_library.loaded(read_a_little)[1]


def _functions() -> Functions:
    library, reason = kernel_library.loaded(read_a_little)
    if library is None:
        raise UsageError(f"the C++ function cannot be used: {reason}.")
    return library


def read_a_little(functions: Functions) -> Iterator[str]:
    """In a child that may die of it: one token, and more than are multiplied at a time, of every type."""
    torch.set_num_threads(1)  # those of the process that was copied are not here
    for kind in WEIGHTS:
        model = GPT(ModelConfig(num_layers=1, hidden_size=64, num_heads=2, vocab_size=32, max_positions=16)).eval()
        store_weights(model, kind)
        decoder, cache = Decoder(model, functions), model.new_cache(1, 16)
        for tokens in ([0], list(range(9))):
            decoder.read(tokens, [0] * len(tokens), range(len(tokens)), [0], cache)
        yield kind


def _use_huge_pages(tensor: Tensor) -> None:
    """Weights are read from end to end: with pages of 2 MB a fifth to a third faster than with pages of 4 KB."""
    if sys.platform != "linux" or tensor.nbytes < _HUGE:
        return
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    length = (tensor.data_ptr() + tensor.nbytes - first) // _HUGE * _HUGE
    with suppress(AttributeError):  # where the kernel cannot, nothing happens
        ctypes.CDLL(None).madvise(_POINTER(first), ctypes.c_size_t(length), _MADV_COLLAPSE)
