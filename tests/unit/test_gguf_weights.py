"""GGUF: what the package `gguf` wrote is read, what we write is byte for byte what it writes."""

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.formats import ggml_blocks, gguf_file
from gptworks.checkpoint.inspect import inspect
from gptworks.checkpoint.lazy_tensor import LazyTensor, in_memory
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import gguf, gguf_q8_0, gguf_vocabulary, huggingface, registry
from gptworks.checkpoint.systems.contract import Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, TokenizerError, VerificationError
from gptworks.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "weights" / "gguf"
MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, ffn_size=32, vocab_size=48, max_positions=16)


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / "expected.npz"))


def weights_of(model: ModelConfig, scale: float = 0.1, dtype: torch.dtype = torch.float32, **more: Any) -> Weights:
    torch.manual_seed(3)
    shapes = our_shapes(model).items()
    return Weights(model, {name: in_memory((torch.randn(shape) * scale).to(dtype)) for name, shape in shapes}, **more)


def hf_folder(folder: Path, model: ModelConfig, tokenizer: Tokenizer | None = None, **more: Any) -> Path:
    folder.mkdir(parents=True)
    eod_id = tokenizer.eod_id if tokenizer else None
    huggingface.write(folder, weights_of(model, eod_id=eod_id, **more))
    if tokenizer:
        tokenizer.save(folder)
    return folder


# What the real package wrote


@pytest.mark.parametrize(("file", "allowed"), [("f32", 1e-5), ("mixed", 0.03), ("q8_0", 0.05)])
def test_logits_of_transformers(file: str, allowed: float, expected: dict[str, np.ndarray]) -> None:
    opened = registry.open_any(FIXTURES / f"{file}.gguf").require_whole()
    assert (opened.system, opened.model) == ("gguf", MODEL)
    found = conversion_check.logits(opened.model, opened.tensors, torch.from_numpy(expected["tokens"]))
    wanted = torch.from_numpy(expected["logits"])
    assert (found - wanted).abs().max() <= allowed * max(1.0, float(wanted.abs().max()))


def test_each_type_is_read_as_it_is_stored(expected: dict[str, np.ndarray]) -> None:
    whole, mixed = (gguf_file.read(FIXTURES / f"{name}.gguf").tensors for name in ("f32", "mixed"))
    assert mixed["blk.0.ffn_up.weight"].dtype == torch.float16
    assert mixed["blk.1.ffn_up.weight"].dtype == torch.bfloat16
    for name, each in mixed.items():
        assert torch.equal(each.read(), whole[name].read().to(each.dtype)), name
    quantised = gguf_file.read(FIXTURES / "q8_0.gguf")
    for name in ("token_embd.weight", "blk.1.ffn_down.weight"):
        assert np.array_equal(quantised.tensors[name].read().numpy(), expected[f"q8_0/{name}"]), name
    assert quantised.types["position_embd.weight"] == ggml_blocks.F32


def test_q8_0_is_ggmls_to_the_bit(expected: dict[str, np.ndarray]) -> None:
    found = ggml_blocks.quantised(torch.from_numpy(expected["rows"]), ggml_blocks.Q8_0)
    assert np.array_equal(found.view(np.uint8).reshape(16, -1), expected["rows as q8_0"])


@pytest.mark.parametrize(("file", "writer"), [("f32", gguf), ("q8_0", gguf_q8_0)])
def test_what_is_written_is_what_the_package_writes(file: str, writer: Any, tmp_path: Path) -> None:
    opened = registry.open_any(FIXTURES / "f32.gguf")
    writer.write(tmp_path / "x", Weights(opened.model, opened.tensors))
    assert (tmp_path / "x").read_bytes() == (FIXTURES / f"{file}.gguf").read_bytes()


def test_version_2_is_read(tmp_path: Path) -> None:
    data = bytearray((FIXTURES / "f32.gguf").read_bytes())
    data[4] = 2
    (tmp_path / "x.gguf").write_bytes(data)
    assert registry.open_any(tmp_path / "x.gguf").require_whole().model == MODEL


