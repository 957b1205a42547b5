"""A GGUF file, handed over to llama.cpp (the extra `llama`). Order of operations and random draws are its own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptworks.config.schema import GenerateConfig
from gptworks.errors import GenerationError, UsageError
from gptworks.generate.engine import is_length_asked, settings_of
from gptworks.generate.result import Finish, Generation
from gptworks.generate.text import TextOut

# What llama.cpp has a setting of its own for.
_KNOWN = {
    "strategy", "max_new_tokens", "stop", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "num_return_sequences", "ignore_eod", "seed",
}  # fmt: skip


class LlamaCpp:
    """>>> LlamaCpp(Path("model.gguf")).generations("Once upon", max_new_tokens=20)   # doctest: +SKIP"""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UsageError(f"{path}: no such file. --engine llama.cpp reads one .gguf file.")
        try:
            from llama_cpp import Llama
        except ImportError:
            raise UsageError(
                'llama.cpp is not installed: pip install "gptworks[llama]" (built from source, it takes some minutes). '
                "--engine gptworks reads GGUF files of GPT-2, Llama, Qwen2 and Qwen3 without it."
            ) from None
        try:
            self._llama: Any = Llama(str(path), n_ctx=0, verbose=False)  # 0: the context the model was trained with
        except (ValueError, RuntimeError, AssertionError) as error:
            raise UsageError(f"{path}: llama.cpp cannot read it ({error}). Needed: a GGUF file.") from None

    def generations(self, prompts: str | Sequence[str], **settings: object) -> list[Generation]:
        cfg = _checked(settings)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        encoded = [self._encode(number, text, cfg) for number, text in enumerate(texts, start=1)]
        written = []
        for text, tokens in zip(texts, encoded, strict=True):
            for copy in range(cfg.num_return_sequences):
                out = TextOut(_Decoder(self._llama), tokens, cfg.stop)  # type: ignore[arg-type]
                finish: Finish = "length"
                for _, end in self._run(out, tokens, cfg, seed=cfg.seed + copy):
                    finish = end or finish
                out.close()
                written.append(Generation(text, out.text, out.tokens, [], finish, None))
        return written

    def stream(self, prompt: str, **settings: object) -> Iterator[str]:
        cfg = _checked(settings)
        tokens = self._encode(1, prompt, cfg)
        out = TextOut(_Decoder(self._llama), tokens, cfg.stop)  # type: ignore[arg-type]
        yield from (piece for piece, _ in self._run(out, tokens, cfg, seed=cfg.seed) if piece)
        if rest := out.close():
            yield rest

    def _encode(self, number: int, text: str, cfg: GenerateConfig) -> list[int]:
        tokens: list[int] = self._llama.tokenize(text.encode(), add_bos=False, special=False)
        if not tokens:
            raise GenerationError(f"prompt {number} is empty. Needed: at least one token of text.")
        wanted = cfg.max_new_tokens if is_length_asked(cfg) else 1
        if len(tokens) + wanted > self._context:
            more = f" and {wanted} more were asked for" if is_length_asked(cfg) else ""
            raise GenerationError(
                f"prompt {number} has {len(tokens)} tokens{more}, but the model's context is {self._context}. Ask for "
                "fewer, or shorten it."
            )
        return tokens

    @property
    def _context(self) -> int:
        about = self._llama.metadata
        # llama.cpp rounds its own context up beyond the positions the model has.
        return min(self._llama.n_ctx(), int(about[f"{about['general.architecture']}.context_length"]))

    def new_tokens_that_fit(self, prompts: list[str], **settings: object) -> list[int | None]:
        """For each prompt, how many new tokens fit where these are fewer than the settings ask for; else None."""
        cfg = _checked(settings)
        rooms = [self._context - len(self._encode(number, text, cfg)) for number, text in enumerate(prompts, start=1)]
        return [room if room < cfg.max_new_tokens else None for room in rooms]

    def _run(
        self, out: TextOut, tokens: list[int], cfg: GenerateConfig, *, seed: int
    ) -> Iterator[tuple[str, Finish | None]]:
        """Pieces of text, and at the end why it ended."""
        self._llama.set_seed(seed)
        greedy = cfg.strategy == "greedy"
        limit = min(cfg.max_new_tokens, self._context - len(tokens))  # smaller only where nobody asked for a number
        drawn = self._llama.generate(
            tokens,
            top_k=1 if greedy else cfg.top_k,
            top_p=cfg.top_p,
            min_p=cfg.min_p,
            typical_p=cfg.typical_p,
            temp=0.0 if greedy else cfg.temperature,
            repeat_penalty=cfg.repetition_penalty,
            frequency_penalty=cfg.frequency_penalty,
            presence_penalty=cfg.presence_penalty,
        )
        end = self._llama.token_eos()
        for token in drawn:
            if token == end and not cfg.ignore_eod:
                yield "", "eod"
                return
            piece = out.add(token)
            if out.is_stopped:
                yield piece, "stop"
                return
            yield piece, None
            if len(out.tokens) == limit:
                return


class _Decoder:
    """As much of a tokenizer as TextOut asks for."""

    def __init__(self, llama: Any) -> None:
        self._llama = llama

    def decode(self, ids: Sequence[int]) -> str:
        text: bytes = self._llama.detokenize(list(ids))
        return text.decode("utf-8", errors="replace")


def _checked(settings: dict[str, object]) -> GenerateConfig:
    cfg = settings_of(settings)
    if cfg.strategy == "beam":
        raise UsageError("generate.strategy: beam, but llama.cpp has none here. Use greedy or sampling.")
    for name, field in GenerateConfig.model_fields.items():
        if name not in _KNOWN and getattr(cfg, name) != field.default:
            raise UsageError(f"generate.{name}: is set, but --engine llama.cpp has no such setting. Leave it out.")
    return cfg
