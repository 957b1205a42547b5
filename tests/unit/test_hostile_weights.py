"""Small files that ask for endless time or memory, or name what they should not: refused, or read, at once."""

import pickle
import subprocess
import sys
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gptworks.checkpoint.formats import gguf_file, llmc_weights, pdparams, torch_file
from gptworks.checkpoint.inspect import inspect
from gptworks.checkpoint.lazy_tensor import LazyTensor, in_memory
from gptworks.checkpoint.rules import match, our_shapes, split
from gptworks.checkpoint.systems import huggingface, megatron, nanogpt, paddlenlp, registry
from gptworks.checkpoint.systems.contract import Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.pickle_values import Object, brief
from gptworks.safe_pickle import PickleMachine

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_heads=2, vocab_size=12, max_positions=6)


# What never ends fails here, and not with the whole run.
pytestmark = pytest.mark.time_limit(120)


def torch_zip(path: Path, program: bytes, **storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def doubling(value: bytes = b")", times: int = 60) -> bytes:
    """A tuple that holds another twice, and that one another twice, and so on."""
    return value + b"2\x86" * times


def weights(model: ModelConfig = MODEL) -> Weights:
    torch.manual_seed(0)
    return Weights(model, {name: in_memory(torch.randn(shape)) for name, shape in our_shapes(model).items()})


# Values that share their parts


def test_a_tuple_of_tuples_is_walked_once(tmp_path: Path) -> None:
    found = torch_file.read(torch_zip(tmp_path / "x.pt", b"\x80\x02" + doubling() + b".")).content
    assert isinstance(found, tuple) and found[0] is found[1]


@pytest.mark.parametrize(
    "program",
    {
        "key of a dictionary": b"}" + doubling() + b"Ns.",
        "key of an ordered one": b"ccollections\nOrderedDict\n(](" + doubling() + b"N\x86etR.",
        "member of a set": b"\x8f(" + doubling() + b"\x90.",
        "member of a frozen set": b"(" + doubling() + b"\x91.",
        "argument of what is refused": b"cos\nsystem\n" + doubling() + b"R.",
        "called": doubling() + b")R.",
        "part of a path": b"cpathlib\nPosixPath\n" + doubling() + b"R.",
        "name": doubling() + b"2\x93.",
        "encoded": b"c_codecs\nencode\n" + doubling() + b"R.",
    }.items(),
    ids=lambda each: each[0].replace(" ", "-"),
)
def test_a_tuple_of_tuples_as(program: tuple[str, bytes]) -> None:
    try:
        PickleMachine(memoryview(program[1]), "x.pkl").load()
    except CheckpointError as error:
        assert len(str(error)) < 1000


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n("


def tensor_of(
    key: bytes = b"X\x01\0\0\x000", kind: bytes = b"ctorch\nFloatStorage\n", shape: bytes = b"(K\x04t"
) -> bytes:
    storage = b"(X\x07\0\0\0storage" + kind + key + b"X\x03\0\0\0cpuK\x04tQ"
    return b"\x80\x02" + REBUILD + storage + b"K\x00" + shape + b"K\x01\x85\x89NtR."


@pytest.mark.parametrize("part", ["key", "kind", "shape"])
def test_a_tensor_with_a_tuple_of_tuples_for_its(part: str, tmp_path: Path) -> None:
    assert torch_file.read(torch_zip(tmp_path / "x.pt", tensor_of(), **{"0": bytes(16)})).content.shape == (4,)
    bad = tensor_of(**{part: doubling()})
    with pytest.raises(CheckpointError) as caught:
        torch_file.read(torch_zip(tmp_path / "y.pt", bad, **{"0": bytes(16)}))
    assert len(str(caught.value)) < 1000


def test_nested_shared_dictionaries_are_looked_at_once(tmp_path: Path) -> None:
    value: dict[str, Any] = {}
    for _ in range(12):
        value = {str(number): value for number in range(30)}
    torch_zip(tmp_path / "model_optim_rng.pt", pickle.dumps(value, protocol=2))
    assert megatron.recognise(tmp_path / "model_optim_rng.pt")  # by its name: there is no tensor in it
    with pytest.raises(CheckpointError):
        megatron.open(tmp_path / "model_optim_rng.pt", {})


@pytest.mark.parametrize(
    ("spelled", "message"),
    [(doubling(), "num_heads is ((("), (pickle.dumps(10**5000, protocol=2)[2:-1], "a number of 16,610 bits")],
)
def test_settings_that_are_no_numbers(spelled: bytes, message: str, tmp_path: Path) -> None:
    one = {"num_heads": 1, "num_kv_heads": 1, "head_size": MODEL.hidden_size}
    nanogpt.write(tmp_path / "ckpt.pt", weights(MODEL.model_copy(update=one)))
    with zipfile.ZipFile(tmp_path / "ckpt.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    program = next(name for name in entries if name.endswith("data.pkl"))
    head, tail = entries[program].split(b"n_head", 1)
    entries[program] = head + b"n_head" + tail.replace(b"K\x01", spelled, 1)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError) as caught:
        nanogpt.open(tmp_path / "x.pt", {})
    assert message in str(caught.value)


def test_what_is_shown_is_short() -> None:
    endless: Any = []
    for _ in range(60):
        endless = [endless, {1: endless}]
    for value in (endless, "x" * 10**6, b"x" * 10**6, 10**5000, [Object(None, (endless,))] * 99):  # type: ignore[arg-type]
        assert len(brief(value)) <= 200
    assert brief(("a", 1, None, 2.5)) == "('a', 1, None, 2.5)"


# Sizes


def test_a_stride_of_zero_makes_no_tensor_out_of_nothing(tmp_path: Path) -> None:
    shape = b"(J\xff\xff\xff\x7fK\x04t"
    program = tensor_of(shape=shape).replace(b"K\x01\x85\x89N", b"(K\x00K\x01t\x89N")
    with pytest.raises(CheckpointError, match="needs 34,359,738,352 bytes of storage '0', which has 16"):
        torch_file.read(torch_zip(tmp_path / "x.pt", program, **{"0": bytes(16)}))


def test_a_paddle_array_whose_type_is_a_deep_list(tmp_path: Path) -> None:
    deep = b"]" * 5000 + b"a" * 4999
    dtype = b"cnumpy\ndtype\n(" + deep + b"\x89\x88tR"
    program = b"\x80\x02}X\x01\0\0\0wcnumpy.core.multiarray\nscalar\n(" + dtype + b"U\x04abcdtRs."
    (tmp_path / "x.pdparams").write_bytes(program)
    with pytest.raises(CheckpointError, match=r"an array of type \[\["):
        pdparams.read(tmp_path / "x.pdparams")
    (tmp_path / "x.pdparams").write_bytes(b"\x80\x02}X\x01\0\0\0w" + deep + b"s.")
    with pytest.raises(CheckpointError, match="contradicts itself"):
        pdparams.read(tmp_path / "x.pdparams")


@pytest.mark.parametrize("system", [huggingface, paddlenlp])
def test_more_layers_than_tensors(system: Any, tmp_path: Path) -> None:
    system.write(tmp_path, weights())
    config = next(tmp_path.glob("*config.json"))
    key = '"n_layer"' if system is huggingface else '"num_hidden_layers"'
    config.write_text(config.read_text().replace(f"{key}: 2", f"{key}: 300000000"))
    with pytest.raises(CheckpointError, match=r"300000000 blocks are announced, and it holds (28|36) tensors"):
        system.open(tmp_path, {})


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["gguf", "llmc", "pdparams"])
def test_pages_that_were_read_do_not_stay(kind: str, tmp_path: Path) -> None:
    tensors = {f"t{number}": in_memory(torch.full((2**18,), 1.0)) for number in range(64)}  # 64 MB
    path = tmp_path / "x"
    if kind == "gguf":
        gguf_file.write(path, {"general.architecture": "gpt2"}, tensors)
        found = gguf_file.read(path).tensors
    elif kind == "llmc":
        llmc_weights.write(path, [0] * 6, torch.float32, tensors)
        found = llmc_weights.read(path).arrays({name: each.shape for name, each in tensors.items()})
    else:
        pdparams.write(path, tensors)
        found = pdparams.read(path).tensors
    next(iter(found.values())).read()
    before = resident()
    assert sum(float(each.read().sum()) for each in found.values()) == 64 * 2**18
    assert resident() - before < 24 * 2**20


# Types


def retyped(tensors: Any, change: dict[str, torch.dtype]) -> dict[str, LazyTensor]:
    return {name: each.cast(change[name]) if name in change else each for name, each in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_weights_are_floating_point(dtype: torch.dtype) -> None:
    theirs = retyped(split(huggingface.TABLE, weights().tensors, MODEL), {"transformer.ln_f.bias": dtype})
    found = match(huggingface.TABLE, [theirs], MODEL)
    name = str(dtype).removeprefix("torch.")
    assert found.misshapen == [f"'transformer.ln_f.bias' is of type {name}, needed float64, float32, float16, bfloat16"]


def test_q_k_and_v_are_of_one_type(tmp_path: Path) -> None:
    paddlenlp.write(tmp_path, weights())
    tensors = pdparams.read(tmp_path / paddlenlp.FILE).tensors
    query = "gpt.decoder.layers.0.self_attn.q_proj.weight"
    changed = retyped({name: in_memory(each.read()) for name, each in tensors.items()}, {query: torch.float16})
    pdparams.write(tmp_path / paddlenlp.FILE, changed)
    with pytest.raises(CheckpointError, match=rf"pieces of '{query}' are of different types \(float16, float32\)"):
        registry.open_any(tmp_path).require_whole()


# Names


def test_an_entry_of_an_archive_without_a_name(tmp_path: Path) -> None:
    """In both places where a zip has it: the one before the bytes and the one in the list at the end."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("N", b"3")
    data = (tmp_path / "x.pt").read_bytes()
    listed = data.rindex(b"PK\x01\x02")
    nameless = data[:listed] + data[listed:].replace(b"N", b"", 1)
    nameless = nameless[: listed + 28] + b"\0\0" + nameless[listed + 30 :]
    end = nameless.rindex(b"PK\x05\x06") + 12
    size = int.from_bytes(nameless[end : end + 4], "little") - 1
    (tmp_path / "x.pt").write_bytes(nameless[:end] + size.to_bytes(4, "little") + nameless[end + 4 :])
    assert torch_file.read(tmp_path / "x.pt").content == {}


def test_an_unknown_class_beside_the_weights_is_listed(tmp_path: Path) -> None:
    huggingface.write(tmp_path, weights())
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save({**tensors, "note": 3, "other": Fraction(1, 2)}, tmp_path / "pytorch_model.bin")
    assert inspect(tmp_path).as_dict()["remarks"] == [
        f"{tmp_path / 'pytorch_model.bin'}: classes of the pickle that were not used: fractions.Fraction",
        f"{tmp_path / 'pytorch_model.bin'}: left out what is not a tensor: ['note', 'other']",
    ]


def test_an_unknown_class_deep_in_a_paddle_file_is_listed(tmp_path: Path) -> None:
    program = b"\x80\x02}X\x01\0\0\0w](}K\x01(K\x02cnowhere\nMade\n)Rtses."
    (tmp_path / "x.pdparams").write_bytes(program)
    assert pdparams.read(tmp_path / "x.pdparams").unknown == ["nowhere.Made"]


def test_no_codec_is_imported(tmp_path: Path) -> None:
    """In a process of its own, where nothing else has imported it."""
    script = (
        "import sys\n"
        "from gptworks.safe_pickle import PickleMachine\n"
        "from gptworks.errors import CheckpointError\n"
        'program = b"c_codecs\\nencode\\n(X\\x01\\0\\0\\0aX\\x05\\0\\0\\0cp037tR."\n'
        "try:\n"
        "    print(PickleMachine(memoryview(program), 'x').load())\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
        "print('encodings.cp037' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [
        "x: the pickle encodes 'a' by 'cp037'. Refused: no file with weights does that. Do not open it with other "
        "tools.",
        "False",
    ]


def test_the_old_way_to_make_an_object_is_a_call_too() -> None:
    program = b"ccopy_reg\n_reconstructor\n(cos\nsystem\nc__builtin__\nobject\nNtR."
    with pytest.raises(CheckpointError, match=r"calls os\.system with \(\)\. Refused"):
        PickleMachine(memoryview(program), "x").load()
