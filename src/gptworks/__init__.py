"""gptworks: one toolkit for the whole life of a GPT model.

The public names below are resolved when first used, so `import gptworks` imports neither torch nor pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gptworks.api.configuration import load_config
    from gptworks.api.evaluate import evaluate
    from gptworks.api.pipeline import pipeline
    from gptworks.api.preparation import prepare
    from gptworks.api.trainer import Trainer
    from gptworks.checkpoint.pretrained import PretrainedGPT as GPT
    from gptworks.config.schema import ModelConfig
    from gptworks.errors import GPTWorksError
    from gptworks.generate.engine import generate, generations
    from gptworks.tokenizer import Tokenizer
    from gptworks.train.loop import train

_HOMES = {
    "GPT": ("gptworks.checkpoint.pretrained", "PretrainedGPT"),
    "GPTWorksError": ("gptworks.errors", "GPTWorksError"),
    "ModelConfig": ("gptworks.config.schema", "ModelConfig"),
    "Tokenizer": ("gptworks.tokenizer", "Tokenizer"),
    "Trainer": ("gptworks.api.trainer", "Trainer"),
    "generations": ("gptworks.generate.engine", "generations"),
    "load_config": ("gptworks.api.configuration", "load_config"),
    "pipeline": ("gptworks.api.pipeline", "pipeline"),
    "prepare": ("gptworks.api.preparation", "prepare"),
}

__all__ = [
    "GPT",
    "GPTWorksError",
    "ModelConfig",
    "Tokenizer",
    "Trainer",
    "__version__",
    "evaluate",
    "generate",
    "generations",
    "load_config",
    "pipeline",
    "prepare",
    "train",
]


# What Hugging Face and litgpt call them.
_OTHER_NAMES = {
    "AutoModelForCausalLM": "GPT.from_pretrained",
    "AutoTokenizer": "Tokenizer.from_pretrained",
    "GPT2Config": "ModelConfig",
    "GPT2LMHeadModel": "GPT.from_pretrained",
    "GPT2Tokenizer": "Tokenizer.from_pretrained",
    "GPTConfig": "ModelConfig",
    "Config": "ModelConfig",
    "LLM": "pipeline",
    "Pipeline": "pipeline",
    "TrainingArguments": "Trainer, whose keywords are the settings, such as train={'steps': 100}",
}

_CALLABLE_PACKAGES = ("evaluate", "generate", "train")


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return import_module(f"gptworks.{name}")
    if name not in _HOMES:
        hint = f" Did you mean {_OTHER_NAMES[name]}?" if name in _OTHER_NAMES else ""
        raise AttributeError(f"module 'gptworks' has no attribute {name!r}.{hint} Public names: {', '.join(__all__)}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
