"""The .bin files of llama2.c: a header of seven numbers, then arrays one after the other, and tokenizer.bin beside it.

Three versions: the first has no magic number and carries the cosines of its positions; version 1 has a header of 256
bytes; version 2 keeps matrices as int8 in groups, each with a scale.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gptworks.checkpoint.formats import raw_bytes
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.errors import CheckpointError, TokenizerError

MAGIC = 0x616B3432
_NUMBERS = struct.Struct("<7i")
_HEADER_SIZE = 256
_LARGEST = 2**24  # of any number in a header: no model has more
_LONGEST_TOKEN = 4096  # bytes


@dataclass(frozen=True)
class Header:
    """`shares_head`: the head is the word embedding. `group`: values that share a scale, in version 2."""

    version: int  # 0: without a magic number
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int
    shares_head: bool
    group: int = 0

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order of the file; `{i}` of a name has been filled in."""
        width, ffn, kv = self.hidden_size, self.ffn_size, self.num_kv_heads * self.head_size
        words, head = ("token_embedding", (self.vocab_size, width)), ("wcls", (self.vocab_size, width))
        attention = {"wq": (width, width), "wk": (kv, width), "wv": (kv, width), "wo": (width, width)}
        gated = {"w1": (ffn, width), "w2": (width, ffn), "w3": (ffn, width)}
        if self.version == 0:
            yield words
            yield from self._layers({"rms_att": (width,), **attention, "rms_ffn": (width,), **gated})
            yield "rms_final", (width,)
            yield "freq_cis", (2, self.max_positions, self.head_size // 2)  # worked out anew from the positions
        else:
            yield from self._layers({"rms_att": (width,), "rms_ffn": (width,)})
            yield "rms_final", (width,)
            yield words
            yield from self._layers({**attention, **gated})
        if not self.shares_head:
            yield head

    def _layers(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in shapes.items():
            for layer in range(self.num_layers):
                yield f"{name}.{layer}", shape

    @property
    def start(self) -> int:
        return _NUMBERS.size if self.version == 0 else _HEADER_SIZE

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        count = int(np.prod(shape, dtype=object))
        is_quantised = self.version == 2 and len(shape) == 2
        return count + count // self.group * 4 if is_quantised else count * 4

    @property
    def file_size(self) -> int:
        """Without a list of all layers, whose number may be anything."""
        one = replace(self, num_layers=1)
        none = replace(self, num_layers=0)
        fixed, first = (sum(self.num_bytes(shape) for _, shape in each.arrays()) for each in (none, one))
        return self.start + fixed + self.num_layers * (first - fixed)


def read_header(data: memoryview) -> Header | str:
    """The header, or what is wrong with it."""
    if len(data) < _HEADER_SIZE:
        return f"it has {len(data)} bytes"
    magic, version = struct.unpack("<Ii", data[:8])
    if magic == MAGIC:
        if version not in (1, 2):
            return f"version {version} of llama2.c's files, needed 1 or 2"
        numbers = _NUMBERS.unpack(data[8:36])
        shares, group = bool(data[36]), struct.unpack("<i", data[37:41])[0] if version == 2 else 0
    else:
        version, group, numbers = 0, 0, _NUMBERS.unpack(data[: _NUMBERS.size])
        shares = numbers[5] > 0  # a head of its own is told by a minus
        numbers = (*numbers[:5], abs(numbers[5]), numbers[6])
    if not all(0 < number < _LARGEST for number in numbers):
        return f"its header has the numbers {numbers}"
    hidden, ffn, layers, heads, kv_heads, vocabulary, positions = numbers
    header = Header(version, hidden, ffn, layers, heads, kv_heads, vocabulary, positions, shares, group)
    if header.hidden_size % header.num_heads or header.head_size % 2:
        return f"its header has {header.num_heads} heads for a width of {header.hidden_size}"
    if version == 2 and (group < 1 or any(width % group for width in (header.hidden_size, header.ffn_size))):
        return f"its header has groups of {group} values"
    if len(data) != header.file_size:
        return f"its header announces {header.file_size:,} bytes, and it has {len(data):,}"
    return header


def is_llama2c(path: Path) -> bool:
    """By its magic number, or where it has none by its size, which follows from its header."""
    if path.suffix != ".bin" or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            if file.read(4) == struct.pack("<I", MAGIC):
                return True
        return isinstance(read_header(raw_bytes.mapped(path, "a .bin file of llama2.c")), Header)
    except (OSError, CheckpointError):
        return False


def read(path: Path) -> tuple[Header, dict[str, LazyTensor]]:
    header = read_header(raw_bytes.mapped(path, "a .bin file of llama2.c"))
    if isinstance(header, str):
        raise CheckpointError(f"{path}: no model of llama2.c: {header}. It is damaged, cut short, or of another kind.")
    tensors, begin = {}, header.start
    for name, shape in header.arrays():
        end = begin + header.num_bytes(shape)
        if header.version == 2 and len(shape) == 2:
            tensors[name] = _quantised(path, begin, torch.Size(shape), header.group)
        else:
            tensors[name] = raw_bytes.stored(path, [range(begin, end)], torch.Size(shape), torch.float32)
        begin = end
    tensors.pop("freq_cis", None)
    return header, tensors


def _quantised(path: Path, begin: int, shape: torch.Size, group: int) -> LazyTensor:
    """int8 values, then fp32 scales."""

    def read() -> Tensor:
        count = shape.numel()
        values = raw_bytes.read(path, begin, count, torch.int8).float().view(-1, group)
        scales = raw_bytes.read(path, begin + count, count // group, torch.float32)
        return (values * scales[:, None]).view(shape)

    return LazyTensor(shape, torch.float32, read)


def read_tokens(path: Path, vocab_size: int) -> list[tuple[str, float]]:
    """tokenizer.bin: each token and its score."""
    data = path.read_bytes()
    pieces, at = [], 4  # after the length of the longest
    for number in range(vocab_size):
        if at + 8 > len(data):
            raise TokenizerError(f"{path}: ends after {number:,} tokens, and the model has {vocab_size:,} rows.")
        score, length = struct.unpack("<fi", data[at : at + 8])
        text, at = data[at + 8 : at + 8 + length], at + 8 + length
        if not 0 <= length <= _LONGEST_TOKEN or at > len(data):
            raise TokenizerError(f"{path}: token {number:,} has {length:,} bytes. The file is damaged.")
        try:
            pieces.append((text.decode(), float(score)))
        except UnicodeDecodeError:
            raise TokenizerError(f"{path}: token {number:,} is not UTF-8. The file is damaged.") from None
    if at != len(data):
        raise TokenizerError(f"{path}: has more than the {vocab_size:,} tokens of the model. It belongs to another.")
    return pieces
