"""Exported folders: what is in them, that their runtimes give our tokens, and that nothing is left half written."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gptworks
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.checkpoint.systems import registry as systems
from gptworks.cli.export import TARGETS, WEIGHTS
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.errors import CheckpointError, GenerationError, TokenizerError, UsageError
from gptworks.export import folder as folders
from gptworks.export import onnx_graph, registry, tokenizer_files, torch_program
from gptworks.export.folder import export
from gptworks.export.infer import Inference
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

PROMPTS = ["The sea was calm", "x", "On Friday morning the old man said that he had paid"]
TOKENIZER_FILES = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"}
# Eight rows more than the tokenizer has tokens, and a LayerNorm that is not everybody's.
SHAPE = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 520, "max_positions": 64}
SHAPE |= {"layernorm_eps": 1e-3}

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(small_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A Hugging Face folder of fresh weights that are large enough to make every token count."""
    made: dict[str, Path] = {}

    def one(**changes: Any) -> Path:
        if (key := json.dumps(changes)) not in made:
            cfg = ModelConfig(**{**SHAPE, **changes})
            fresh = FreshWeights(InitConfig(std=0.25), cfg.num_layers, seed=4)
            model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, fresh)
            seeded = torch.Generator().manual_seed(5)
            for name, parameter in model.named_parameters():  # fresh biases are 0, and would hide that one is missing
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.2, generator=seeded)
            path = tmp_path_factory.mktemp("source")
            huggingface.save(path, cfg, dict(model.named_parameters()), eod_id=small_tokenizer.eod_id)
            small_tokenizer.save(path)
            made[key] = path
        return made[key]

    return one


