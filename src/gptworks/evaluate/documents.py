"""Documents that are scored one by one: each is one or more rows, and one record when all of them are done."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gptworks.data.store import Store
from gptworks.evaluate.progress import Watcher
from gptworks.evaluate.records import Records
from gptworks.evaluate.rows import Row, Score
from gptworks.evaluate.scoring import score
from gptworks.model import GPT

Document = Sequence[Row]


def score_documents(
    model: GPT, documents: Sequence[Document], records: Records, *, batch_size: int, watcher: Watcher, name: str
) -> list[Score]:
    """Scores of all documents. Those that `records` does not have yet are computed and put there, in the batches of the
    whole: a row may have another last bit beside other rows."""
    missing = records.missing
    owned = [(index, row) for index, document in enumerate(documents) for row in document]
    owners, rows = [index for index, _ in owned], [row for _, row in owned]
    waiting = {index: len(documents[index]) for index in missing}
    scores_of: dict[int, list[Score]] = {index: [] for index in missing}
    for index in missing:
        if not documents[index]:  # nothing in it to score
            records.add(index, _as_record([]))
    watcher.begin(name, len(documents), len(documents) - len(rows and missing))
    known = {number for number, index in enumerate(owners) if index not in waiting}
    try:
        for batch in score(model, rows, batch_size=batch_size, known=known):
            for number, each in batch.items():
                index = owners[number]
                if number in known:
                    continue
                scores_of[index].append(each)
                waiting[index] -= 1
                if not waiting[index]:
                    records.add(index, _as_record(scores_of.pop(index)))
            records.flush()
            watcher.batch(len(records.lines), list(batch.values()))
    finally:
        watcher.end()
    return [Score(line["log_probability"], line["greedy"], line["tokens"]) for line in records.in_order()]


def _as_record(scores: list[Score]) -> dict[str, object]:
    total, tokens = sum(each.log_probability for each in scores), sum(each.tokens for each in scores)
    perplexity = math.exp(min(-total / tokens, 700.0)) if tokens else None
    greedy = all(each.greedy for each in scores)
    return {"log_probability": total, "greedy": greedy, "tokens": tokens, "perplexity": perplexity}


@dataclass(frozen=True)
class StoreDocuments(Sequence[Document]):
    """Documents of a store, each by itself: its first token has no context and is not scored, and one that is longer
    than the context is cut into pieces side by side. Of prompts and completions only the completions are scored."""

    store: Store
    numbers: range
    length: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        number = self.numbers[index]
        begin, end = self.store.document_starts[number : number + 2].tolist()
        tokens = self.store.tokens[begin:end]
        first = 1
        if self.store.sidecar and self.store.sidecar.kind == "examples":
            completion = self.store.sequence_starts[self.store.contents.documents[number] + 1]
            first = max(1, int(completion - begin))
        rows = []
        for start in range(0, len(tokens) - 1, self.length):
            piece = tokens[start : start + self.length + 1]
            if len(piece) > max(first - start, 1):
                rows.append(Row(piece, max(first - start, 1)))
        return rows
