"""Our models in lm-evaluation-harness: `python -m gptworks.evaluate.harness run --model gptworks --tasks ...`.

The three questions that the harness asks are answered by `HarnessAnswers`, which needs nothing of it; `harness_class`
makes of that a model for the harness, registered there under the name `gptworks`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.config.load import from_dict
from gptworks.errors import TokenizerError, UsageError
from gptworks.evaluate.rows import Row
from gptworks.evaluate.scoring import score_all
from gptworks.evaluate.tasks.lambada import encode_pair
from gptworks.generate.engine import continue_tokens
from gptworks.tokenizer import Tokenizer

_DEFAULT_NEW_TOKENS = 256  # where a task does not say


class HarnessAnswers:
    """`requests` are the harness's instances; all that is read of them is `args`."""

    model: PretrainedGPT
    tokenizer: Tokenizer
    rows_per_batch: int

    def load(self, pretrained: str, device: str, batch_size: int, weights: str = "fp32") -> None:
        self.model = PretrainedGPT.from_pretrained(pretrained, device=device, weights=weights)
        if self.model.tokenizer is None:
            raise TokenizerError(f"{pretrained}: has no tokenizer. Put tokenizer.json beside the weights.")
        self.tokenizer, self.rows_per_batch = self.model.tokenizer, batch_size

    @property
    def context(self) -> int:
        return self.model.cfg.max_positions

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """For each continuation after its context: summed log-probability, and whether greedy decoding gives it."""
        rows = [self._row(request.args) for request in requests]
        scores = score_all(self.model, rows, batch_size=self.rows_per_batch)
        return [(each.log_probability, each.greedy) for each in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Log-probabilities of whole texts, each after the end of a document. What does not fit the context is cut into
        pieces that score every token once; the last piece reaches back as far as it can."""
        pieces = [self._pieces(self.tokenizer.encode(request.args[0])) for request in requests]
        scores = score_all(self.model, [row for rows in pieces for row in rows], batch_size=self.rows_per_batch)
        ends = np.cumsum([0, *(len(rows) for rows in pieces)]).tolist()
        return [sum(each.log_probability for each in scores[begin:end]) for begin, end in pairwise(ends)]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        return [self._continue(*request.args) for request in requests]

    def _row(self, texts: tuple[str, str]) -> Row:
        question = encode_pair(texts[0], texts[1], self.tokenizer)
        if len(question.target) > self.context:
            raise UsageError(
                f"a continuation of {len(question.target)} tokens does not fit the model's context of {self.context}."
            )
        tokens = np.array([*question.context, *question.target])[-(self.context + 1) :]
        return Row(tokens, len(tokens) - len(question.target))

    def _pieces(self, ids: list[int]) -> list[Row]:
        if self.tokenizer.eod_id is None:
            raise TokenizerError(f"{self.tokenizer.name}: has no end-of-document token to begin a text with.")
        tokens = np.array([self.tokenizer.eod_id, *ids])
        rows = []
        for begin in range(1, len(tokens), self.context):
            end = min(begin + self.context, len(tokens))
            piece = tokens[max(0, end - self.context - 1) : end]
            rows.append(Row(piece, len(piece) - (end - begin)))
        return rows

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [text for text in ([until] if isinstance(until, str) else until) if text]
        max_new = int(settings.get("max_gen_toks") or _DEFAULT_NEW_TOKENS)
        if max_new >= self.context:
            raise UsageError(f"max_gen_toks: got {max_new}; the model's context of {self.context} leaves no prompt.")
        values: dict[str, Any] = {"strategy": "greedy", "max_new_tokens": max_new, "stop": stops}
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            names = ("temperature", "top_k", "top_p")
            values |= {"strategy": "sampling", **{name: settings[name] for name in names if name in settings}}
        cfg = from_dict({"generate": values}, "generate_until").generate
        prompt = self.tokenizer.encode(context) or [self.tokenizer.eod_id or 0]
        prompt = prompt[-(self.context - max_new) :]
        (new,) = continue_tokens(self.model, [prompt], cfg, tokenizer=self.tokenizer)[0]
        text = self.tokenizer.decode(new.tokens)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def harness_class() -> type:
    """A subclass of lm_eval's LM, known to `lm_eval` as `gptworks`: model_args pretrained=FOLDER."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError:
        raise UsageError('lm-evaluation-harness is not installed: pip install "gptworks[eval]".') from None

    class GPTWorksLM(HarnessAnswers, LM):  # type: ignore[misc]
        def __init__(
            self,
            pretrained: str,
            device: str | None = "auto",
            batch_size: int | str | None = 8,
            weights: str = "fp32",
            **_: Any,
        ) -> None:
            LM.__init__(self)
            size = 8 if batch_size is None or not str(batch_size).isdigit() else int(batch_size)
            self.load(pretrained, device or "auto", max(1, size), weights)

    register_model("gptworks")(GPTWorksLM)
    return GPTWorksLM


def main() -> None:
    """lm_eval's command line, which then knows our models."""
    harness_class()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
