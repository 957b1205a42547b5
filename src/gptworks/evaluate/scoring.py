"""How likely a model finds given tokens: the one computation under every task.   Shapes: R scored tokens, V vocabulary.

Rows are sorted by length, padded on the right and computed in batches. Attention looks to the left only, so neither the
padding nor the neighbours change a row but by rounding. Only scored tokens meet the head: the logits of whole rows of
a large vocabulary would need gigabytes.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from gptworks.errors import DataError
from gptworks.evaluate.rows import Row, Score
from gptworks.model import GPT, IGNORED
from gptworks.model.inference import evaluating
from gptworks.model.loss import CHUNK_ELEMENTS


def score(
    model: GPT, rows: Sequence[Row], *, batch_size: int = 8, known: Collection[int] = ()
) -> Iterator[dict[int, Score]]:
    """One dictionary {number of the row: score} per batch; the longest rows first, so that too little memory shows.

    A batch of rows that are all `known` is left out.
    """
    for number, row in enumerate(rows):
        _check(model, number, row)
    order = sorted(range(len(rows)), key=lambda number: (-len(rows[number].tokens), number))
    for begin in range(0, len(order), batch_size):
        numbers = order[begin : begin + batch_size]
        if all(number in known for number in numbers):
            continue
        yield dict(zip(numbers, _score_batch(model, [rows[number] for number in numbers]), strict=True))


def score_all(model: GPT, rows: Sequence[Row], *, batch_size: int = 8) -> list[Score]:
    scores: dict[int, Score] = {}
    for batch in score(model, rows, batch_size=batch_size):
        scores |= batch
    return [scores[number] for number in range(len(rows))]


def _check(model: GPT, number: int, row: Row) -> None:
    if not 1 <= row.first < len(row.tokens):
        raise DataError(
            f"row {number}: {len(row.tokens)} tokens, scored from number {row.first} on. Needed: at least one token "
            "before the first scored one, and at least one scored."
        )
    if len(row.tokens) - 1 > model.cfg.max_positions:
        raise DataError(
            f"row {number}: {len(row.tokens)} tokens, but the model's context is {model.cfg.max_positions}, which "
            f"scores {model.cfg.max_positions + 1} at most. Give it fewer."
        )
    outside = row.tokens[(row.tokens < 0) | (row.tokens >= model.cfg.vocab_size)]
    if len(outside):
        raise DataError(
            f"row {number}: token id {outside[0]} is outside the model's vocabulary of {model.cfg.vocab_size}. "
            "The text was encoded with another tokenizer than the model's."
        )


@torch.no_grad()
def _score_batch(model: GPT, rows: list[Row]) -> list[Score]:
    longest = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest - 1), IGNORED)
    for number, row in enumerate(rows):
        tokens[number, : len(row.tokens)] = torch.from_numpy(row.tokens.astype(np.int64))
        labels[number, row.first - 1 : len(row.tokens) - 1] = tokens[number, row.first : len(row.tokens)]
    device = model.device
    with evaluating(model), _score_per_token(model):
        scored_R2 = model(tokens[:, :-1].to(device), labels=labels.to(device)).cpu()
    scores = []
    for scored in scored_R2.split([row.num_scored for row in rows]):
        scores.append(Score(math.fsum(scored[:, 0].tolist()), bool(scored[:, 1].all()), len(scored)))
    return scores


@contextmanager
def _score_per_token(model: GPT) -> Iterator[None]:
    """In here the model's loss is not one sum but a row (log-probability, 1 if the likeliest) for each scored token."""
    loss = model.loss_sum
    model.loss_sum = _TokenScores()  # type: ignore[assignment]
    try:
        yield
    finally:
        model.loss_sum = loss


class _TokenScores(nn.Module):
    def forward(self, x: Tensor, weight_VD: Tensor, labels: Tensor) -> Tensor:
        is_scored = labels.reshape(-1) != IGNORED
        x_RD, labels_R = x.reshape(-1, x.shape[-1])[is_scored], labels.reshape(-1)[is_scored]
        weight = weight_VD.to(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        chunk = max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
        chunks = []
        for x_CD, labels_C in zip(x_RD.split(chunk), labels_R.split(chunk), strict=True):
            logits_CV = (x_CD @ weight.T).to(wide)
            log_probability_C = logits_CV.gather(1, labels_C[:, None])[:, 0] - logits_CV.logsumexp(-1)
            is_likeliest_C = (logits_CV.argmax(-1) == labels_C).to(wide)
            chunks.append(torch.stack([log_probability_C, is_likeliest_C], dim=1))
        return torch.cat(chunks)
