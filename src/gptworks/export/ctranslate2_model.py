"""ctranslate2: model.bin, config.json and vocabulary.json, written through CTranslate2's own specification."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptworks import architecture
from gptworks.checkpoint.rules import split
from gptworks.checkpoint.systems.huggingface import TABLE
from gptworks.config.schema import ModelConfig
from gptworks.errors import UsageError
from gptworks.export.contract import Source, Written, array, described, import_or_explain
from gptworks.export.tokenizer_files import tokens_in_order

NAME = "ctranslate2"
TITLE = "CTranslate2 model"
WEIGHTS = ("fp32", "int8", "fp16")
KNOWN = architecture.GPT2
RUNTIME = ("ctranslate2",)
_QUANTIZATION = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
_GELU = {"tanh": "GELUTanh", "erf": "GELU", "sigmoid": "GELUSigmoid"}
_FILES = ("model.bin", "config.json", "vocabulary.json")


def require() -> None:
    import_or_explain("ctranslate2", "--to ctranslate2", "ctranslate2")


def write(folder: Path, stem: str, source: Source, weights: str) -> Written:
    specs = import_or_explain("ctranslate2.specs", "--to ctranslate2", "ctranslate2")
    cfg, tokenizer = source.model, source.tokenizer
    spec = specs.TransformerDecoderModelSpec.from_config(
        cfg.num_layers, cfg.num_heads, pre_norm=True, activation=getattr(specs.Activation, _GELU[cfg.gelu])
    )
    _fill(spec.decoder, source)
    spec.register_vocabulary(tokens_in_order(tokenizer))
    end = tokenizer.eod_token or tokens_in_order(tokenizer)[0]
    spec.config.unk_token = spec.config.bos_token = spec.config.eos_token = end
    spec.config.layer_norm_epsilon = cfg.layernorm_eps
    spec.validate()
    spec.optimize(quantization=_QUANTIZATION[weights])
    spec.save(str(folder))
    rows = []
    for name, each in spec.variables(ordered=True):
        if hasattr(each, "shape"):
            rows.append(described(name, each.shape, each.dtype))
    return Written(rows)


def _fill(decoder: Any, source: Source) -> None:
    theirs = split(TABLE, source.tensors, source.model)  # matrices [in, out], all q then all k then all v

    def norm(spec: Any, name: str) -> None:
        spec.gamma, spec.beta = array(theirs[f"{name}.weight"]), array(theirs[f"{name}.bias"])

    def linear(spec: Any, name: str) -> None:
        spec.weight, spec.bias = array(theirs[f"{name}.weight"]).T.copy(), array(theirs[f"{name}.bias"])

    decoder.scale_embeddings = False
    words = array(theirs["transformer.wte.weight"])
    decoder.embeddings.weight = words
    decoder.projection.weight = words if source.model.tied else array(theirs["lm_head.weight"])
    decoder.position_encodings.encodings = array(theirs["transformer.wpe.weight"])
    norm(decoder.layer_norm, "transformer.ln_f")
    for layer, spec in enumerate(decoder.layer):
        name = f"transformer.h.{layer}"
        norm(spec.self_attention.layer_norm, f"{name}.ln_1")
        linear(spec.self_attention.linear[0], f"{name}.attn.c_attn")
        linear(spec.self_attention.linear[1], f"{name}.attn.c_proj")
        norm(spec.ffn.layer_norm, f"{name}.ln_2")
        linear(spec.ffn.linear_0, f"{name}.mlp.c_fc")
        linear(spec.ffn.linear_1, f"{name}.mlp.c_proj")


def script(stem: str, source: Source) -> tuple[list[str], list[str]]:
    end = "" if source.tokenizer.eod_id is not None else ", end_token=[]"
    return (
        ["import json", "from ctranslate2 import Generator"],
        [
            'words = json.load(open("vocabulary.json", encoding="utf-8"))',
            'model = Generator(".")',
            f"options = dict(max_length=count, sampling_topk=1, include_prompt_in_result=False{end})",
            "(found,) = model.generate_batch([[words[i] for i in ids]], **options)",
            "new = found.sequences_ids[0]",
        ],
    )


def recognise(folder: Path) -> Path | None:
    return folder / _FILES[0] if all((folder / name).is_file() for name in _FILES) else None


def open(file: Path, model: ModelConfig) -> "_Runner":
    return _Runner(file.parent)


class _Runner:
    def __init__(self, folder: Path) -> None:
        import json

        ctranslate2 = import_or_explain("ctranslate2", f"{folder}: a CTranslate2 model", "ctranslate2")
        try:
            self.generator: Any = ctranslate2.Generator(str(folder))
        except RuntimeError as error:
            raise UsageError(f"{folder}: CTranslate2 cannot read it ({error}). Export it again.") from None
        self.words: list[str] = json.loads((folder / _FILES[2]).read_text(encoding="utf-8"))

    def continue_greedily(self, tokens: Sequence[int], max_new_tokens: int, eod_id: int | None) -> list[int]:
        (result,) = self.generator.generate_batch(
            [[self.words[token] for token in tokens]],
            max_length=max_new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            return_end_token=True,
            end_token=[] if eod_id is None else [eod_id],
        )
        return [int(token) for token in result.sequences_ids[0]]
