"""What a block holds that depends on which GPT it is: norms, positions, activation, each forward and backward.

The order in which a block uses them is in block_forward.py and block_backward.py. Never imports torch.
"""

from typing import Any

from gptworks import architecture
from gptworks.config.schema import ModelConfig
from gptworks.plan.block_shape import BlockShape
from gptworks.plan.ledger import Ledger
from gptworks.plan.sizes import FP32

# The variants that are counted here.
KNOWN = dict(architecture.LLAMA)


def kind_of(model: ModelConfig, length: int) -> dict[str, Any]:
    """The fields of a BlockShape that say which GPT it is, whatever its sizes."""
    return {
        "gelu": model.gelu,
        "norm": model.norm,
        "mlp": model.mlp,
        "positions": model.positions,
        "head_norms": model.qk_norm,
        "windowed": 0 < model.sliding_window < length,
    }


def norm(ledger: Ledger, s: BlockShape, number: int) -> None:
    """x is there already; what is kept is its fp32 copy in a narrow type, itself else."""
    size = s.own_tokens * s.hidden * FP32
    wide = size if s.narrow else 0
    if s.norm == "rmsnorm":
        _scaled_by_rms(ledger, f"{number}", f"y{number}", s.stream, size, s.own_tokens)
        return
    ledger.keep(**{f"wide{number}": wide, f"stats{number}": 2 * s.own_tokens * FP32})
    ledger.use(wide_out=wide)
    ledger.keep(**{f"y{number}": s.stream})
    ledger.drop("wide_out")


def norm_backward(ledger: Ledger, s: BlockShape, number: int) -> None:
    wide = s.own_tokens * s.hidden * FP32 if s.narrow else 0
    if s.norm == "rmsnorm":
        _scaled_by_rms_backward(
            ledger, f"{number}", "y_gradient", "x_gradient", s.stream, s.own_tokens * s.hidden * FP32
        )
    elif s.narrow:
        ledger.use(wide_in=wide)
        ledger.drop("y_gradient")
        ledger.use(wide_x=wide)
        ledger.drop("wide_in", f"wide{number}", f"stats{number}")
        ledger.use(x_gradient=s.stream)
        ledger.drop("wide_x")
    else:
        ledger.use(x_gradient=s.stream)
        ledger.drop("y_gradient", f"stats{number}")
    ledger.use(summed=s.stream)
    ledger.drop("x_gradient", "stream_gradient", "summed")
    ledger.use(stream_gradient=s.stream)


def _scaled_by_rms(ledger: Ledger, name: str, out: str, size: int, wide: int, count: int) -> None:
    """model/rms.py keeps x, which is there, and one number for each of `count` norms."""
    ledger.use(wide_in=wide if size < wide else 0)
    ledger.keep(**{f"stats{name}": count * FP32})
    ledger.use(scaled=wide)
    if size < wide:
        ledger.keep(**{out: size})
        ledger.drop("wide_in", "scaled")
    else:
        ledger.drop("scaled")
        ledger.keep(**{out: size})


def _scaled_by_rms_backward(ledger: Ledger, name: str, incoming: str, out: str, size: int, wide: int) -> None:
    is_narrow = size < wide
    ledger.use(normal=wide, wide_in=wide if is_narrow else 0)
    ledger.use(for_weight=wide)
    ledger.drop("for_weight")
    ledger.use(of_scaled=wide)
    ledger.drop("wide_in")
    if is_narrow:
        ledger.use(narrowed=size)
    ledger.drop("normal", "of_scaled", "narrowed", incoming, f"stats{name}")
    ledger.use(**{out: size})


HEADS = ("q_normed", "k_normed", "stats_q", "stats_k", "q_turned", "k_turned")


def queries_and_keys(ledger: Ledger, s: BlockShape) -> None:
    """Normed head by head, and turned."""
    for name, size in (("q", s.in_heads), ("k", s.in_kv_heads)):
        wide = size // s.compute * FP32
        if s.head_norms:
            _scaled_by_rms(ledger, f"_{name}", f"{name}_normed", size, wide, size // s.compute // s.head_size)
    for name, size in (("q", s.in_heads), ("k", s.in_kv_heads)):
        wide = size // s.compute * FP32
        if s.positions == "rope":
            copied = s.narrow or not s.head_norms  # what lies in qkv is not in one piece
            ledger.use(turned_wide=wide if copied else 0, partners=wide, tables=2 * wide // s.rows)
            ledger.use(out=wide)
            if s.narrow:
                ledger.keep(**{f"{name}_turned": size})
                ledger.drop("out")
            else:
                ledger.drop("out")
                ledger.keep(**{f"{name}_turned": size})
            ledger.drop("turned_wide", "partners", "tables")
    if s.positions == "rope":
        ledger.drop("q_normed", "k_normed")
    elif s.repeated and not s.head_norms:  # between the queries of two groups lie a key and a value
        ledger.keep(q_turned=s.in_heads)


def queries_and_keys_backward(ledger: Ledger, s: BlockShape) -> None:
    ledger.drop("k_repeated", "v_repeated")
    if s.repeated:
        for name in ("k_gradient", "v_gradient"):
            ledger.use(of_shared=s.in_kv_heads)
            ledger.drop(name, "of_shared")
            ledger.use(**{name: s.in_kv_heads})
    for name, size in (("k", s.in_kv_heads), ("q", s.in_heads)):
        wide = size // s.compute * FP32
        if s.positions == "rope":
            ledger.use(turned_wide=wide, partners=wide, tables=2 * wide // s.rows)
            ledger.use(turned_back=wide)
            if s.narrow:
                ledger.use(narrowed=size)
            ledger.drop("turned_wide", "partners", "tables", "turned_back", "narrowed", f"{name}_gradient")
            ledger.drop(f"{name}_turned")
            ledger.use(**{f"{name}_gradient": size})
        if s.head_norms:
            ledger.drop(f"{name}_gradient")
            ledger.use(of_normed=size)
            _scaled_by_rms_backward(ledger, f"_{name}", "of_normed", f"{name}_gradient", size, wide)
            ledger.drop(f"{name}_normed")
    if s.head_norms:
        ledger.drop("qkv")


def activation(ledger: Ledger, s: BlockShape) -> None:
    """Between the matrices of the feed-forward layer; what it gives is `g`."""
    if s.mlp == "gelu" and s.gelu == "sigmoid":
        ledger.use(scaled=s.inner)
        ledger.keep(sigmoid=s.inner)
        ledger.drop("scaled")
    ledger.keep(g=s.inner)


def gelu_backward(ledger: Ledger, s: BlockShape) -> None:
    if s.gelu == "sigmoid" or (s.gelu == "tanh" and s.cpu and not s.narrow):
        ledger.use(a=s.inner, b=s.inner)
        ledger.drop("a")
    else:
        ledger.use(b=s.inner)
    ledger.drop("inner_gradient", "u", "b", "sigmoid")
    ledger.use(inner_gradient=s.inner)
