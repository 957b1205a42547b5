"""The names that OpenAI gave the tensors of GPT-2, which Hugging Face and nanoGPT kept."""

from collections.abc import Iterable

from gptworks.checkpoint.rules import Rule, block_rules


def openai_rules(transposed: Iterable[str] = ()) -> list[Rule]:
    """QKV is all q, all k, all v. `transposed`: our modules whose matrices are [in, out] there."""
    return [
        Rule("wte.weight", ("transformer.wte.weight",)),
        Rule("wpe.weight", ("transformer.wpe.weight",)),
        *block_rules(
            {
                "ln1": "transformer.h.{i}.ln_1",
                "attn.qkv": "transformer.h.{i}.attn.c_attn",
                "attn.out": "transformer.h.{i}.attn.c_proj",
                "ln2": "transformer.h.{i}.ln_2",
                "mlp.up": "transformer.h.{i}.mlp.c_fc",
                "mlp.down": "transformer.h.{i}.mlp.c_proj",
            },
            transposed=transposed,
            order="3ad",
        ),
        Rule("ln_f.weight", ("transformer.ln_f.weight",)),
        Rule("ln_f.bias", ("transformer.ln_f.bias",)),
        Rule("head.weight", ("lm_head.weight",)),
    ]
