"""onnx: a graph with the keys and values of what was read before as inputs, its weights in a file beside it.

The graph is written operator by operator (twenty to fifty per block, all but one of ONNX itself), so that nothing
depends on how a tracer sees our model. Inputs and outputs have the names that optimum uses: what runs its graphs runs
ours. Shapes: B rows, P tokens that were read before, T new ones, S = P + T, N heads, K heads of keys and values,
G = N / K heads that share one, H head size, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gptworks import architecture
from gptworks.config.schema import ModelConfig
from gptworks.export.contract import Source, Written, array, described, import_or_explain
from gptworks.model.rope import attention_factor, frequencies

NAME = "onnx"
TITLE = "ONNX graph with a KV cache, for onnxruntime"
WEIGHTS = ("fp32", "int8")
KNOWN = dict(architecture.LLAMA)
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
        types = {}
        for value in values:
            kind = value.type.tensor_type
            sizes = [str(size.dim_param or size.dim_value) for size in kind.shape.dim]
            types[value.name] = f"{onnx.TensorProto.DataType.Name(kind.elem_type).lower()} [{', '.join(sizes)}]"
        return types

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
        self.stored = source.tensors
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

    def read(self, name: str) -> Any:
        """A tensor of ours, in which all queries come first, then all keys, then all values."""
        content = array(self.stored[name])
        return by_kind(content, self.cfg) if architecture.role_of(name).fused else content

    def weight(self, name: str, values: Any = None) -> str:
        """A tensor in the file beside the graph, which has no limit of 2 GB."""
        if name in self._made:
            return name
        content = np.ascontiguousarray(self.read(name) if values is None else values)
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

    def quantized(self, name: str) -> tuple[str, str, int, int]:
        """Weights as whole numbers, and a scale for every 32 of them; how many outputs and inputs the matrix has."""
        codes, scales = f"{name}_int8", f"{name}_scale"
        if codes not in self._made:
            matrix = self.read(name)
            self._made[codes + ":shape"] = matrix.shape
            whole, scale = quantize(matrix)
            self.weight(codes, whole)
            self.weight(scales, scale.reshape(-1))
        return codes, scales, *self._made[codes + ":shape"]

    def multiply(self, name: str, x: str) -> str:
        """x [B, T, in] with a matrix of a block, which the graph has as [in, out]."""
        if self.is_int8:
            codes, scales, outputs, inputs = self.quantized(name)
            # accuracy_level 4: products of whole numbers, as llama.cpp's q8_0 has them.
            sizes: dict[str, Any] = {"K": inputs, "N": outputs, "bits": 8, "block_size": _BLOCK, "accuracy_level": 4}
            return self.op("MatMulNBits", x, codes, scales, domain="com.microsoft", **sizes)
        if name not in self._made:
            self.weight(name, self.read(name).T)
        return self.op("MatMul", x, name)

    def head(self, x: str) -> str:
        """Logits. The head may be the word embedding: Gemm takes it as it is, where MatMul would need a turned copy."""
        name = "wte.weight" if self.cfg.tied else "head.weight"
        if self.is_int8:
            return self.multiply(name, x)
        flat = self.op("Reshape", x, self.constant([-1, self.cfg.hidden_size]))
        flat = self.op("Gemm", flat, self.weight(name), transB=1)
        shape = self.op("Concat", self.op("Shape", "input_ids"), self.constant([self.cfg.vocab_size]), axis=0)
        return self.op("Reshape", flat, shape)

    def linear(self, name: str, x: str) -> str:
        product, bias = self.multiply(f"{name}.weight", x), f"{name}.bias"
        return self.op("Add", product, self.weight(bias)) if bias in self.stored else product

    def norm(self, name: str, x: str) -> str:
        if self.cfg.norm == "rmsnorm":
            return self.rms_norm(name, x)
        scale, bias = self.weight(f"{name}.weight"), f"{name}.bias"
        shift = [self.weight(bias)] if bias in self.stored else []
        return self.op("LayerNormalization", x, scale, *shift, axis=-1, epsilon=self.cfg.layernorm_eps)

    def rms_norm(self, name: str, x: str) -> str:
        """Written out: ONNX has it as an operator from opset 23 on, and onnxruntime makes one of these."""
        squares = self.op("Pow", x, self.constant(2, np.float32))
        mean = self.op("ReduceMean", squares, self.constant([-1]), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.constant(self.cfg.layernorm_eps, np.float32)))
        return self.op("Mul", self.op("Div", x, root), self.weight(f"{name}.weight"))

    def words(self) -> str:
        """The embedding of input_ids; in int8 the head's own numbers, where the two are tied."""
        name = "wte.weight"
        if not self.is_int8:
            return self.op("Gather", self.weight(name), "input_ids")
        codes, scales, words, size = self.quantized(name)
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
        bias, turns = self.attention_bias(), self.turns() if cfg.positions == "rope" else None
        x = self.words()
        if cfg.positions == "learned":
            x = self.op("Add", x, self.op("Gather", self.weight("wpe.weight"), "position_ids"))
        for layer in range(cfg.num_layers):
            x = self.block(layer, x, bias, turns)
        self.op("Identity", self.head(self.norm("ln_f", x)), outputs=["logits"])

        def value(name: str, kind: int, *shape: str | int) -> Any:
            return helper.make_tensor_value_info(name, kind, shape)

        def caches(prefix: str, length: str) -> list[Any]:
            shape = ("batch", cfg.num_kv_heads, length, cfg.head_size)
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
        if self.cfg.sliding_window:
            behind = self.op("Sub", queries, self.constant(self.cfg.sliding_window))
            visible = self.op("And", visible, self.op("Greater", keys, behind))
        real = self.op("Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
        allowed = self.op("And", visible, self.op("Unsqueeze", real, self.constant([1, 2])))
        lowest = self.constant(np.finfo(np.float32).min, np.float32)
        return self.op("Where", allowed, self.constant(0, np.float32), lowest)

    def turns(self) -> tuple[str, str]:
        """[B, T, 1, H]: of each number of a head the cosine, and the sine that its partner is multiplied by."""
        places = self.op("Cast", "position_ids", to=self.onnx.TensorProto.FLOAT)
        places = self.op("Unsqueeze", places, self.constant([2, 3]))
        angles = self.op("Mul", places, self.weight("frequencies", frequencies(self.cfg).numpy()))
        cos, sin = self.op("Cos", angles), self.op("Sin", angles)
        if (strength := attention_factor(self.cfg.rope_scaling)) != 1:
            cos, sin = (self.op("Mul", each, self.constant(strength, np.float32)) for each in (cos, sin))
        return self.op("Concat", cos, cos, axis=-1), self.op("Concat", self.op("Neg", sin), sin, axis=-1)

    def turn(self, x: str, turns: tuple[str, str]) -> str:
        """x [B, T, heads, H]: number i and number i + H/2 of a head are a pair."""
        cos, sin = turns
        first, second = f"{x}_first", f"{x}_second"
        self.op("Split", x, outputs=[first, second], axis=-1, num_outputs=2)
        partners = self.op("Concat", second, first, axis=-1)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", partners, sin))

    def block(self, layer: int, x: str, bias: str, turns: tuple[str, str] | None) -> str:
        name = f"blocks.{layer}"
        attended = self.attention(layer, self.norm(f"{name}.ln1", x), bias, turns)
        x = self.op("Add", x, self.linear(f"{name}.attn.out", attended))
        return self.op("Add", x, self.feed_forward(f"{name}.mlp", self.norm(f"{name}.ln2", x)))

    def attention(self, layer: int, x: str, bias: str, turns: tuple[str, str] | None) -> str:
        cfg, name = self.cfg, f"blocks.{layer}.attn"
        parts = [f"{kind}_{layer}" for kind in "qkv"]
        sizes = [heads * cfg.head_size for heads in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)]
        self.op("Split", self.linear(f"{name}.qkv", x), self.constant(sizes), outputs=parts, axis=-1)
        q, k, v = (self.op("Reshape", part, self.constant([0, 0, -1, cfg.head_size])) for part in parts)
        if cfg.qk_norm:
            q, k = self.rms_norm(f"{name}.q_norm", q), self.rms_norm(f"{name}.k_norm", k)
        if turns:
            q, k = self.turn(q, turns), self.turn(k, turns)
        q, k, v = (self.op("Transpose", each, perm=[0, 2, 1, 3]) for each in (q, k, v))
        past, present = f"past_key_values.{layer}", f"present.{layer}"
        k = self.op("Concat", f"{past}.key", k, outputs=[f"{present}.key"], axis=2)
        v = self.op("Concat", f"{past}.value", v, outputs=[f"{present}.value"], axis=2)
        if cfg.heads_per_kv > 1:
            k, v = self.shared(k), self.shared(v)
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.constant(cfg.head_size**-0.5, np.float32))
        weights = self.op("Softmax", self.op("Add", scores, bias), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        return self.op("Reshape", mixed, self.constant([0, 0, cfg.num_heads * cfg.head_size]))

    def shared(self, x: str) -> str:
        """[B, K, S, H] -> [B, N, S, H]: each head of keys or values once for every head that looks at it."""
        cfg = self.cfg
        wide = self.op(
            "Expand", self.op("Unsqueeze", x, self.constant([2])), self.constant([1, 1, cfg.heads_per_kv, 1, 1])
        )
        # The number of tokens may be any, and so may that of rows: 0 keeps the one, -1 finds the other.
        return self.op("Reshape", wide, self.constant([0, cfg.num_heads, -1, cfg.head_size]))

    def feed_forward(self, name: str, x: str) -> str:
        inner = self.linear(f"{name}.up", x)
        if self.cfg.mlp == "swiglu":
            gate = self.linear(f"{name}.gate", x)
            return self.linear(f"{name}.down", self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), inner))
        return self.linear(f"{name}.down", self.activate(inner))

    def activate(self, x: str) -> str:
        if self.cfg.gelu == "sigmoid":
            return self.op("Mul", x, self.op("Sigmoid", self.op("Mul", x, self.constant(1.702, np.float32))))
        return self.op("Gelu", x, approximate="tanh" if self.cfg.gelu == "tanh" else "none")


