"""`gptworks.Trainer`: a model, data and settings together; train, evaluate and predict are the command line's own."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptworks import model_hub
from gptworks.api.evaluate import measure
from gptworks.api.pipeline import pipeline
from gptworks.api.tasks import TEXT_GENERATION, require_task
from gptworks.api.texts import Texts, as_texts, write_store
from gptworks.checkpoint.pretrained import Pretrained, PretrainedGPT, fields_not_stored
from gptworks.config import presets
from gptworks.config.load import flatten, load_with_origins
from gptworks.config.schema import ModelConfig, RunConfig
from gptworks.data.pieces import cut_by_position
from gptworks.data.prepare import CHARACTERS
from gptworks.data.store import vocabulary_of
from gptworks.errors import UsageError
from gptworks.evaluate.heldout import HeldOut
from gptworks.python_words import generation_in_python_words, in_python_words
from gptworks.tokenizer import Tokenizer
from gptworks.train import text_inputs
from gptworks.train.loop import Outcome, train
from gptworks.train.metrics import Observer
from gptworks.train.run_folder import refuse_foreign

DEFAULT_OUT = "runs/trainer"
_DATASETS = ("path", "held_out_path")


class Trainer:
    """Trains, measures and uses one model.

    model: the name of a preset (fresh weights of that shape), a ModelConfig or a dictionary of its keys (likewise); a
    folder, another name such as gpt2-en, or a `GPT` (training starts from its weights, which stay as they are).
    train_dataset, eval_dataset: whatever `data.path` takes, or a list of texts, of {"text": ...} or of {"prompt": ...,
    "completion": ...}, or of dictionaries with other keys, which data={"key": "title,steps"} names; the second is
    evaluated during training. config: a YAML file, a dictionary or a RunConfig. More settings are keywords with a
    dictionary per section; they come before those of the config. One epoch is trained where nothing says how long.

    callbacks: functions that get each line of metrics.jsonl as a dictionary: step, loss, lr, ... or held_out_loss. They
    are observers: what they do with it changes nothing, and one that fails is named and not called again.

    >>> trainer = gptworks.Trainer(task="text_generation", model="tiny", train_dataset="data/corpus", out="runs/mine",
    ...                            train={"steps": 100}, optim={"lr": 1e-3})   # doctest: +SKIP
    >>> trainer.train()   # doctest: +SKIP
    >>> trainer.predict(input_data="I love Beijing, because", max_length=20)   # doctest: +SKIP
    [{'text_generation_text': ['I love Beijing, because ...']}]
    """

    @in_python_words
    def __init__(
        self,
        task: str = TEXT_GENERATION,
        model: str | Path | PretrainedGPT | ModelConfig | dict[str, Any] | None = None,
        train_dataset: str | Path | Iterable[Any] | None = None,
        eval_dataset: str | Path | Iterable[Any] | None = None,
        *,
        config: str | Path | dict[str, Any] | RunConfig | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        out: str | Path | None = None,
        download: bool | None = None,
        callbacks: Iterable[Observer] = (),
        **overrides: Any,
    ) -> None:
        self.callbacks = _functions(callbacks)
        self.task = require_task(task, [TEXT_GENERATION], "Trainer")
        self.given_model, self.download = model, download
        self.config_file = config if isinstance(config, str | Path) else None
        self.below: dict[str, Any] = {} if self.config_file or config is None else _values(config)
        self.preset = str(overrides.pop("preset", "") or self.below.pop("preset", ""))
        self.above = flatten(overrides)
        if out is not None:
            self.above["run.out"] = str(out)
        # Texts become stores in the run folder, whose place is known only with the configuration.
        self.texts: dict[str, Texts] = {}
        for key, data, keyword in (
            ("path", train_dataset, "train_dataset"),
            ("held_out_path", eval_dataset, "eval_dataset"),
        ):
            column = str(self.above.get("data.key", self.below.get("data.key", "")))
            texts = None if data is None else as_texts(data, f"Trainer: {keyword}", column)
            if texts is not None:
                self.texts[key] = texts
            elif data is not None:
                self.above[f"data.{key}"] = str(data)
        if tokenizer == CHARACTERS:  # which are learned
            self.above.setdefault("data.tokenizer", tokenizer)
            tokenizer = None
        elif isinstance(tokenizer, str | Path):
            self.above.setdefault("data.tokenizer", str(tokenizer))  # for datasets that do not say which it is
            tokenizer = Tokenizer.from_pretrained(tokenizer)
        self.tokenizer = tokenizer
        self.config = self._load(from_weights=False)
        self._texts_are_of = ""  # identity of the tokenizer that the texts have been written with
        self._trained: Path | None = None
        self._model: PretrainedGPT | None = None

    @in_python_words
    def train(self, *, resume: str = "never") -> Outcome:
        """As `gptworks train`, with fresh weights for a preset or a shape. `resume`: never, auto, or a checkpoint.

        >>> trainer.train(resume="auto").step   # doctest: +SKIP
        100
        """
        return self._train(self.config, resume)

    @in_python_words
    def finetune(self, *, resume: str = "never") -> Outcome:
        """Training that starts from weights, also where the model is the name of a preset: gpt2, gpt2-medium, ...

        >>> gptworks.Trainer(model="gpt2", train_dataset="data/corpus").finetune()   # doctest: +SKIP
        """
        self.config = self._load(from_weights=True)
        return self._train(self.config, resume)

    @in_python_words
    def evaluate(self, *, batch_size: int = 8) -> HeldOut:
        """The loss on eval_dataset, or else on the held-out share of train_dataset.

        >>> trainer.evaluate().perplexity   # doctest: +SKIP
        """
        self._write_texts(self.config, self.model.tokenizer)
        self.config = text_inputs.prepared(self.config, "auto", tokenizer=self.model.tokenizer)
        data, split = self.config.data.model_dump(), "held_out"
        if not data["path"]:  # nothing to train on: all there is is held out
            data |= {"path": data["held_out_path"], "held_out_path": (), "split": (1.0, 0.0, 0.0)}
            split = "train"
        return measure(self.model, data, split=split, batch_size=batch_size, seed=self.config.train.seed)

    @generation_in_python_words
    def predict(self, input_data: str | Iterable[str], **settings: Any) -> list[dict[str, list[str]]]:
        """As a `pipeline` of the model: one dictionary per text, with the prompt and what follows it.

        >>> trainer.predict(input_data="I love Beijing, because", top_k=3)   # doctest: +SKIP
        """
        below = self.config.generate.model_dump(exclude_unset=True)  # a seed too, where it was given
        tokenizer = None if self.model.tokenizer else self._tokenizer()
        return pipeline(self.task, self.model, tokenizer=tokenizer, **below)(input_data, **settings)

    @property
    def model(self) -> PretrainedGPT:
        """What has been trained, or before that the weights that were given."""
        if self._model is None:
            device, given_model = self.config.run.device, self.given_model
            if self._trained is not None:
                self._model = PretrainedGPT.from_pretrained(self._trained, device=device)
            elif isinstance(given_model, PretrainedGPT):
                self._model = given_model
            else:
                source = self.config.init.checkpoint or self._weights_of_preset()
                if not source:
                    raise UsageError(f"Trainer: model {given_model!r} has no weights yet. Call train() first.")
                shape = fields_not_stored(self.config.model.model_dump()) if self.config.init.checkpoint else None
                self._model = PretrainedGPT.from_pretrained(source, device=device, download=self.download, shape=shape)
        return self._model

    @in_python_words
    def save_model(self, folder: str | Path) -> None:
        """`model.save_pretrained`, by the name that it has in Hugging Face's Trainer.

        >>> trainer.save_model("mine")   # doctest: +SKIP
        """
        self.model.save_pretrained(folder)

    # The configuration

    def _load(self, *, from_weights: bool) -> RunConfig:
        source, model = self.given_model, dict[str, Any]()
        if isinstance(source, ModelConfig | dict):
            shape = source.model_dump() if isinstance(source, ModelConfig) else source
            model = {f"model.{key}": value for key, value in shape.items()}
        elif isinstance(source, PretrainedGPT):
            model = {f"model.{key}": value for key, value in source.cfg.model_dump().items()}
        elif isinstance(source, str | Path):
            if Path(source).is_dir() or not _is_preset(str(source)):
                if not (model_hub.may_download() if self.download is None else self.download):
                    _refuse_misspelt(str(source))
                model = {"init.checkpoint": str(source)}
            elif from_weights and self._weights_of_preset():
                model = {"init.checkpoint": self._weights_of_preset()}
            else:
                model = {f"model.{key}": value for key, value in presets.find(str(source)).items()}
        elif source is not None:
            raise UsageError(
                f"Trainer: model: got {source!r}; needs a name, a folder, a GPT, a ModelConfig or a dictionary of it."
            )
        values = self.below | model | self.above
        config = load_with_origins(
            self.config_file, preset=self.preset, values=values, shape_of=self._shape_of, vocabulary_of=vocabulary_of
        ).config
        folder = Path(config.run.out or DEFAULT_OUT)
        data = {key: (str(folder / text_inputs.FOLDER / key),) for key in self.texts}
        run, init, length = {"out": str(folder)}, {}, {}
        if isinstance(source, PretrainedGPT):
            init["checkpoint"] = str(folder / text_inputs.FOLDER / "model")
        if from_weights and not (init or config.init.checkpoint):
            raise UsageError(
                f"Trainer: model {source!r} has no weights to start from. Give a folder, a GPT, or one of the names "
                f"{', '.join(model_hub.GPT2_NAMES)}; or call train()."
            )
        if not any(config.train.ends().values()):
            length["epochs"] = 1.0
        sections = {"data": data, "run": run, "init": init, "train": length}
        return config.model_copy(
            update={name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
        )

    def _shape_of(self, checkpoint: str, overrides: dict[str, Any]) -> dict[str, Any]:
        return Pretrained.open(
            checkpoint, download=self.download, shape=fields_not_stored(overrides)
        ).model.model_dump()

    def _weights_of_preset(self) -> str:
        """The name of the published weights that have the name of the preset."""
        source = self.given_model
        name = presets.aliases().get(source, source) if isinstance(source, str) else ""
        return name if name in model_hub.GPT2_NAMES else ""

    # What was given in memory

    def _train(self, config: RunConfig, resume: str) -> Outcome:
        text_inputs.on_main(config, lambda: refuse_foreign(Path(config.run.out), resume))
        tokenizer = self._write_texts(config)
        config = text_inputs.prepared(config, resume, tokenizer=tokenizer)
        if tokenizer is not None and config.data.tokenizer == CHARACTERS:  # the stores know them by now
            config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": ""})})
        self.config = config
        source = self.given_model
        if isinstance(source, PretrainedGPT):
            text_inputs.on_main(config, lambda: source.save_pretrained(config.init.checkpoint))
        outcome = train(config, resume_from=resume, observers=self.callbacks)
        self._trained, self._model = outcome.folder, None
        return outcome

    def _write_texts(self, config: RunConfig, tokenizer: Tokenizer | None = None) -> Tokenizer | None:
        """The lists as stores. Returns the tokenizer, the same for all data of the run; None where there is no list."""
        if not self.texts:
            return None
        chosen = tokenizer or self._tokenizer() or self._tokenizer_of_data(config)
        if chosen.vocab_size > config.model.vocab_size:
            raise UsageError(
                f"Trainer: the tokenizer {chosen.name} has {chosen.vocab_size:,} tokens, but model.vocab_size is "
                f"{config.model.vocab_size:,}. Give another tokenizer=, none (one is learned from the texts), or a "
                f"model with vocab_size={chosen.vocab_size} or more."
            )

        def write() -> None:
            for key, texts in self.texts.items():
                prefix = Path(getattr(config.data, key)[0])
                summary = write_store(texts, prefix, chosen)
                shares = config.data.split if key == "path" and not config.data.held_out_path else ()
                name = "train_dataset" if key == "path" else "eval_dataset"
                text_inputs.tell(name, summary, chosen, cut_by_position(prefix, shares))

        if chosen.identity != self._texts_are_of:
            text_inputs.on_main(config, write)
            self._texts_are_of = chosen.identity
        return chosen

    def _tokenizer_of_data(self, config: RunConfig) -> Tokenizer:
        """As for files: that of the stores, GPT-2's, or one that is learned from what is trained on."""
        own = {path for key in self.texts for path in getattr(config.data, key)}
        kept = {key: tuple(each for each in getattr(config.data, key) if each not in own) for key in _DATASETS}
        files = config.model_copy(update={"data": config.data.model_copy(update=kept)})
        if isinstance(self.given_model, PretrainedGPT):  # which has none, and is not in a folder yet
            files = files.model_copy(update={"init": files.init.model_copy(update={"checkpoint": ""})})
        trained_on = self.texts.get("path")
        in_memory = (text for row in trained_on.rows for text in row) if trained_on else None
        return text_inputs.choose_tokenizer(files, Path(config.run.out) / text_inputs.FOLDER, in_memory)

    def _tokenizer(self) -> Tokenizer | None:
        """The one that was given, else that of the model."""
        if self.tokenizer is not None:
            return self.tokenizer
        if isinstance(self.given_model, PretrainedGPT):
            return self.given_model.tokenizer
        if self.config.init.checkpoint:
            shape = fields_not_stored(self.config.model.model_dump())
            return Pretrained.open(self.config.init.checkpoint, download=self.download, shape=shape).tokenizer
        return Tokenizer.from_pretrained("gpt2") if self._weights_of_preset() else None


def _values(config: object) -> dict[str, Any]:
    """Dotted keys of a configuration that is not a file."""
    if isinstance(config, RunConfig):
        return flatten(config.model_dump(exclude_unset=True))
    if isinstance(config, dict):
        return flatten(config)
    raise UsageError(f"Trainer: config: got {config!r}; needs a YAML file, a dictionary or a RunConfig.")


def _is_preset(name: str) -> bool:
    return name.lower() in {known.lower() for known in [*presets.names(), *presets.aliases()]}


def _refuse_misspelt(name: str) -> None:
    """A name that is nearly that of a preset, and of nothing that is here."""
    near = "" if name in model_hub.GPT2_NAMES else presets.near(name)
    if near and "/" not in name and not Path(name).exists() and model_hub.find(name) is None:
        raise UsageError(
            f"Trainer: model {name!r} is neither a preset nor a folder. Did you mean {near}? `gptworks config presets` "
            "lists them."
        )


def _functions(callbacks: object) -> tuple[Observer, ...]:
    functions = tuple(callbacks) if isinstance(callbacks, Iterable) else (None,)
    if not all(callable(each) for each in functions):
        raise UsageError(f"Trainer: callbacks: got {callbacks!r}; needs a list of functions that take a dictionary.")
    return functions
