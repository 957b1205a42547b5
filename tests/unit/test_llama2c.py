"""llama2.c: files of its three versions, written here byte by byte as its export.py writes them."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.systems import llama2c, registry
from gptworks.errors import CheckpointError, TokenizerError

WIDTH, FFN, LAYERS, HEADS, KV, WORDS, POSITIONS = 16, 24, 2, 4, 2, 300, 12
HEAD = WIDTH // HEADS


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """A Llama in Meta's order: pairs of numbers that are turned stand side by side."""
    draw = np.random.default_rng(seed)
    shapes = {"wq": (WIDTH, WIDTH), "wk": (KV * HEAD, WIDTH), "wv": (KV * HEAD, WIDTH), "wo": (WIDTH, WIDTH)}
    shapes |= {"w1": (FFN, WIDTH), "w2": (WIDTH, FFN), "w3": (FFN, WIDTH)}
    found = {name: (draw.standard_normal((LAYERS, *shape)) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    for name in ("rms_att", "rms_ffn"):
        found[name] = (1 + 0.1 * draw.standard_normal((LAYERS, WIDTH))).astype(np.float32)
    found["rms_final"] = (1 + 0.1 * draw.standard_normal(WIDTH)).astype(np.float32)
    for name in ("words", "wcls"):
        found[name] = draw.standard_normal((WORDS, WIDTH)).astype(np.float32)
    return found


def llama2c_model(path: Path, version: int = 0, *, shared: bool = True, group: int = 8) -> dict[str, np.ndarray]:
    """Writes the file and tokenizer.bin beside it; gives the arrays (of version 2 what is left of them)."""
    data = arrays()
    numbers = [WIDTH, FFN, LAYERS, HEADS, KV, WORDS if shared or version else -WORDS, POSITIONS]
    out = [struct.pack("<7i", *numbers)]
    if version:
        start = struct.pack("<Ii7iB", 0x616B3432, version, *numbers, shared)
        out = [(start + (struct.pack("<i", group) if version == 2 else b"")).ljust(256, b"\0")]
    matrices = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
    if version == 0:
        out += [data["words"].tobytes()]
        out += [data[name].tobytes() for name in ("rms_att", *matrices[:4], "rms_ffn", *matrices[4:], "rms_final")]
        out += [np.zeros(POSITIONS * HEAD, dtype=np.float32).tobytes()]  # cosines and sines, which nobody reads
        out += [] if shared else [data["wcls"].tobytes()]
    else:
        out += [data[name].tobytes() for name in ("rms_att", "rms_ffn", "rms_final")]
        for name in ("words", *matrices, *(() if shared else ("wcls",))):
            for number, each in enumerate(data[name] if name in matrices else [data[name]]):
                if version == 1:
                    out.append(each.tobytes())
                    continue
                rows = each.reshape(-1, group)
                scale = np.abs(rows).max(axis=1) / np.float32(127)
                whole = np.round(rows / scale[:, None]).astype(np.int8)
                out += [whole.tobytes(), scale.tobytes()]
                kept = (whole * scale[:, None]).reshape(each.shape).astype(np.float32)
                if name in matrices:
                    data[name][number] = kept
                else:
                    data[name] = kept
    path.write_bytes(b"".join(out))
    path.with_name("tokenizer.bin").write_bytes(tokens())
    return data


def tokens() -> bytes:
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = [" t", "he", " the", "in", " a"]
    letters = [*" abcdefghijklmnopqrstuvwxyz.,!?'\n"]
    pieces += merged + letters
    pieces += [f"{first}{second}" for first in "xyz" for second in "xyz"][: WORDS - len(pieces)]
    assert len(pieces) == WORDS
    out = struct.pack("<i", 6)
    for number, piece in enumerate(pieces):
        score = 0.0 if number < 259 else -float(number - 259)
        out += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    return out


def logits_by_definition(data: dict[str, np.ndarray], ids: list[int], *, shared: bool) -> np.ndarray:
    """What run.c computes, token by token, in float64."""
    keys: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    values: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    found = []

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return gain * x / np.sqrt((x**2).mean() + 1e-5)

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for i in range(0, len(x), 2):
            angle = position / 10000.0 ** ((i % HEAD) / HEAD)
            cos, sin = np.cos(angle), np.sin(angle)
            out[i], out[i + 1] = x[i] * cos - x[i + 1] * sin, x[i] * sin + x[i + 1] * cos
        return out

    for position, token in enumerate(ids):
        x = data["words"][token].astype(np.float64)
        for layer in range(LAYERS):
            y = norm(x, data["rms_att"][layer])
            query = turned(data["wq"][layer] @ y, position)
            keys[layer].append(turned(data["wk"][layer] @ y, position))
            values[layer].append(data["wv"][layer] @ y)
            mixed = []
            for head in range(HEADS):
                place = slice(head // (HEADS // KV) * HEAD, (head // (HEADS // KV) + 1) * HEAD)
                mine = query[head * HEAD : (head + 1) * HEAD]
                weights = np.array([mine @ key[place] for key in keys[layer]]) / np.sqrt(HEAD)
                weights = np.exp(weights - weights.max())
                weights /= weights.sum()
                mixed.append(sum(w * value[place] for w, value in zip(weights, values[layer], strict=True)))
            x = x + data["wo"][layer] @ np.concatenate(mixed)
            y = norm(x, data["rms_ffn"][layer])
            gate = data["w1"][layer] @ y
            x = x + data["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (data["w3"][layer] @ y))
        head_matrix = data["words" if shared else "wcls"]
        found.append(head_matrix @ norm(x, data["rms_final"]))
    return np.array(found)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_logits_by_definition(version: int, shared: bool, tmp_path: Path) -> None:
    data = llama2c_model(tmp_path / "model.bin", version, shared=shared)
    opened = registry.open_any(tmp_path / "model.bin").require_whole()
    assert (opened.system, opened.model.tied, opened.model.num_kv_heads) == ("llama2c", shared, KV)
    ids = [1, 270, 264, 299, 3, 150, 280]
    found = conversion_check.logits(opened.model, opened.tensors, torch.tensor([ids]))[0].numpy()
    wanted = logits_by_definition(data, ids, shared=shared)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_the_tokenizer_beside_it(tmp_path: Path) -> None:
    llama2c_model(tmp_path / "model.bin")
    tokenizer = registry.open_any(tmp_path / "model.bin").open_tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode_prompt("the") == [1, 261]  # BOS, and " the": a blank comes before a text
    e_acute = [3 + byte for byte in "é".encode()]
    assert tokenizer.encode("aé") == [263, *e_acute]
    assert tokenizer.decode([1, 261, *e_acute]) == "<s> theé"
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (1, WORDS)


def test_to_hugging_face_and_not_back(tmp_path: Path) -> None:
    llama2c_model(tmp_path / "model.bin")
    done = convert(tmp_path / "model.bin", tmp_path / "hf", "hf", verify=True)
    assert done.certificate is not None and done.certificate["tensors"]["different"] == 0
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    with pytest.raises(CheckpointError, match=r"llama2c: files of llama2\.c are only read"):
        convert(tmp_path / "hf", tmp_path / "x.bin", "llama2c")
    assert not (tmp_path / "x.bin").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-4], r"its header announces [\d,]+ bytes, and it has"),
        (lambda data: data[:100], "it has 100 bytes"),
        (lambda data: struct.pack("<i", 17) + data[4:], "4 heads for a width of 17"),
        (lambda data: struct.pack("<i", -1) + data[4:], r"its header has the numbers \(-1,"),
        (lambda data: struct.pack("<Ii", 0x616B3432, 9) + data[8:], "version 9 of llama2.c's files, needed 1 or 2"),
        (lambda data: data[:8] + struct.pack("<i", 2**23) + data[12:], "its header announces"),
    ],
)
def test_files_that_are_wrong(change: Any, message: str, tmp_path: Path) -> None:
    llama2c_model(tmp_path / "model.bin")
    path = tmp_path / "model.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        registry.open_any(path, name="llama2c")


def test_tokenizers_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.bin"
    whole = tokens()
    for data, message in (
        (whole[:-9], "token 299 has|ends after"),
        (whole + b"\0" * 12, "has more than the 300 tokens"),
        (whole[:8] + struct.pack("<i", -5) + whole[12:], "token 0 has -5 bytes"),
        (whole.replace(b"he", b"\xff\xff", 1), "is not UTF-8"),
        (whole.replace(b"in", b"he", 1), "are both 'he'"),
    ):
        path.write_bytes(data)
        with pytest.raises(TokenizerError, match=message):
            llama2c.tokenizer_in(path, WORDS)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_bad_bytes_are_refused_or_read(version: int, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    llama2c_model(path, version)
    whole = path.read_bytes()
    rng = random.Random(version)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        at = rng.randrange(64)
        data[at : at + 4] = rng.choice([b"\xff\xff\xff\x7f", b"\0\0\0\0", rng.randbytes(4)])
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            for tensor in registry.open_any(path, name="llama2c").require_whole().tensors.values():
                tensor.read()
        except CheckpointError:
            refused += 1
    assert refused > 50