# Round trips


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_there_and_back_to_the_bit(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = MODEL.model_copy(update={"tied": tied, "layernorm_eps": 3e-6, "ffn_size": 48})
    source = hf_folder(tmp_path / "hf", model, dtype=dtype)
    done = convert(source, tmp_path / "x.gguf", "gguf", verify=True)
    assert done.certificate is not None and done.certificate["tensors"]["different"] == 0
    file = gguf_file.read(tmp_path / "x.gguf")
    assert file.tensors["blk.0.attn_qkv.weight"].dtype == file.tensors["token_embd.weight"].dtype == dtype
    for name in ("position_embd.weight", "blk.1.ffn_norm.weight", "blk.0.attn_qkv.bias"):
        assert file.tensors[name].dtype == torch.float32, name
    back = convert(tmp_path / "x.gguf", tmp_path / "back", "hf", dtype=dtype, verify=True)
    assert back.source.model == model.model_copy(update=dict.fromkeys(DROPOUTS, 0.0))
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


DROPOUTS = ("dropout_embed", "dropout_hidden", "dropout_attention")


def test_8_bits(tmp_path: Path) -> None:
    """Rows that are no whole blocks stay in 16 bits."""
    model = MODEL.model_copy(update={"ffn_size": 40})
    source = hf_folder(tmp_path / "hf", model)
    done = convert(source, tmp_path / "x.gguf", "gguf-q8_0", verify=True)
    assert done.certificate is not None and done.certificate["tensors"]["different"] > 0
    types = gguf_file.read(tmp_path / "x.gguf").types
    assert {types[f"blk.0.{name}.weight"] for name in ("attn_qkv", "attn_output", "ffn_up")} == {ggml_blocks.Q8_0}
    assert types["token_embd.weight"] == ggml_blocks.Q8_0
    assert types["blk.0.ffn_down.weight"] == ggml_blocks.F16
    report = inspect(tmp_path / "x.gguf")
    assert report.opened.about == {
        "stored as": "q8_0 (7 tensors), f32 (19 tensors), f16 (2 tensors)",
        "tokenizer": "none",
    }
    # Quantised once more nothing changes any more, but for the fp16 rounding of scales.
    convert(tmp_path / "x.gguf", tmp_path / "again.gguf", "gguf-q8_0", verify=True)
    first, again = (gguf_file.read(tmp_path / name).tensors for name in ("x.gguf", "again.gguf"))
    for name, each in first.items():
        torch.testing.assert_close(each.read(), again[name].read(), rtol=1e-3, atol=1e-4)


def test_a_wrong_order_of_qkv_is_beyond_the_tolerance_of_8_bits(tmp_path: Path, monkeypatch: Any) -> None:
    """The tolerance is wide; what a conversion must not do is wider still."""
    source = hf_folder(tmp_path / "hf", MODEL, scale=0.3)
    written = gguf_file.write

    def swapped(path: Path, settings: Any, tensors: dict[str, LazyTensor], types: Any = None) -> None:
        changed = dict(tensors)
        name = "blk.0.attn_qkv.weight"
        whole = tensors[name]
        changed[name] = LazyTensor(whole.shape, whole.dtype, lambda: whole.read().roll(MODEL.hidden_size, 0))
        written(path, settings, changed, types)

    monkeypatch.setattr(gguf_file, "write", swapped)
    with pytest.raises(VerificationError, match="Nothing was written"):
        convert(source, tmp_path / "x.gguf", "gguf-q8_0", verify=True)
    assert not (tmp_path / "x.gguf").exists()


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64))
def test_quantised_values_are_within_half_a_step(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32).view(2, 32)
    blocks = ggml_blocks.quantised(tensor, ggml_blocks.Q8_0)
    found = ggml_blocks.dequantised(memoryview(blocks.view(np.uint8)), ggml_blocks.Q8_0, tensor.shape)
    largest = tensor.abs().amax(dim=1, keepdim=True)
    # Half a step, and what fp16 takes from the scale (absolutely, where it has no exponent left).
    assert ((found - tensor).abs() <= largest * (0.5 / 127 + 2**-10) + 127 * 2**-24).all()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = weights_of(MODEL)
    tensors = {**weights.tensors, "blocks.0.mlp.up.weight": in_memory(torch.full((32, 32), torch.inf))}
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' holds values that are not finite"):
        gguf_q8_0.write(tmp_path / "x", Weights(MODEL, tensors))


