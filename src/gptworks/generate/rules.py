"""In which order the logits of a row become the distribution of its next token: Hugging Face's, Paddle's, MindFormers'.

`adjusted` is what every strategy sees, `distribution` what sampling draws from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.config.schema import GenerateConfig
from gptworks.errors import GenerationError
from gptworks.generate import logits

# MindFormers looks for its nucleus among so many of the likeliest tokens.
MOST_OF_NUCLEUS = 5000


@dataclass(frozen=True)
class Past:
    """What a row consists of so far, and the token that would end it."""

    prompt: Sequence[int]
    generated: Sequence[int]
    eod_id: int | None = None
    # What earlier groups of a beam search took in this step.
    taken: Sequence[int] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.generated]


def adjusted(logits_V: Tensor, past: Past, cfg: GenerateConfig) -> Tensor:
    """Biases, penalties and bans. In a beam search what comes in, and goes out, are log-probabilities."""
    is_early = len(past.generated) < cfg.min_new_tokens
    if cfg.rules == "mindformers":
        result_V = _mindformers_penalty(logits_V, past, cfg.repetition_penalty)
    elif cfg.rules == "paddle":
        result_V = logits.forbid(logits_V, past.eod_id) if is_early else logits_V
        result_V = logits.penalize_repetition(result_V, past.tokens, cfg.repetition_penalty)
    else:
        result_V = logits.add_bias(logits_V, cfg.biases)
        result_V = logits.penalize_counts(result_V, past.taken, 0.0, cfg.diversity_penalty)
        result_V = logits.penalize_repetition(result_V, past.tokens, cfg.repetition_penalty)
        result_V = logits.penalize_counts(result_V, past.generated, cfg.presence_penalty, cfg.frequency_penalty)
        result_V = logits.forbid_repeated_ngrams(result_V, past.tokens, cfg.no_repeat_ngram)
        result_V = logits.forbid(result_V, past.eod_id) if is_early else result_V
    return result_V


def distribution(logits_V: Tensor, past: Past, cfg: GenerateConfig) -> Tensor:
    """Probabilities that sum to 1."""
    result_V = require_a_choice(adjusted(logits_V.float(), past, cfg))
    if cfg.rules == "mindformers":
        return _mindformers_distribution(result_V, cfg)
    result_V = logits.divide_by_temperature(result_V, cfg.temperature)
    if cfg.rules == "paddle":
        return _paddle_distribution(result_V, cfg)
    result_V = logits.keep_top_k(result_V, cfg.top_k)
    result_V = logits.keep_top_p(result_V, cfg.top_p)
    result_V = logits.keep_min_p(result_V, cfg.min_p)
    return logits.keep_typical(result_V, cfg.typical_p).softmax(-1)


def _paddle_distribution(logits_V: Tensor, cfg: GenerateConfig) -> Tensor:
    """Top-p looks at what top-k left without making it sum to 1 again, so it keeps more."""
    probabilities_V = logits_V.softmax(-1)
    if cfg.top_k:
        smallest = probabilities_V.topk(min(cfg.top_k, probabilities_V.shape[-1])).values[-1]
        probabilities_V = probabilities_V.where(probabilities_V >= smallest, 0.0)
    if cfg.top_p < 1.0:
        ordered_V, order_V = probabilities_V.sort(descending=True)
        is_beyond_V = ordered_V.cumsum(-1) > cfg.top_p
        is_beyond_V = torch.cat([is_beyond_V.new_zeros(1), is_beyond_V[:-1]])  # the one that crosses stays
        probabilities_V = probabilities_V.masked_fill(is_beyond_V.scatter(-1, order_V, is_beyond_V), 0.0)
    return probabilities_V / probabilities_V.sum()


def _mindformers_penalty(logits_V: Tensor, past: Past, penalty: float) -> Tensor:
    """Off the log-probability: the penalty once, and once more for each time the token was generated.

    MindFormers counts for all rows together; here each row has counts of its own, as if it were alone.
    """
    log_V = logits_V.log_softmax(-1)
    if penalty == 1.0 or not past.generated:
        return log_V
    counts_V = logits.count(past.generated, log_V)
    return log_V - counts_V * penalty - (counts_V > 0) * penalty


def _mindformers_distribution(log_V: Tensor, cfg: GenerateConfig) -> Tensor:
    """Top-p or else top-k, never both; what penalties took away is missing from the mass that top-p looks at."""
    probabilities_V = log_V.exp()
    size = probabilities_V.shape[-1]
    if cfg.top_p < 1.0:
        kept, order = probabilities_V.topk(min(MOST_OF_NUCLEUS, size))
        number = int((kept.cumsum(-1) < cfg.top_p).sum()) + 1
        kept, order = kept[:number], order[:number]
    else:
        kept, order = probabilities_V.topk(min(cfg.top_k or size, size))
    return torch.zeros_like(probabilities_V).scatter(-1, order, kept / kept.sum())


def require_a_choice(scores: Tensor) -> Tensor:
    """The scores of a row, or of several that compete, if they leave a choice: settings or a damaged model may not."""
    largest = float(scores.max())  # NaN where any is
    if math.isnan(largest) or largest == math.inf:
        raise GenerationError(
            "the model's logits are not numbers (NaN or inf). Its weights are damaged or it overflows: "
            "try another checkpoint."
        )
    if largest == -math.inf:
        raise GenerationError(
            "no token is left to choose from: logit_bias, no_repeat_ngram and min_new_tokens forbid all of them. "
            "Relax one of these."
        )
    return scores
