"""Weights for use: from a run, a step of it, a checkpoint of another system, or a name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gptworks import cpu, model_hub, run_paths
from gptworks.checkpoint import folder as folders
from gptworks.checkpoint.systems import huggingface, registry
from gptworks.checkpoint.systems.contract import Opened
from gptworks.config import presets
from gptworks.config.load import from_dict
from gptworks.config.schema import InitConfig, ModelConfig, TrainConfig
from gptworks.errors import CheckpointError, TokenizerError, UsageError
from gptworks.launch.devices import pick_device
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.model.inference import StoredMatrix, require_kind, store_weights
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.python_words import in_python_words
from gptworks.tokenizer import Tokenizer, gpt2_for


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint with weights, opened: its shape is known, its tensors are read when asked for."""

    folder: Path
    model: ModelConfig
    weights: Opened
    tokenizer: Tokenizer | None
    files: list[Path]  # all that hold weights

    @classmethod
    def open(
        cls,
        name_or_path: str | Path,
        *,
        download: bool | None = None,
        tokenizer: str | Path | None = None,
        shape: Mapping[str, object] | None = None,
    ) -> "Pretrained":
        """`download`: whether a name that is not on this machine may be fetched; None = as $GPTWORKS_DOWNLOAD says.

        `tokenizer`: instead of that beside the weights. `shape`: numbers of the model that the files do not carry.
        """
        path = folders.at_step(str(name_or_path)) or Path(name_or_path)
        is_here = path.exists() or path.name in (run_paths.LATEST, run_paths.BEST)
        opened = _open(path if is_here else model_hub.resolve(str(name_or_path), download=download), shape or {})
        return cls(
            opened.path,
            opened.model,
            opened,
            _tokenizer_for(opened, tokenizer, None if is_here else str(name_or_path)),
            opened.files,
        )

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(
                f"{self.folder}: has no tokenizer. Name one with --tokenizer (gpt2 comes with the installation), or "
                "put tokenizer.json (or vocab.json and merges.txt, or a sentencepiece .model) beside the weights."
            )
        if self.tokenizer.vocab_size > self.model.vocab_size:
            raise TokenizerError(
                f"{self.folder}: {self.tokenizer.name} has {self.tokenizer.vocab_size:,} tokens, but the model only "
                f"{self.model.vocab_size:,}. Use the tokenizer the model was trained with."
            )
        return self.tokenizer


def fields_not_stored(model: Mapping[str, Any]) -> dict[str, object]:
    """What some systems do not store of a model section, and no shape tells: for `shape` of what is opened."""
    return {key: model[key] for key in ("num_heads", "gelu", "layernorm_eps") if model.get(key) is not None}


def _open(path: Path, shape: Mapping[str, object]) -> Opened:
    system = registry.recognise(path)
    if system is None and (path / "config.json").is_file():
        system = registry.system("hf")  # which says what is wrong with it
    if system is None:
        folders.find(path)  # says what was needed
        system = registry.system("gptworks")
    return system.open(path, shape).require_whole()


def _tokenizer_for(opened: Opened, named: str | Path | None, name: str | None) -> Tokenizer | None:
    """Weights alone are fine; whoever needs a tokenizer asks for it. One that is there must be readable."""
    if named is not None:
        return Tokenizer.from_pretrained(named)
    if (beside := opened.open_tokenizer()) is not None:
        return beside
    # GPT-2's vocabulary comes with the installation.
    return gpt2_for(opened.model.vocab_size) if name in model_hub.GPT2_NAMES else None