def test_a_head_that_older_converters_wrote_again(tmp_path: Path) -> None:
    file = gguf_file.read(FIXTURES / "f32.gguf")
    settings = {"general.architecture": "gpt2", "gpt2.attention.head_count": 4}
    head = file.tensors["token_embd.weight"].read().clone()
    gguf_file.write(tmp_path / "same.gguf", settings, {**file.tensors, "output.weight": in_memory(head)})
    opened = registry.open_any(tmp_path / "same.gguf").require_whole()
    assert opened.model == MODEL
    assert opened.remarks == ["output.weight is the word embedding once more: the head is tied"]
    head[-1, -1] += 1
    gguf_file.write(tmp_path / "other.gguf", settings, {**file.tensors, "output.weight": in_memory(head)})
    opened = registry.open_any(tmp_path / "other.gguf").require_whole()
    assert not opened.model.tied
    assert torch.equal(opened.tensors["head.weight"].read(), head)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gelu": "erf"}, "model.gelu is erf, and llama.cpp computes GPT-2 with tanh"),
        ({"gelu": "sigmoid"}, "-o model.gelu=tanh"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", MODEL.model_copy(update=change))
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "x.gguf", "gguf")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf"]
    convert(source, tmp_path / "x.gguf", "gguf", overrides={"gelu": "tanh"}, verify=True)


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    alive, most = 0, 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def counted(shape: torch.Size) -> LazyTensor:
        def read() -> torch.Tensor:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return torch.zeros(shape).as_subclass(Counted)

        return LazyTensor(shape, torch.float32, read)

    tensors = {name: counted(shape) for name, shape in our_shapes(MODEL).items()}
    gguf.write(tmp_path / "x", Weights(MODEL, tensors))
    assert most <= 2  # the one that is written, and the one before it until its name is free


# Vocabularies


def test_the_tokenizer_travels(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = MODEL.model_copy(update={"vocab_size": 520})  # 8 rows more than tokens
    source = hf_folder(tmp_path / "hf", model, small_tokenizer)
    done = convert(source, tmp_path / "x.gguf", "gguf")
    assert done.notes == []
    settings = gguf_file.read(tmp_path / "x.gguf").settings
    assert settings["tokenizer.ggml.model"] == "gpt2" and settings["tokenizer.ggml.pre"] == "gpt-2"
    tokens, types = settings["tokenizer.ggml.tokens"], settings["tokenizer.ggml.token_type"].tolist()
    assert tokens[511:] == ["<|endoftext|>", *(f"[PAD{i}]" for i in range(512, 520))]
    assert types == [1] * 511 + [3] + [5] * 8
    assert settings["tokenizer.ggml.eos_token_id"] == settings["tokenizer.ggml.bos_token_id"] == 511
    assert len(settings["tokenizer.ggml.merges"]) == 255
    # On to another GGUF, and home.
    convert(tmp_path / "x.gguf", tmp_path / "y.gguf", "gguf-q8_0")
    done = convert(tmp_path / "y.gguf", tmp_path / "back", "hf")
    found = Tokenizer.from_pretrained(tmp_path / "back")
    assert (found.identity, found.eod_id) == (small_tokenizer.identity, 511)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 511
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in done.files}


def test_a_vocabulary_of_other_converters(small_tokenizer: Tokenizer) -> None:
    """Tokens and merges are all they write."""
    settings = gguf_vocabulary.settings_of(small_tokenizer, 520, None, [])
    del settings["tokenizer.huggingface.json"]
    found = gguf_vocabulary.from_settings(settings, "x")
    assert found is not None
    assert (found.vocab_size, found.eod_id) == (512, 511)
    for text in ("The sea was calm", "今天天气\n\n x", "a<|endoftext|>b", "don't  stop"):
        assert found.encode(text) == small_tokenizer.encode(text)
        assert found.decode(found.encode(text)) == text
    with pytest.raises(
        CheckpointError, match=r"splits text by 'tekken' \(tokenizer.ggml.pre\); known: gpt-2, llama-bpe"
    ):
        gguf_vocabulary.from_settings({**settings, "tokenizer.ggml.pre": "tekken"}, "x")
    assert gguf_vocabulary.from_settings({"tokenizer.ggml.model": "none"}, "x") is None
    for key, value in (
        ("tokenizer.ggml.merges", ["no pair of tokens"]),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.tokens", "text"),
        ("tokenizer.huggingface.json", "{}"),
    ):
        with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
            gguf_vocabulary.from_settings({**settings, key: value}, "x")


