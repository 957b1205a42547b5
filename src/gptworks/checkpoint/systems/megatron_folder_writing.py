"""Checkpoint folders as Megatron writes them, cut for its ranks and stages."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gptworks.checkpoint.formats import torch_file
from gptworks.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from gptworks.checkpoint.rules import (
    Table,
    split,
)
from gptworks.checkpoint.systems.contract import (
    SplitSpec,
    Weights,
    require_divisible,
)
from gptworks.checkpoint.systems.megatron_folder import FILE, PADDING, TRACKER, folder_name
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

# Writing


def write(
    path: Path,
    weights: Weights,
    cut: SplitSpec,
    table: Table,
    layers: str,
    nest: Callable[[dict[str, LazyTensor], bool], dict[str, Any]],
    settings: Mapping[str, object],
) -> list[Path]:
    """`layers`: what their layers' names begin with; `nest`: the content of "model" from the tensors of a stage and
    whether the head is tied; `settings`: args that are other than those of a GPT-2, or more."""
    model = weights.model
    require_divisible(model, cut)
    if model.gelu == "sigmoid":
        raise CheckpointError("model.gelu is sigmoid: Megatron has only tanh and erf. Nothing was written.")
    # Megatron takes iteration 0 for a damaged tracker; weights without a step it calls a release.
    name = f"iter_{weights.step:07d}" if weights.step else "release"
    args = Namespace(**{**_args(weights, cut), **settings})
    written = []
    for rank in range(cut.tp):
        theirs = split(table, weights.tensors, model, rank=rank, ranks=cut.tp)
        for stage in range(cut.pp):
            own = _stage(theirs, table, layers, model, stage, cut.pp)
            file = path / name / folder_name(rank, stage, cut) / FILE
            file.parent.mkdir(parents=True)
            content = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": weights.step,
                "model": nest(own, model.tied),
            }
            torch_file.write(file, content)
            written.append(file)
    tracker = path / TRACKER
    tracker.write_text(str(weights.step) if weights.step else "release", encoding="utf-8")
    return [*written, tracker]


def _stage(
    theirs: LazyTensors, table: Table, layers: str, model: ModelConfig, stage: int, stages: int
) -> dict[str, LazyTensor]:
    (words,), (head,), (positions,) = (
        next(rule.theirs for rule in table.rules if rule.ours == ours)
        for ours in ("wte.weight", "head.weight", "wpe.weight")
    )
    each = model.num_layers // stages
    tensors: dict[str, LazyTensor] = {}
    for name, stored in theirs.items():
        if name.startswith(layers):
            number, rest = name.removeprefix(layers).split(".", 1)
            if int(number) // each == stage:
                tensors[f"{layers}{int(number) % each}.{rest}"] = stored
        elif stage == (0 if name in (words, positions) else stages - 1):
            tensors[name] = stored
    if model.tied and stages > 1 and stage == stages - 1:
        tensors[head] = theirs[words]  # a copy, which Megatron keeps equal to the first stage's
    return tensors


def _args(weights: Weights, cut: SplitSpec) -> dict[str, object]:
    model = weights.model
    dtypes = {each.dtype for each in weights.tensors.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return {
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_heads,
        "kv_channels": model.head_size,
        "group_query_attention": False,
        "num_query_groups": 1,
        "seq_length": model.max_positions,
        "max_position_embeddings": model.max_positions,
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "padded_vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 128 if model.vocab_size % (128 * cut.tp) == 0 else 1,
        **({"tokenizer_type": "GPT2BPETokenizer"} if 50257 <= model.vocab_size < 50257 + PADDING else {}),
        "untie_embeddings_and_output_weights": not model.tied,
        "normalization": "LayerNorm",
        "norm_epsilon": model.layernorm_eps,
        "layernorm_epsilon": model.layernorm_eps,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "swiglu": False,
        "squared_relu": False,
        "openai_gelu": False,
        "onnx_safe": None,
        "bias_gelu_fusion": model.gelu == "tanh",
        "hidden_dropout": model.dropout_hidden,
        "attention_dropout": model.dropout_attention,
        "tensor_model_parallel_size": cut.tp,
        "pipeline_model_parallel_size": cut.pp,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "data_parallel_random_init": False,
        "iteration": weights.step,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "params_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
    }
