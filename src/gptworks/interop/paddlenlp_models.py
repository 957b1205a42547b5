"""Models of PaddleNLP by name: those of paddlenlp.transformers, and those of the modeling.py of its GPT-3 programs."""

# Layers, width, heads, words; heads of 13B as they ship them. Positions are 1024.
SHAPES = {
    "gpt2-en": (12, 768, 12, 50257),
    "gpt2-medium-en": (24, 1024, 16, 50304),
    "gpt2-large-en": (36, 1280, 20, 50257),
    "gpt2-xl-en": (48, 1600, 25, 50257),
    "gpt2-small-en": (4, 1024, 4, 50304),
    "gpt3-1.3B-en": (24, 2048, 16, 50304),
    "gpt3-13B-en": (40, 5120, 128, 50304),
    "gpt3-89B-en": (48, 12288, 96, 51200),
    "gpt3-175B-en": (96, 12288, 96, 51200),
    "gpt-cpm-large-cn": (32, 2560, 32, 30000),
    "gpt-cpm-small-cn-distill": (12, 768, 12, 30000),
}
_WORDS_IN_GPT3 = {"gpt2-en": 50304}  # where its modeling.py has another number than paddlenlp.transformers


def shape_of(name: str, mp_degree: int, pp_degree: int) -> tuple[int, int, int, int]:
    """The GPT programs refuse tensor and pipeline parallelism ("Please use gpt-3 example"): then it is a GPT-3 one.

    No row is added for tensor parallelism: the last rank has what is left, and checkpoints have their shape.
    """
    layers, width, heads, words = SHAPES[name]
    is_gpt3 = mp_degree > 1 or pp_degree > 1
    return layers, width, heads, _WORDS_IN_GPT3.get(name, words) if is_gpt3 else words