def test_gpt2_itself_keeps_its_identity() -> None:
    gpt2 = Tokenizer.from_pretrained("gpt2")
    settings = gguf_vocabulary.settings_of(gpt2, 50257, None, [])
    del settings["tokenizer.huggingface.json"]
    found = gguf_vocabulary.from_settings(settings, "x")
    assert found is not None and found.identity == gpt2.identity


def test_without_a_tokenizer(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", MODEL)
    done = convert(source, tmp_path / "x.gguf", "gguf")
    assert done.notes[-1] == "no tokenizer is known: llama.cpp will take and give ids only"
    assert gguf_file.read(tmp_path / "x.gguf").settings["tokenizer.ggml.model"] == "none"
    with pytest.raises(TokenizerError, match="carries no tokenizer"):
        gguf_vocabulary.carried_by(tmp_path / "x.gguf")
    # Where the size is GPT-2's, its vocabulary comes with the installation.
    model = MODEL.model_copy(
        update={"vocab_size": 50304, "hidden_size": 4, "num_heads": 1, "num_kv_heads": 1, "head_size": 4, "ffn_size": 4}
    )
    notes: list[str] = []
    gguf.write(tmp_path / "y.gguf", weights_of(model, notes=notes))
    assert notes == ["no tokenizer comes with the source: GPT-2's was written, since the vocabulary has its size"]
    assert gguf_vocabulary.carried_by(tmp_path / "y.gguf").eod_id == 50256


def test_tokenizers_that_llama_cpp_would_not_follow(small_tokenizer: Tokenizer) -> None:
    def notes_of(change: dict[str, Any], vocab_size: int = 512) -> tuple[list[str], dict[str, Any]]:
        import tokenizers

        spec = {**json.loads(small_tokenizer.backend.to_str()), **change}
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), name="x")
        notes: list[str] = []
        return notes, dict(gguf_vocabulary.settings_of(tokenizer, vocab_size, None, notes))

    assert notes_of({})[0] == []
    for change, vocab_size, reason in (
        ({}, 500, "512 tokens and the model 500 rows"),
        ({"normalizer": {"type": "NFC"}}, 512, "splits text otherwise"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, 512, "otherwise"),
    ):
        notes, settings = notes_of(change, vocab_size)
        assert len(notes) == 1 and reason in notes[0]
        assert settings["tokenizer.ggml.model"] == "none" and "tokenizer.ggml.tokens" not in settings
        assert gguf_vocabulary.from_settings(settings, "x") is not None  # for us it is inside all the same


# Files that are wrong


def opened_and_read(path: Path) -> None:
    opened = registry.open_any(path, name="gguf").require_whole()
    for each in opened.tensors.values():
        each.read().sum()


def damaged(data: bytes, tmp_path: Path) -> str:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        opened_and_read(tmp_path / "x.gguf")
    return str(caught.value)


def change(data: bytes, key: str, value: bytes) -> bytes:
    """The value of a number that stands after its key and type."""
    at = data.index(key.encode()) + len(key) + 4
    return data[:at] + value + data[at + len(value) :]