@pytest.fixture(scope="module")
def exported(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def one(to: str, weights: str = "fp32", **changes: Any) -> Path:
        require(to)
        if (key := json.dumps([to, weights, changes])) not in made:
            out = tmp_path_factory.mktemp("exported") / "out"
            made[key] = export(make(**changes), to, out, weights=weights).folder
        return made[key]

    return one


def require(to: str) -> None:
    for module in {"onnx": ("onnx", "onnxruntime"), "ctranslate2": ("ctranslate2",)}.get(to, ()):
        pytest.importorskip(module)
    if to == "gguf" and "gguf" not in systems.NAMES:
        pytest.skip("no writer of GGUF is registered")


def ours(source: Path, prompts: list[str] = PROMPTS, count: int = 16) -> list[Any]:
    model = PretrainedGPT.from_pretrained(source)
    found = gptworks.generations(model, prompts, strategy="greedy", max_new_tokens=count)
    return [(each.prompt, each.text, each.tokens, each.finish) for each in found]


def theirs(folder: Path, prompts: list[str] = PROMPTS, count: int = 16) -> list[Any]:
    found = Inference(folder).generations(prompts, max_new_tokens=count)
    return [(each.prompt, each.text, each.tokens, each.finish) for each in found]


# Numbers


@pytest.mark.parametrize("to", ["hf", "torch", "onnx"])
def test_greedy_tokens_are_those_of_our_engine(to: str, make: Make, exported: Callable[..., Path]) -> None:
    expected = ours(make())
    assert len({tuple(tokens) for _, _, tokens, _ in expected}) == len(PROMPTS)
    assert theirs(exported(to)) == expected


@pytest.mark.parametrize("to", ["hf", "torch", "onnx"])
def test_a_text_ends_where_a_document_does(to: str, make: Make, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    require(to)
    (_, _, tokens, finish), *_ = ours(make())
    assert finish == "length"
    source = tmp_path / "source"
    source.mkdir()
    for file in make().iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    small_tokenizer.with_eod(tokens[5]).save(source)  # a token that is known to come
    expected = ours(source, PROMPTS[:1])
    assert expected[0][2:] == (tokens[: tokens.index(tokens[5])], "eod")
    export(source, to, tmp_path / "out")
    assert theirs(tmp_path / "out", PROMPTS[:1]) == expected


def logits_of(folder: Path, to: str, cfg: ModelConfig) -> Callable[..., tuple[Tensor, Any]]:
    """(tokens [B, T], padding on the left of each row, past or None) -> logits, present"""
    if to == "torch":
        program = torch.export.load(folder / "model.pt2").module()

        def run_torch(tokens: Tensor, padding: list[int], past: Any = None) -> tuple[Tensor, Any]:
            empty = torch.zeros(cfg.num_layers, 2, len(tokens), cfg.num_heads, 0, cfg.head_size)
            return program(tokens, torch.tensor(padding), empty if past is None else past)

        return run_torch
    session = pytest.importorskip("onnxruntime").InferenceSession(str(folder / "model.onnx"))

    def run_onnx(tokens: Tensor, padding: list[int], past: Any = None) -> tuple[Tensor, Any]:
        empty = np.zeros((len(tokens), cfg.num_heads, 0, cfg.head_size), np.float32)
        past = past or [empty] * (2 * cfg.num_layers)
        at = np.arange(past[0].shape[2] + tokens.shape[1])[None] - np.array(padding)[:, None]
        mask = (at >= 0).astype(np.int64)
        given = [tokens.numpy(), mask, at.clip(0)[:, -tokens.shape[1] :], *past]
        names = [each.name for each in session.get_inputs()]
        logits, *present = session.run(None, dict(zip(names, given, strict=True)))
        return torch.from_numpy(logits), present

    return run_onnx


@pytest.mark.parametrize("to", ["torch", "onnx"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"gelu": "erf"}, {"gelu": "sigmoid", "tied": False}, {"ffn_size": 56, "num_heads": 2, "layernorm_eps": 1e-5}],
    ids=["tied", "erf", "sigmoid-untied", "narrow"],
)
def test_logits_are_ours(to: str, changes: dict[str, Any], make: Make, exported: Callable[..., Path]) -> None:
    model = PretrainedGPT.from_pretrained(make(**changes))
    tokens = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)[..., :512]
    if to == "torch" and changes:  # what is traced, not traced: that takes seconds, and is seen elsewhere
        opened = huggingface.open(make(**changes), {})
        program = torch_program._Program(folders._source(opened, Tokenizer.from_pretrained(make()), "fp32"))
        empty = torch.zeros(2, 2, 3, model.cfg.num_heads, 0, model.cfg.head_size)
        found, _ = program(tokens, torch.tensor([0, 0, 0]), empty)
    else:
        found, _ = logits_of(exported(to, **changes), to, model.cfg)(tokens, [0, 0, 0])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert expected.abs().max() > 1