class PretrainedGPT(GPT):
    """The model with its weights and tokenizer; exported as `gptworks.GPT`.

    Called with token ids [rows, tokens] it gives logits [rows, tokens, vocabulary], in training as in evaluation mode.

    >>> model = gptworks.GPT.from_pretrained("runs/quickstart")   # doctest: +SKIP
    >>> logits = model(torch.tensor([model.tokenizer.encode("Hello")]))   # doctest: +SKIP
    >>> loss = model.loss(torch.tensor([model.tokenizer.encode("Hello world")]))   # doctest: +SKIP
    """

    tokenizer: Tokenizer | None = None
    folder: Path | None = None  # where the weights came from

    def __init__(self, cfg: ModelConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        if not isinstance(cfg, ModelConfig):
            raise UsageError(
                f"GPT: got {cfg!r}; needs a ModelConfig. GPT.from_pretrained takes a name or a folder with weights, "
                "GPT.from_config the name of a preset, for fresh ones."
            )
        cpu.settle()  # it is called without anything else of ours
        super().__init__(cfg, compute_dtype)

    def __call__(self, tokens_BT: Tensor, **options: Any) -> Tensor:
        """`forward` stays that of GPT, which others compute in its place where nothing was changed about it."""
        if tokens_BT.ndim != 2 or tokens_BT.is_floating_point():
            raise UsageError(
                f"model: got a {str(tokens_BT.dtype).removeprefix('torch.')} tensor of shape {list(tokens_BT.shape)}; "
                "needs whole numbers [rows, tokens], such as torch.tensor([tokenizer.encode(text)])."
            )
        if tokens_BT.device.type == "cpu" and tokens_BT.numel():  # elsewhere looking would wait for the device
            lowest, highest = (int(value) for value in tokens_BT.aminmax())
            if lowest < 0 or highest >= self.cfg.vocab_size:
                raise UsageError(
                    f"model: token {lowest if lowest < 0 else highest} is not in the vocabulary "
                    f"(0 to {self.cfg.vocab_size - 1}). Use the tokenizer the model was trained with."
                )
        return super().__call__(tokens_BT, **options)

    @classmethod
    @in_python_words
    def from_config(
        cls,
        config: ModelConfig | Mapping[str, Any] | str,
        *,
        seed: int = TrainConfig().seed,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        tokenizer: str | Path | Tokenizer | None = None,
    ) -> Self:
        """Fresh weights of a shape: a `ModelConfig`, a dictionary of its keys, or the name of a preset.

        They are those with which `gptworks train` begins for the same shape and `train.seed`, in evaluation mode.

        >>> model = gptworks.GPT.from_config(gptworks.ModelConfig(num_layers=2, hidden_size=64, num_heads=4))
        >>> model = gptworks.GPT.from_config("tiny", tokenizer="gpt2")   # doctest: +SKIP
        """
        if isinstance(config, str):
            config = presets.find(config)
        shape = config if isinstance(config, ModelConfig) else from_dict({"model": dict(config)}, "GPT").model
        chosen = Tokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        if chosen is not None and chosen.vocab_size > shape.vocab_size:
            raise TokenizerError(
                f"GPT.from_config: the tokenizer {chosen.name} has {chosen.vocab_size:,} tokens, but model.vocab_size "
                f"is {shape.vocab_size:,}. Set vocab_size={chosen.vocab_size} or more, or give another tokenizer."
            )
        fresh = FreshWeights(InitConfig(), shape.num_layers, seed)
        model = build_gpt(shape, World(pick_device(device)), dtype, fresh, model_type=cls)
        assert isinstance(model, cls)
        model.tokenizer = chosen
        return model.eval()

    @in_python_words
    def save_pretrained(self, folder: str | Path) -> None:
        """A Hugging Face folder with the weights and the tokenizer, which `from_pretrained` and `transformers` read.

        >>> model.save_pretrained("mine")   # doctest: +SKIP
        >>> model = gptworks.GPT.from_pretrained("mine")   # doctest: +SKIP
        """
        if any(isinstance(module, StoredMatrix) for module in self.modules()):
            raise UsageError(
                "save_pretrained: the model's matrices are kept in fewer bits (weights=), so it can predict but not be "
                'trained or saved. Load it with weights="fp32".'
            )
        folder = Path(folder)
        if run_paths.is_run(folder) or folder.is_file():
            kind = "a file" if folder.is_file() else "the folder of a run, which has its own weights"
            raise UsageError(f"save_pretrained: {folder} is {kind}. Name another folder.")
        words = self.tokenizer
        ids = {"eod_id": words.eod_id, "bos_id": words.bos_id} if words else {"eod_id": None}
        try:
            huggingface.save(folder, self.cfg, dict(self.named_parameters()), **ids)
            if self.tokenizer:
                self.tokenizer.save(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written ({error.strerror}). Name another folder.") from None

    @classmethod
    @in_python_words
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: str = "fp32",
        download: bool | None = None,
        tokenizer: str | Path | None = None,
        shape: Mapping[str, object] | None = None,
    ) -> Self:
        """From a run folder, one of its steps, a checkpoint of another system, or a name; in evaluation mode.

        A name such as gpt2, gpt2-medium-en or openai-community/gpt2-xl is looked for in $GPTWORKS_HOME/models and in
        the Hugging Face cache. It is downloaded only with `download=True` or GPTWORKS_DOWNLOAD=1.

        dtype: what activations are computed in. weights: bf16, int8 and int4 keep the matrices in a half, a quarter and
        a seventh of the memory, which generation on a CPU waits for; such a model predicts, and cannot be trained or
        saved.

        tokenizer: a name or folder, where none lies beside the weights. shape: numbers that some systems do not store.

        >>> model = gptworks.GPT.from_pretrained("gpt2", device="auto", dtype=torch.bfloat16)   # doctest: +SKIP
        >>> model = gptworks.GPT.from_pretrained("x.ckpt", tokenizer="gpt2", shape={"num_heads": 12})  # doctest: +SKIP
        """
        require_kind(weights)
        opened = Pretrained.open(name_or_path, download=download, tokenizer=tokenizer, shape=shape)
        model = build_gpt(opened.model, World(pick_device(device)), dtype, opened.weights, model_type=cls)
        assert isinstance(model, cls)
        model.tokenizer, model.folder = opened.tokenizer, opened.folder
        store_weights(model, weights)
        return model.eval()
