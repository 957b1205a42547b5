"""Running an exported folder with its own runtime, greedily: in fp32 the tokens are those of our own engine."""

from collections.abc import Sequence
from pathlib import Path

from gptworks import cpu, file_errors
from gptworks.config.schema import GenerateConfig, ModelConfig
from gptworks.errors import CheckpointError, GenerationError, UsageError
from gptworks.export import registry
from gptworks.export.folder import INFO_SUFFIX, read_info
from gptworks.generate.result import Finish, Generation
from gptworks.generate.text import TextOut
from gptworks.tokenizer import Tokenizer

_USUAL = GenerateConfig().max_new_tokens


class Inference:
    """>>> Inference("stories-onnx").generations("Once upon a time", max_new_tokens=20)   # doctest: +SKIP"""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            file_errors.refuse_unreadable(self.folder)
            raise UsageError(f"{folder}: no such folder. Needed: one that `gptworks export` wrote.")
        recognised = registry.recognise(self.folder)
        info = read_info(self.folder)
        if recognised is None or info is None:
            missing = "no weights of a known runtime" if recognised is None else f"no file *{INFO_SUFFIX}"
            raise CheckpointError(
                f"{folder}: {missing} in it. Needed: a folder that `gptworks export` wrote "
                f"(--to {', '.join(registry.NAMES)}). `gptworks generate` runs checkpoints."
            )
        file_errors.refuse_unreadable(self.folder)  # what the runtimes say of such a file is less
        self.target, file = recognised
        self.model = ModelConfig.model_validate(info["model"])
        self.tokenizer = Tokenizer.from_pretrained(self.folder)
        cpu.settle()
        self.runner = self.target.open(file, self.model)

    def generations(self, prompts: str | Sequence[str], *, max_new_tokens: int | None = None) -> list[Generation]:
        """`max_new_tokens`: None = the usual number, or as many as the context has room for."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        encoded = [self._encode(number, text, max_new_tokens) for number, text in enumerate(texts, start=1)]
        limits = [max_new_tokens or min(_USUAL, self._room(tokens)) for tokens in encoded]
        return [self._continue(*each) for each in zip(texts, encoded, limits, strict=True)]

    def new_tokens_that_fit(self, prompts: list[str]) -> list[int | None]:
        """For each prompt, how many new tokens fit where these are fewer than usual; else None."""
        rooms = [self._room(self._encode(number, text, None)) for number, text in enumerate(prompts, start=1)]
        return [room if room < _USUAL else None for room in rooms]

    def _room(self, tokens: list[int]) -> int:
        return self.model.max_positions - len(tokens)

    def _encode(self, number: int, text: str, max_new_tokens: int | None) -> list[int]:
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens: got {max_new_tokens}; needs 1 or more.")
        tokens, context = self.tokenizer.encode_prompt(text), self.model.max_positions
        if not tokens:
            raise GenerationError(f"prompt {number} is empty. Needed: at least one token of text.")
        if len(tokens) + (max_new_tokens or 1) > context:
            room = self._room(tokens)
            more = f" and {max_new_tokens} more were asked for" if max_new_tokens else ""
            raise GenerationError(
                f"prompt {number} has {len(tokens)} tokens{more}, but the model's context is {context}. "
                + (f"Ask for at most {room}." if room > 0 else f"Shorten it to {context - 1} or fewer.")
            )
        return tokens

    def _continue(self, text: str, tokens: list[int], max_new_tokens: int) -> Generation:
        eod_id = self.tokenizer.eod_id
        new = self.runner.continue_greedily(tokens, max_new_tokens, eod_id)
        finish: Finish = "eod" if new and new[-1] == eod_id else "length"
        new = new[:-1] if finish == "eod" else new
        out = TextOut(self.tokenizer, tokens)
        out.extend(new)
        out.close()
        return Generation(text, out.text, new, [], finish, None)
