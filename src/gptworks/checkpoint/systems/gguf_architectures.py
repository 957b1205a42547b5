"""The architectures of GGUF files that we compute: names of tensors, and settings in both directions.

llama (Llama, Mistral, SmolLM, TinyLlama), qwen2 and qwen3, beside gpt2. A Llama's rows of queries and keys stand in
another order there: llama.cpp turns neighbours, number 2i with 2i + 1, and we number i with i + half of the head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gptworks import architecture
from gptworks.architecture import ANY, Known
from gptworks.checkpoint.formats.gguf_file import GgufFile, Value
from gptworks.checkpoint.lazy_tensor import LazyTensor, LazyTensors, in_memory
from gptworks.checkpoint.rules import Rule, Table, block_rules
from gptworks.config.schema import ModelConfig, RopeScalingConfig
from gptworks.errors import CheckpointError
from gptworks.model import rope

TITLE = "GGUF file of llama.cpp"
ROPE_FREQS = "rope_freqs.weight"
# Settings that change what is computed, with the value at which they do not; `sliding_window` of these architectures
# is read by nobody, and llama.cpp too computes without.
_UNSUPPORTED = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "logit_scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "attention.clamp_kqv": 0.0,
}
_COUNTS = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "ffn_size": "feed_forward_length",
    "max_positions": "context_length",
}
_KV_COUNTS = {"num_kv_heads": "attention.head_count_kv", "head_size": "attention.key_length"}


@dataclass(frozen=True)
class Architecture:
    name: str  # general.architecture
    table: Table
    epsilon: str  # key of it
    needs: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # values of our keys that all such have
    turns_neighbours: bool = False

    @property
    def is_llama_kind(self) -> bool:
        return self.name != "gpt2"

    def unmet(self, model: ModelConfig) -> str:
        """What of the model this architecture does not compute, in words; empty where it computes all."""
        return architecture.unmet(model, self.needs, self.table.known)

    # Settings -> our model section

    def read(self, file: GgufFile, where: str) -> dict[str, object]:
        """What the file says of the model, under our keys."""
        values: dict[str, object] = {}
        for ours, theirs in {**_COUNTS, **(_KV_COUNTS if self.is_llama_kind else {})}.items():
            value = file.settings.get(f"{self.name}.{theirs}")
            if value is None:
                continue
            if type(value) is not int:
                raise CheckpointError(f"{where}: {self.name}.{theirs} is {str(value)[:80]}, needed a whole number.")
            values[ours] = value
        if (eps := self._number(file, self.epsilon, where)) is not None:
            values["layernorm_eps"] = eps
        elif self.is_llama_kind:
            raise CheckpointError(f"{where}: {self.name}.{self.epsilon} is missing. The file is damaged.")
        return {**values, **(self._read_llama_kind(file, values, where) if self.is_llama_kind else {})}

    def _read_llama_kind(self, file: GgufFile, counts: Mapping[str, object], where: str) -> dict[str, object]:
        for key, harmless in _UNSUPPORTED.items():
            value = file.settings.get(f"{self.name}.{key}", harmless)
            if value != harmless:
                raise CheckpointError(
                    f"{where}: {self.name}.{key} is {str(value)[:80]}, which changes the computation and is not "
                    "supported."
                )
        for ours, theirs in _COUNTS.items():
            if ours not in counts:
                raise CheckpointError(f"{where}: {self.name}.{theirs} is missing. The file is damaged.")
        width = counts.get("head_size", int(str(counts["hidden_size"])) // max(1, int(str(counts["num_heads"]))))
        for key in ("rope.dimension_count", "attention.value_length"):
            value = file.settings.get(f"{self.name}.{key}", width)
            if value != width:
                raise CheckpointError(
                    f"{where}: {self.name}.{key} is {str(value)[:80]} and a head of queries has {width}: partial "
                    "rotary embeddings, and heads of two widths, are not supported."
                )
        return {
            **{key: values[0] for key, values in self.needs.items()},
            "rope_theta": self._number(file, "rope.freq_base", where) or 10000.0,
            "rope_scaling": self._read_scaling(file, counts["max_positions"], where),
        }

    def _read_scaling(self, file: GgufFile, max_positions: object, where: str) -> dict[str, object]:
        kind = file.settings.get(f"{self.name}.rope.scaling.type", "linear")
        factors = (self._number(file, key, where) for key in ("rope.scaling.factor", "rope.scale_linear"))  # new, old
        factor = next((each for each in factors if each is not None), None) or 1.0
        for key in ("attn_factor", "yarn_attn_factor"):
            if (self._number(file, f"rope.scaling.{key}", where) or 1.0) != 1.0:
                raise CheckpointError(f"{where}: {self.name}.rope.scaling.{key} is set, which is not supported.")
        is_plain = kind == "none" or (kind == "linear" and factor == 1.0)
        if ROPE_FREQS in file.tensors:
            if not is_plain:
                raise CheckpointError(
                    f"{where}: has '{ROPE_FREQS}' and {self.name}.rope.scaling of type {str(kind)[:40]!r} with factor "
                    f"{factor:g}: one upon the other is not supported."
                )
            return _llama3_of(file.tensors[ROPE_FREQS].read().float(), where)
        if is_plain:
            return {"type": "none"}
        if kind == "linear":
            return {"type": "linear", "factor": factor}
        if kind != "yarn":
            raise CheckpointError(
                f"{where}: {self.name}.rope.scaling.type is {str(kind)[:40]!r}, needed none, linear or yarn."
            )
        context = file.settings.get(f"{self.name}.rope.scaling.original_context_length") or max_positions
        scaling: dict[str, object] = {"type": "yarn", "factor": factor, "original_max_positions": context}
        for ours in ("beta_fast", "beta_slow"):
            value = self._number(file, f"rope.scaling.yarn_{ours}", where)
            scaling |= {} if value is None else {ours: value}
        return scaling

    def _number(self, file: GgufFile, key: str, where: str) -> float | None:
        value = file.settings.get(f"{self.name}.{key}")
        if value is None:
            return None
        if type(value) not in (int, float):
            raise CheckpointError(f"{where}: {self.name}.{key} is {str(value)[:80]}, needed a number.")
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

    # Our model section -> settings

    def write(self, model: ModelConfig) -> dict[str, Value]:
        settings: dict[str, Value] = {f"{self.name}.{theirs}": getattr(model, ours) for ours, theirs in _COUNTS.items()}
        if self.is_llama_kind:
            settings |= {
                f"{self.name}.attention.head_count_kv": model.num_kv_heads,
                f"{self.name}.attention.key_length": model.head_size,
                f"{self.name}.attention.value_length": model.head_size,
                f"{self.name}.rope.dimension_count": model.head_size,
                f"{self.name}.rope.freq_base": float(model.rope_theta),
                **self._write_scaling(model),
            }
        return {
            **settings,
            f"{self.name}.{self.epsilon}": model.layernorm_eps,
            f"{self.name}.vocab_size": model.vocab_size,
        }

    def _write_scaling(self, model: ModelConfig) -> dict[str, Value]:
        scaling = model.rope_scaling
        place = f"{self.name}.rope.scaling"
        if scaling.type == "linear":
            return {f"{place}.type": "linear", f"{place}.factor": float(scaling.factor)}
        if scaling.type != "yarn":
            return {}
        for key in ("attention_factor", "mscale", "mscale_all_dim", "truncate"):
            if getattr(scaling, key) != (usual := RopeScalingConfig.model_fields[key].default):
                raise CheckpointError(
                    f"model.rope_scaling.{key} is {getattr(scaling, key)}, and llama.cpp computes with {usual}: it "
                    "would give other logits."
                )
        return {
            f"{place}.type": "yarn",
            f"{place}.factor": float(scaling.factor),
            f"{place}.original_context_length": scaling.original_max_positions or model.max_positions,
            f"{place}.yarn_beta_fast": float(scaling.beta_fast),
            f"{place}.yarn_beta_slow": float(scaling.beta_slow),
        }

    # Tensors

    def in_our_order(self, tensors: LazyTensors, head_size: int) -> dict[str, LazyTensor]:
        """As the table has them: without what is no weight, and with halves of heads one behind the other."""
        return {
            name: reordered(each, head_size, to_halves=True) if self._is_turned(name, each) else each
            for name, each in tensors.items()
            if name != ROPE_FREQS
        }

    def in_their_order(self, tensors: LazyTensors, model: ModelConfig) -> dict[str, LazyTensor]:
        theirs = {
            name: reordered(each, model.head_size, to_halves=False) if self._is_turned(name, each) else each
            for name, each in tensors.items()
        }
        if self.is_llama_kind and model.rope_scaling.type == "llama3":
            theirs[ROPE_FREQS] = in_memory(_slowdowns(model))
        return theirs

    def _is_turned(self, name: str, tensor: LazyTensor) -> bool:
        return self.turns_neighbours and len(tensor.shape) > 0 and name.split(".")[-2:][0] in ("attn_q", "attn_k")


def reordered(stored: LazyTensor, head_size: int, *, to_halves: bool) -> LazyTensor:
    def read() -> Tensor:
        tensor = stored.read()
        if head_size % 2 or tensor.shape[0] % head_size:
            return tensor  # listed among the shapes
        pairs = (-1, head_size // 2, 2) if to_halves else (-1, 2, head_size // 2)
        return tensor.reshape(*pairs, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    return LazyTensor(stored.shape, stored.dtype, read)


def _slowdowns(model: ModelConfig) -> Tensor:
    """By what llama.cpp divides each frequency."""
    plain = model.model_copy(update={"rope_scaling": RopeScalingConfig()})
    return rope.frequencies(plain) / rope.frequencies(model)


# Published ones: (original_max_positions, low_freq_factor, high_freq_factor). The factor is the largest slowdown.
_LLAMA3 = ((8192, 1.0, 4.0),)


def _llama3_of(slowdowns: Tensor, where: str) -> dict[str, object]:
    """The file has only what came out of the rule. It is the rule's if the rule gives the same numbers.

    The base of the frequencies is not asked for: a slowdown says how often its frequency turns in the old context.
    """
    if slowdowns.ndim != 1 or not slowdowns.numel() or not slowdowns.isfinite().all():
        raise CheckpointError(f"{where}: '{ROPE_FREQS}' is damaged.")
    if torch.equal(slowdowns, torch.ones_like(slowdowns)):
        return {"type": "none"}
    context, low, high = _LLAMA3[0]
    return {
        "type": "llama3",
        "factor": round(float(slowdowns.max()), 4),
        "original_max_positions": context,
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def require_same_slowdowns(file: GgufFile, model: ModelConfig, where: str) -> None:
    """The numbers in the file are those that the model computes with."""
    if ROPE_FREQS not in file.tensors:
        return
    stored, ours = file.tensors[ROPE_FREQS].read().float(), _slowdowns(model)
    if stored.shape != ours.shape or not torch.allclose(stored, ours, rtol=1e-4):
        raise CheckpointError(
            f"{where}: '{ROPE_FREQS}' has other numbers than Llama 3's rule with factor {model.rope_scaling.factor:g}, "
            f"{model.rope_scaling.original_max_positions} positions and the factors 1 and 4 gives. State the rule with "
            "-o model.rope_scaling.original_max_positions=... and so on."
        )


_SHARED: dict[str, tuple[object, ...]] = {"norm": ("rmsnorm",), "positions": ("rope",), "mlp": ("swiglu",)}
_LLAMA_MODULES: dict[str, str | tuple[str, ...]] = {
    "ln1": "blk.{i}.attn_norm",
    "attn.qkv": tuple(f"blk.{{i}}.attn_{x}" for x in "qkv"),
    "attn.out": "blk.{i}.attn_output",
    "attn.q_norm": "blk.{i}.attn_q_norm",
    "attn.k_norm": "blk.{i}.attn_k_norm",
    "ln2": "blk.{i}.ffn_norm",
    "mlp.gate": "blk.{i}.ffn_gate",
    "mlp.up": "blk.{i}.ffn_up",
    "mlp.down": "blk.{i}.ffn_down",
}


def _llama_kind(name: str, needs: dict[str, tuple[object, ...]]) -> Architecture:
    every = {**_SHARED, "bias": ("none",), "qk_norm": (False,), **needs}
    is_llama = name == "llama"  # the others have no place for slowdowns of frequencies
    known: Known = {
        **every,
        "tied": (False,),
        "num_kv_heads": ANY,
        "head_size": ANY,
        "rope_scaling": ("linear", "llama3", "yarn") if is_llama else ("linear", "yarn"),
    }
    rules = [
        Rule("wte.weight", ("token_embd.weight",)),
        *block_rules(_LLAMA_MODULES),
        Rule("ln_f.weight", ("output_norm.weight",)),
        Rule("head.weight", ("output.weight",)),
    ]
    return Architecture(name, Table(TITLE, rules, known), "attention.layer_norm_rms_epsilon", every, is_llama)


GPT2 = Architecture(
    "gpt2",
    Table(
        TITLE,
        [
            Rule("wte.weight", ("token_embd.weight",)),
            Rule("wpe.weight", ("position_embd.weight",)),
            *block_rules(
                {
                    "ln1": "blk.{i}.attn_norm",
                    "attn.qkv": "blk.{i}.attn_qkv",
                    "attn.out": "blk.{i}.attn_output",
                    "ln2": "blk.{i}.ffn_norm",
                    "mlp.up": "blk.{i}.ffn_up",
                    "mlp.down": "blk.{i}.ffn_down",
                },
                order="3ad",
            ),
            Rule("ln_f.weight", ("output_norm.weight",)),
            Rule("ln_f.bias", ("output_norm.bias",)),
            Rule("head.weight", ("output.weight",)),
        ],
    ),
    "attention.layer_norm_epsilon",
)
LLAMA = _llama_kind("llama", {})
QWEN2 = _llama_kind("qwen2", {"bias": ("qkv",)})
QWEN3 = _llama_kind("qwen3", {"qk_norm": (True,)})
ALL = {each.name: each for each in (GPT2, LLAMA, QWEN2, QWEN3)}
KNOWN = architecture.union(each.table.known for each in ALL.values())


def for_model(model: ModelConfig) -> Architecture:
    """The first that computes such a model."""
    unmet = {name: each.unmet(model) for name, each in ALL.items()}
    for name, each in ALL.items():
        if not unmet[name]:
            return each
    nearest = min(ALL, key=lambda name: unmet[name].count(" and "))
    raise CheckpointError(
        f"{TITLE}: none of its architectures ({', '.join(ALL)}) computes what this model asks for; {nearest} lacks "
        f"{unmet[nearest]}."
    )