def test_files_that_are_wrong(tmp_path: Path) -> None:
    whole = (FIXTURES / "f32.gguf").read_bytes()
    huge = struct.pack("<Q", 2**62)
    for data, message in (
        (b"", "cannot be read"),
        (b"GGML" + whole[4:], "not a GGUF file"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "version 1, needed 2 or 3"),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "big-endian"),
        (whole[:8] + huge + whole[16:], "announced"),
        (whole[:16] + huge + whole[24:], "damaged"),
        (whole[:24] + huge + whole[32:], "4,611,686,018,427,387,904 bytes are announced at 32"),
        (whole[:-2000], "copy it again"),
        (change(whole, "gpt2.block_count", struct.pack("<I", 3)), "12 missing: 'blk.2.attn_norm.weight'"),
        (change(whole, "gpt2.block_count", struct.pack("<I", 2**32 - 1)), "4294967295 blocks are announced"),
        (change(whole, "gpt2.attention.head_count", struct.pack("<I", 5)), "num_heads"),
        (change(whole, "gpt2.context_length", struct.pack("<I", 99)), "'position_embd.weight' has shape [16, 32]"),
        (change(whole, "general.alignment", struct.pack("<I", 3)), "needed a multiple of 8"),
        (whole.replace(b"gpt2.block_count", b"gpt2.block_xount", 1).replace(b"blk.1", b"blk.2"), "have no place"),
        (
            whole.replace(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0gptj", 1),
            "'gptj', needed one of gpt2, llama, qwen2, qwen3",
        ),
        (whole.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"), "there twice"),
        (whole.replace(b"output_norm.bias", b"output_norm.bia\xff"), "not UTF-8"),
    ):
        found = damaged(data, tmp_path)
        assert message in found, found
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    found = damaged(whole[:at] + struct.pack("<I", 19) + whole[at + 4 :], tmp_path)
    assert "'token_embd.weight' is of ggml type 19. Known are f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0" in found
    with pytest.raises(CheckpointError, match="cannot be read"):
        gguf_file.read(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        gguf_file.read(tmp_path / "absent")


def test_settings_of_odd_kinds(tmp_path: Path) -> None:
    file = gguf_file.read(FIXTURES / "f32.gguf")
    base = {"general.architecture": "gpt2", "gpt2.attention.head_count": 4}
    for more, message in (
        ({"gpt2.attention.head_count": [4, 4]}, "gpt2.attention.head_count is"),
        ({"gpt2.block_count": "two"}, "needed a whole number"),
        ({"split.count": 3}, "one of 3 parts. Join them with llama-gguf-split --merge"),
        ({"general.architecture": "mamba"}, "'mamba', needed one of gpt2, llama, qwen2, qwen3"),
    ):
        gguf_file.write(tmp_path / "x.gguf", {**base, **more}, file.tensors)
        with pytest.raises(CheckpointError) as caught:
            registry.open_any(tmp_path / "x.gguf")
        assert message in str(caught.value)
    flat = {**file.tensors, "token_embd.weight": in_memory(torch.zeros(7))}
    gguf_file.write(tmp_path / "x.gguf", base, flat)
    with pytest.raises(CheckpointError, match=r"has shape \[7\], needed a matrix"):
        registry.open_any(tmp_path / "x.gguf")
    gguf_file.write(tmp_path / "x.gguf", {**base, "a": True, "b": 0.5, "c": "text", "d": ["x", ""]}, file.tensors)
    assert registry.open_any(tmp_path / "x.gguf").require_whole().model.num_heads == 4
    settings = gguf_file.read(tmp_path / "x.gguf").settings
    assert (settings["a"], settings["b"], settings["c"], settings["d"]) == (True, 0.5, "text", ["x", ""])
    gguf_file.write(tmp_path / "x.gguf", {"general.architecture": "gpt2"}, file.tensors)
    with pytest.raises(CheckpointError, match=r"-o model\.num_heads=N"):
        registry.open_any(tmp_path / "x.gguf")


def test_bad_bytes_are_refused_or_read(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Flipped, overwritten with large numbers, cut: never anything but a CheckpointError, and never much memory."""
    small_tokenizer.save(tmp_path / "tokenizer")
    model = MODEL.model_copy(update={"vocab_size": 512, "num_layers": 1})
    gguf_q8_0.write(
        tmp_path / "words.gguf", weights_of(model, tokenizer=lambda: Tokenizer.from_pretrained(tmp_path / "tokenizer"))
    )
    rng = random.Random(0)
    path = tmp_path / "x.gguf"
    refused = total = 0
    tracemalloc.start()
    for source in (tmp_path / "words.gguf", FIXTURES / "f32.gguf", FIXTURES / "q8_0.gguf"):
        whole = source.read_bytes()
        header = min(len(whole), 3000)
        for _ in range(100):
            data = bytearray(whole)
            kind, at = rng.randrange(4), rng.randrange(header)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at : at + 8] = rng.choice([b"\xff" * 8, struct.pack("<Q", 2**40), bytes(8)])
            elif kind == 2:
                del data[rng.randrange(len(data)) :]
            else:
                data[at : at + 4] = rng.randbytes(4)
            path.write_bytes(data)
            total += 1
            tracemalloc.reset_peak()
            try:
                opened_and_read(path)
                gguf_vocabulary.carried_by(path)
            except CheckpointError:
                refused += 1
            except TokenizerError:
                pass
            assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert 0.3 * total < refused < total
