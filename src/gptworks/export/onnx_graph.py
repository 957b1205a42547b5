"""onnx: a graph with the keys and values of what was read before as inputs, its weights in a file beside it.

The graph is written operator by operator (about twenty per block, all but one of ONNX itself), so that nothing depends
on how a tracer sees our model. Inputs and outputs have the names that optimum uses: what runs its graphs runs ours.
Shapes: B rows, P tokens that were read before, T new ones, S = P + T, N heads, H head size, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gptworks import architecture
from gptworks.checkpoint.rules import split
from gptworks.checkpoint.systems.huggingface import TABLE
from gptworks.config.schema import ModelConfig
from gptworks.export.contract import Source, Written, array, described, import_or_explain

NAME = "onnx"
TITLE = "ONNX graph with a KV cache, for onnxruntime"
WEIGHTS = ("fp32", "int8")
KNOWN = architecture.GPT2
RUNTIME = ("onnxruntime", "numpy")

_OPSET, _IR = 20, 9  # Gelu is an operator from 20 on
_BLOCK = 32  # weights that share one scale in int8
_PAGE = 4096  # what maps the file wants large tensors to begin at


def require() -> None:
    import_or_explain("onnx", "--to onnx", "export")


def write(folder: Path, stem: str, source: Source, weights: str) -> Written:
    onnx = import_or_explain("onnx", "--to onnx", "export")
    file = folder / f"{stem}.onnx"
    data = file.with_name(f"{file.name}.data")
    with data.open("wb") as out:
        graph = _Graph(onnx, source, weights, out, data.name)
        model = graph.model()
    onnx.save_model(model, str(file))
    onnx.checker.check_model(str(file))

    def words(values: Any) -> dict[str, str]:
        found = {}
        for value in values:
            kind = value.type.tensor_type
            sizes = [str(size.dim_param or size.dim_value) for size in kind.shape.dim]
            found[value.name] = f"{onnx.TensorProto.DataType.Name(kind.elem_type).lower()} [{', '.join(sizes)}]"
        return found

    return Written(graph.parameters, words(model.graph.input), words(model.graph.output))


class _Graph:
    """Operators in the order in which they are added; weights go to the file as they are met."""

    def __init__(self, onnx: Any, source: Source, weights: str, out: BinaryIO, location: str) -> None:
        self.onnx, self.cfg, self.is_int8, self.out, self.location = (
            onnx,
            source.model,
            weights == "int8",
            out,
            location,
        )
        self.stored = split(TABLE, source.tensors, source.model)  # matrices [in, out], all q then all k then all v
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.parameters: list[dict[str, Any]] = []
        self._made: dict[str, Any] = {}

    # Pieces of a graph

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] = (), domain: str = "", **attributes: Any) -> str:
        """Gives the name of its (first) output."""
        names = list(outputs) or [f"{kind}_{len(self.nodes)}"]
        self.nodes.append(
            self.onnx.helper.make_node(kind, inputs, names, f"{kind}_{len(self.nodes)}", domain=domain, **attributes)
        )
        return names[0]

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """A number or a few, inside the graph."""
        content = np.asarray(values, dtype)
        name = f"constant_{content.dtype}_{'_'.join(map(str, content.shape))}:{content.tolist()}"
        if name not in self._made:
            self._made[name] = None
            self.tensors.append(self.onnx.numpy_helper.from_array(content, name))
        return name

    def weight(self, name: str, values: Any = None) -> str:
        """A tensor in the file beside the graph, which has no limit of 2 GB."""
        if name in self._made:
            return name
        content = array(self.stored[name]) if values is None else np.ascontiguousarray(values)
        align = _PAGE if content.nbytes >= _PAGE else 64
        self.out.write(b"\0" * (-self.out.tell() % align))
        tensor = self.onnx.TensorProto(name=name, dims=content.shape, data_location=self.onnx.TensorProto.EXTERNAL)
        tensor.data_type = self.onnx.helper.np_dtype_to_tensor_dtype(content.dtype)
        where = {"location": self.location, "offset": str(self.out.tell()), "length": str(content.nbytes)}
        for key, value in where.items():
            tensor.external_data.add(key=key, value=value)
        self.out.write(content.tobytes())
        self._made[name] = None
        self.tensors.append(tensor)
        self.parameters.append(described(name, content.shape, content.dtype))
        return name

    def quantized(self, name: str, *, transposed: bool) -> tuple[str, str, int, int]:
        """Weights as whole numbers, and a scale for every 32 of them; how many outputs and inputs the matrix has."""
        codes, scales = f"{name}_int8", f"{name}_scale"
        if codes not in self._made:
            matrix = array(self.stored[name])
            self._made[codes + ":shape"] = (matrix.T if transposed else matrix).shape
            whole, scale = quantize(matrix.T if transposed else matrix)
            self.weight(codes, whole)
            self.weight(scales, scale.reshape(-1))
        return codes, scales, *self._made[codes + ":shape"]

    def multiply(self, name: str, x: str, *, transposed: bool) -> str:
        """x [B, T, in] with a matrix that is stored as [in, out], or as [out, in]."""
        if self.is_int8:
            codes, scales, outputs, inputs = self.quantized(name, transposed=transposed)
            # accuracy_level 4: products of whole numbers, as llama.cpp's q8_0 has them.
            sizes: dict[str, Any] = {"K": inputs, "N": outputs, "bits": 8, "block_size": _BLOCK, "accuracy_level": 4}
            return self.op("MatMulNBits", x, codes, scales, domain="com.microsoft", **sizes)
        if transposed:
            return self.op("MatMul", x, self.weight(name))
        # The word embedding again: Gemm takes it as it is, where MatMul would need a turned copy.
        flat = self.op("Reshape", x, self.constant([-1, self.cfg.hidden_size]))
        flat = self.op("Gemm", flat, self.weight(name), transB=1)
        shape = self.op("Concat", self.op("Shape", "input_ids"), self.constant([self.cfg.vocab_size]), axis=0)
        return self.op("Reshape", flat, shape)

    def linear(self, name: str, x: str) -> str:
        return self.op("Add", self.multiply(f"{name}.weight", x, transposed=True), self.weight(f"{name}.bias"))

    def norm(self, name: str, x: str) -> str:
        scale, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.cfg.layernorm_eps)

    def words(self) -> str:
        """The embedding of input_ids; in int8 the head's own numbers, where the two are tied."""
        name = "transformer.wte.weight"
        if not self.is_int8:
            return self.op("Gather", self.weight(name), "input_ids")
        codes, scales, words, size = self.quantized(name, transposed=False)
        blocks = -(-size // _BLOCK)
        rows = self.op("Cast", self.op("Gather", codes, "input_ids"), to=self.onnx.TensorProto.FLOAT)
        rows = self.op("Sub", rows, self.constant(128, np.float32))
        scale = self.op("Reshape", scales, self.constant([words, blocks, 1]))
        rows = self.op("Mul", rows, self.op("Gather", scale, "input_ids"))
        rows = self.op("Reshape", rows, self.constant([0, 0, blocks * _BLOCK]))
        return self.op("Slice", rows, self.constant([0]), self.constant([size]), self.constant([2]))

    # The model

    def model(self) -> Any:
        cfg, helper, proto = self.cfg, self.onnx.helper, self.onnx.TensorProto
        bias = self.attention_bias()
        x = self.op("Add", self.words(), self.op("Gather", self.weight("transformer.wpe.weight"), "position_ids"))
        for layer in range(cfg.num_layers):
            x = self.block(layer, x, bias)
        head = "transformer.wte.weight" if cfg.tied else "lm_head.weight"
        logits = self.multiply(head, self.norm("transformer.ln_f", x), transposed=False)
        self.op("Identity", logits, outputs=["logits"])

        def value(name: str, kind: int, *shape: str | int) -> Any:
            return helper.make_tensor_value_info(name, kind, shape)

        def caches(prefix: str, length: str) -> list[Any]:
            shape = ("batch", cfg.num_heads, length, cfg.head_size)
            names = [f"{prefix}.{layer}.{kind}" for layer in range(cfg.num_layers) for kind in ("key", "value")]
            return [value(name, proto.FLOAT, *shape) for name in names]

        graph = helper.make_graph(
            self.nodes,
            "gpt",
            [
                value("input_ids", proto.INT64, "batch", "length"),
                value("attention_mask", proto.INT64, "batch", "past + length"),
                value("position_ids", proto.INT64, "batch", "length"),
                *caches("past_key_values", "past"),
            ],
            [
                value("logits", proto.FLOAT, "batch", "length", cfg.vocab_size),
                *caches("present", "past + length"),
            ],
            self.tensors,
        )
        opsets = [helper.make_opsetid("", _OPSET)]
        if self.is_int8:
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        return helper.make_model(graph, producer_name="gptworks", opset_imports=opsets, ir_version=_IR)

    def attention_bias(self) -> str:
        """[B, 1, T, S]: 0 where a token may look, else the lowest number there is (a row of padding sees nothing)."""

        def length(name: str) -> str:
            return self.op("Squeeze", self.op("Shape", name, start=1, end=2))

        total = length("attention_mask")
        past = self.op("Sub", total, length("input_ids"))
        zero, one = self.constant(0), self.constant(1)
        keys = self.op("Range", zero, total, one)
        queries = self.op("Unsqueeze", self.op("Range", past, total, one), self.constant([1]))
        visible = self.op("LessOrEqual", keys, queries)
        real = self.op("Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
        allowed = self.op("And", visible, self.op("Unsqueeze", real, self.constant([1, 2])))
        lowest = self.constant(np.finfo(np.float32).min, np.float32)
        return self.op("Where", allowed, self.constant(0, np.float32), lowest)

    def block(self, layer: int, x: str, bias: str) -> str:
        name = f"transformer.h.{layer}"
        attended = self.attention(layer, self.norm(f"{name}.ln_1", x), bias)
        x = self.op("Add", x, self.linear(f"{name}.attn.c_proj", attended))
        inner = self.activate(self.linear(f"{name}.mlp.c_fc", self.norm(f"{name}.ln_2", x)))
        return self.op("Add", x, self.linear(f"{name}.mlp.c_proj", inner))

    def attention(self, layer: int, x: str, bias: str) -> str:
        cfg = self.cfg
        parts = [f"{kind}_{layer}" for kind in "qkv"]
        qkv = self.linear(f"transformer.h.{layer}.attn.c_attn", x)
        self.op("Split", qkv, outputs=parts, axis=-1, num_outputs=3)
        heads = self.constant([0, 0, cfg.num_heads, cfg.head_size])
        q, k, v = (self.op("Transpose", self.op("Reshape", part, heads), perm=[0, 2, 1, 3]) for part in parts)
        past, present = f"past_key_values.{layer}", f"present.{layer}"
        k = self.op("Concat", f"{past}.key", k, outputs=[f"{present}.key"], axis=2)
        v = self.op("Concat", f"{past}.value", v, outputs=[f"{present}.value"], axis=2)
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.constant(cfg.head_size**-0.5, np.float32))
        weights = self.op("Softmax", self.op("Add", scores, bias), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        return self.op("Reshape", mixed, self.constant([0, 0, cfg.hidden_size]))

    def activate(self, x: str) -> str:
        if self.cfg.gelu == "sigmoid":
            return self.op("Mul", x, self.op("Sigmoid", self.op("Mul", x, self.constant(1.702, np.float32))))
        return self.op("Gelu", x, approximate="tanh" if self.cfg.gelu == "tanh" else "none")


def quantize(matrix: Any) -> tuple[Any, Any]:
    """[out, in] -> whole numbers around 128 [out, blocks, 32] and the scale of each block [out, blocks]."""
    outputs, inputs = matrix.shape
    blocks = -(-inputs // _BLOCK)
    padded = np.zeros((outputs, blocks * _BLOCK), np.float32)
    padded[:, :inputs] = matrix
    grouped = padded.reshape(outputs, blocks, _BLOCK)
    scale = np.abs(grouped).max(-1) / np.float32(127)
    whole = np.rint(grouped / np.where(scale > 0, scale, 1)[..., None]) + 128
    return whole.astype(np.uint8), scale.astype(np.float32)


def script(stem: str, source: Source) -> tuple[list[str], list[str]]:
    cfg = source.model
    return (
        ["import numpy as np", "from onnxruntime import InferenceSession"],
        [
            f'model = InferenceSession("{stem}.onnx")',
            "names = [each.name for each in model.get_inputs()]",
            "new, now = [], ids",
            f"past = [np.zeros((1, {cfg.num_heads}, 0, {cfg.head_size}), np.float32)] * {2 * cfg.num_layers}",
            f"while len(new) < count and new[-1:] != [{source.tokenizer.eod_id}]:",
            "    at = np.arange(len(ids + new))[None]",
            "    given = [np.array([now]), at * 0 + 1, at[:, -len(now) :], *past]",
            "    logits, *past = model.run(None, dict(zip(names, given)))",
            "    now = [int(logits[0, -1].argmax())]",
            "    new += now",
        ],
    )


def recognise(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.onnx"))), None)


def open(file: Path, model: ModelConfig) -> "_Runner":
    return _Runner(file, model)


class _Runner:
    def __init__(self, file: Path, cfg: ModelConfig) -> None:
        runtime = import_or_explain("onnxruntime", f"{file}: an ONNX graph", "export")
        self.session: Any = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.names = [each.name for each in self.session.get_inputs()]
        self.empty = [np.zeros((1, cfg.num_heads, 0, cfg.head_size), np.float32)] * (2 * cfg.num_layers)

    def continue_greedily(self, tokens: Sequence[int], max_new_tokens: int, eod_id: int | None) -> list[int]:
        new: list[int] = []
        now, past = list(tokens), self.empty
        while len(new) < max_new_tokens and (not new or new[-1] != eod_id):
            at = np.arange(len(tokens) + len(new), dtype=np.int64)[None]
            given = [np.array([now], np.int64), np.ones_like(at), at[:, -len(now) :], *past]
            logits, *past = self.session.run(None, dict(zip(self.names, given, strict=True)))
            now = [int(logits[0, -1].argmax())]
            new += now
        return new