@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_a_batch_of_any_size_with_padding_is_read_in_pieces_of_any_length(
    to: str, make: Make, exported: Callable[..., Path]
) -> None:
    """Rows of 9, 5 and 1 tokens, padded on the left, read as a whole, one by one, and 4 + 1 + 4 with a cache."""
    model = PretrainedGPT.from_pretrained(make())
    run = logits_of(exported(to), to, model.cfg)
    lengths = [9, 5, 1]
    padding = [9 - length for length in lengths]
    tokens = torch.randint(0, 512, (3, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        alone = [model(row[None, -length:])[0, :, :512] for row, length in zip(tokens, lengths, strict=True)]
    for pieces in ([9], [4, 1, 4], [1] * 9):
        past, found = None, []
        for piece in tokens.split(pieces, dim=1):
            logits, past = run(piece, padding, past)
            found.append(logits)
        whole = torch.cat(found, dim=1)
        assert whole.shape == (3, 9, 512) and whole.isfinite().all()
        for row, length, expected in zip(whole, lengths, alone, strict=True):
            torch.testing.assert_close(row[-length:], expected, atol=2e-4, rtol=1e-4)
    for rows in (1, 2):
        torch.testing.assert_close(run(tokens[:rows], [0] * rows)[0][0], alone[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"hidden_size": 64}], ids=["tied", "untied", "whole-blocks"])
def test_int8_is_small_and_near(changes: dict[str, Any], make: Make, exported: Callable[..., Path]) -> None:
    small, large = exported("onnx", "int8", **changes), exported("onnx", **changes)
    model = PretrainedGPT.from_pretrained(make(**changes))
    tokens = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(3))
    exact, _ = logits_of(large, "onnx", model.cfg)(tokens, [0, 0])
    near, _ = logits_of(small, "onnx", model.cfg)(tokens, [0, 0])
    spread = float((exact - exact.mean(-1, keepdim=True)).pow(2).mean().sqrt())
    assert 0 < float((near - exact).pow(2).mean().sqrt()) < 0.05 * spread
    assert (near.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9
    sizes = [(each / "model.onnx.data").stat().st_size for each in (small, large)]
    assert sizes[0] < 0.45 * sizes[1]


def test_whole_numbers_are_at_most_half_a_step_away() -> None:
    matrix = np.random.default_rng(1).normal(size=(5, 70)).astype(np.float32)
    matrix[2] = 0
    whole, scale = onnx_graph.quantize(matrix)
    assert whole.shape == (5, 3, 32) and whole.dtype == np.uint8 and scale.shape == (5, 3)
    back = ((whole.astype(np.float32) - 128) * scale[..., None]).reshape(5, 96)
    assert (np.abs(back[:, :70] - matrix) <= np.repeat(scale, 32, 1)[:, :70] * 0.501).all()
    assert (back[:, 70:] == 0).all() and (back[2] == 0).all()


# Files


@pytest.mark.parametrize(("to", "main"), [("hf", "config.json"), ("torch", "model.pt2"), ("onnx", "model.onnx"),
                                          ("gguf", "model.gguf")])  # fmt: skip
def test_what_is_in_a_folder(to: str, main: str, exported: Callable[..., Path], small_tokenizer: Tokenizer) -> None:
    folder = exported(to)
    names = {path.name for path in folder.iterdir()}
    assert names >= {*TOKENIZER_FILES, main, "model.info.json", "README.md", "run.py"}
    info = json.loads((folder / "model.info.json").read_text())
    assert info["target"] == to and info["weights"] == "fp32" and info["model"]["vocab_size"] == 512
    assert set(info["files"]) == names - {"model.info.json"}
    for name, about in info["files"].items():
        content = (folder / name).read_bytes()
        assert about == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    # 12 per block (4 norms, 8 of linear layers), 2 embeddings, the last norm.
    assert len(info["parameters"]) == 12 * 2 + 4
    assert all(each["dtype"] == "float32" for each in info["parameters"])
    sizes = sorted(int(np.prod(each["shape"])) for each in info["parameters"])
    assert sizes[-1] == 512 * 48 and sizes[0] == 48
    readme = (folder / "README.md").read_text()
    assert "pip install " in readme and 'python run.py "Once upon a time" 40' in readme and "512 tokens" in readme
    script = (folder / "run.py").read_text()
    assert "gptworks" not in script
    assert len([line for line in script.splitlines() if line]) <= 22
    compile(script, "run.py", "exec")


def test_the_tokenizer_is_there_under_every_name(exported: Callable[..., Path], small_tokenizer: Tokenizer) -> None:
    folder = exported("torch")
    pair = Tokenizer.from_files(folder / "vocab.json", folder / "merges.txt")
    whole = Tokenizer.from_pretrained(folder)
    text = "On Friday the sea — 大海 — was calm.<|endoftext|>x  \n"
    assert pair.encode(text) == whole.encode(text) == small_tokenizer.encode(text)
    assert pair.vocab_size == whole.vocab_size == 512
    assert pair.eod_id == whole.eod_id == small_tokenizer.eod_id == 511
    special = json.loads((folder / "special_tokens_map.json").read_text())
    assert special == dict.fromkeys(["bos_token", "eos_token", "unk_token"], "<|endoftext|>")


def test_weights_lie_beside_the_graph(exported: Callable[..., Path]) -> None:
    onnx = pytest.importorskip("onnx")
    for weights in ("fp32", "int8"):
        folder = exported("onnx", weights)
        graph = onnx.load_model(str(folder / "model.onnx"), load_external_data=False).graph
        places = []
        for tensor in graph.initializer:
            where = {entry.key: entry.value for entry in tensor.external_data}
            if where:
                assert where["location"] == "model.onnx.data"
                places.append((int(where["offset"]), int(where["length"])))
            else:
                assert len(tensor.raw_data) <= 64
        assert all(begin % (4096 if length >= 4096 else 64) == 0 for begin, length in places)
        ends = [begin + length for begin, length in sorted(places)]
        assert all(end <= begin for end, (begin, _) in zip(ends, sorted(places)[1:], strict=False))
        assert ends[-1] == (folder / "model.onnx.data").stat().st_size


def test_files_are_called_as_asked(make: Make, tmp_path: Path) -> None:
    require("onnx")
    done = export(make(), "onnx", tmp_path / "out", name="gpt-2.en")
    names = {"gpt-2.en.onnx", "gpt-2.en.onnx.data", "gpt-2.en.info.json"}
    assert names <= {file.name for file in done.files}
    assert theirs(done.folder, ["x"], 3)[0][2] == ours(make(), ["x"], 3)[0][2]
    with pytest.raises(UsageError, match=r"--name \.\./x: needs letters"):
        export(make(), "torch", tmp_path / "other", name="../x")


@pytest.mark.parametrize(("to", "weights", "dtype"), [("hf", "fp16", torch.float16), ("hf", "bf16", torch.bfloat16)])
def test_narrow_weights_of_a_hugging_face_folder(
    to: str, weights: str, dtype: torch.dtype, exported: Callable[..., Path]
) -> None:
    opened = huggingface.open(exported(to, weights), {}).require_whole()
    assert {each.dtype for each in opened.tensors.values()} == {dtype}


def test_rows_that_no_token_has_are_left_out_and_told(make: Make, tmp_path: Path) -> None:
    done = export(make(), "hf", tmp_path / "out")
    assert done.notes == ["8 rows of the vocabulary that no token has were left out"]
    assert huggingface.read_config(done.folder).vocab_size == 512


@pytest.mark.parametrize("rules", ["cpm", "plain"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::SyntaxWarning")  # of jieba
def test_a_sentencepiece_tokenizer_comes_with_its_own_script(rules: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("jieba")
    texts = ["我们 在 北京 学习 语言 模型 。", "天气 很 好 ， 我们 走 回 家 。", "hello world"] * 5
    symbols = ["\u2583", "<eod>", "\u2582"] if rules == "cpm" else []
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(tmp_path / "learned"), vocab_size=70, hard_vocab_limit=False,
        minloglevel=3, num_threads=1, user_defined_symbols=symbols,
    )  # fmt: skip
    tokenizer = Tokenizer.from_pretrained(tmp_path / "learned.model")
    (tmp_path / "learned.model").unlink()
    (tmp_path / "learned.vocab").unlink()
    tokenizer_files.write(tmp_path, tokenizer)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"sentencepiece.model", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"}
    imports, encode, decode = tokenizer_files.script(tokenizer)
    text = "我们 天气\n很好 hello"
    code = "\n".join([*imports, f"text, new = {text!r}, []", *encode, f"found = {decode}"])
    code = code.replace('"sentencepiece.model"', repr(str(tmp_path / "sentencepiece.model")))
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["ids"] == tokenizer.encode(text)
    assert space["found"] == tokenizer.decode(space["ids"])


# Refusals


def test_nothing_is_left_of_an_export_that_fails(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, *_: Any) -> None:
        (folder / "model.pt2").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch_program, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        export(make(), "torch", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_used_and_what_lies_beside_it_is_not_touched(make: Make, tmp_path: Path) -> None:
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "precious").write_text("x")
    (tmp_path / "out").mkdir()
    done = export(make(), "hf", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.part"]
    assert (tmp_path / "out.part" / "precious").read_text() == "x"
    assert not any("part" in file.name for file in done.files) and (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("to", "more", "message"),
    [
        ("tflite", {}, "--to tflite: no such target. Known: hf, onnx, torch, gguf, ctranslate2."),
        ("torch", {"weights": "int8"}, "--weights int8: --to torch has fp32."),
        ("hf", {"tokenizer": "gpt2"}, "gpt2 has 50,257 tokens, but the model only 520"),
        ("hf", {"tokenizer": "no/where"}, "no/where: not a tokenizer"),
    ],
)
def test_what_is_refused(to: str, more: dict[str, str], message: str, make: Make, tmp_path: Path) -> None:
    with pytest.raises(gptworks.GPTWorksError, match=message.replace("(", r"\(")):
        export(make(), to, tmp_path / "out", **more)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_in_use_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export(make(), "hf", tmp_path)
    with pytest.raises(CheckpointError, match="kept: exists, and is a file"):
        export(make(), "hf", tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_weights_without_a_tokenizer_take_one_that_is_named(
    make: Make, small_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((make() / name).read_bytes())
    with pytest.raises(TokenizerError, match=r"has no tokenizer. Name one with --tokenizer"):
        export(source, "hf", tmp_path / "out")
    export(source, "hf", tmp_path / "out", tokenizer=make())
    assert theirs(tmp_path / "out", ["x"], 4) == ours(make(), ["x"], 4)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        export(tmp_path / "nowhere", "hf", tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "module", "extra"),
    [("onnx", "onnx", "export"), ("ctranslate2", "ctranslate2", "ctranslate2")],
)
def test_what_is_not_installed_is_named(
    to: str, module: str, extra: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"needs {module}, which is not installed: pip install \"gptworks\[{extra}\]"):
        export(make(), to, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("to", "module", "extra"),
    [("hf", "transformers", "export"), ("onnx", "onnxruntime", "export")],
)
def test_a_runtime_that_is_not_installed_is_named(
    to: str, module: str, extra: str, exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(to)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"needs {module}, which is not installed: pip install \"gptworks\[{extra}\]"):
        Inference(folder)


def test_infer_refuses_what_it_cannot_do(exported: Callable[..., Path], make: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        Inference(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no weights of a known runtime"):
        Inference(tmp_path)
    with pytest.raises(CheckpointError, match=r"no file \*.info.json .*gptworks generate"):
        Inference(make())
    (tmp_path / "model.pt2").write_bytes(b"")
    (tmp_path / "model.info.json").write_text('{"model": {"num_layers": "two"}}')
    with pytest.raises(CheckpointError, match=r"model.info.json: not the info of an export"):
        Inference(tmp_path)
    inference = Inference(exported("torch"))
    with pytest.raises(GenerationError, match="prompt 2 is empty"):
        inference.generations(["x", ""], max_new_tokens=3)
    with pytest.raises(GenerationError, match=r"context is 64\. Ask for at most 63"):
        inference.generations("x", max_new_tokens=64)
    with pytest.raises(GenerationError, match="Shorten it to 63 or fewer"):
        inference.generations("x" * 64, max_new_tokens=1)
    with pytest.raises(UsageError, match="--max-new-tokens: got 0"):
        inference.generations("x", max_new_tokens=0)
    assert len(inference.generations("x", max_new_tokens=63)[0].tokens) == 63


def test_the_help_names_every_target() -> None:
    assert TARGETS.replace(" or ", ", ").split(", ") == list(registry.NAMES)
    for name in registry.NAMES:
        target = registry.target(name)
        assert name == target.NAME and target.WEIGHTS[0] == "fp32"
    assert folders.INFO_SUFFIX == ".info.json"


def test_the_help_names_every_kind_of_weights() -> None:
    kinds = dict(each.split(" for ") for each in WEIGHTS.split("; ")[1:])
    offered = {name: registry.target(name).WEIGHTS for name in registry.NAMES}
    assert set(kinds) == {kind for some in offered.values() for kind in some} - {"fp32"}
    for kind, names in kinds.items():
        assert names.split(", ") == [name for name, some in offered.items() if kind in some]