def by_kind(rows: Any, cfg: ModelConfig) -> Any:
    """(K, [G queries | key | value], H) along dimension 0 -> all queries, all keys, all values."""
    grouped = rows.reshape(cfg.num_kv_heads, cfg.heads_per_kv + 2, cfg.head_size, *rows.shape[1:])
    pieces = np.split(grouped, [cfg.heads_per_kv, cfg.heads_per_kv + 1], axis=1)
    return np.concatenate([piece.reshape(-1, *rows.shape[1:]) for piece in pieces])


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
            f"past = [np.zeros((1, {cfg.num_kv_heads}, 0, {cfg.head_size}), np.float32)] * {2 * cfg.num_layers}",
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
        self.empty = [np.zeros((1, cfg.num_kv_heads, 0, cfg.head_size), np.float32)] * (2 * cfg.num_layers)

    def continue_greedily(self, tokens: Sequence[int], max_new_tokens: int, eod_id: int | None) -> list[int]:
        new: list[int] = []
        now, past = list(tokens), self.empty
        while len(new) < max_new_tokens and (not new or new[-1] != eod_id):
            at = np.arange(len(tokens) + len(new), dtype=np.int64)[None]
            inputs = [np.array([now], np.int64), np.ones_like(at), at[:, -len(now) :], *past]
            logits, *past = self.session.run(None, dict(zip(self.names, inputs, strict=True)))
            now = [int(logits[0, -1].argmax())]
            new += now
        return new
