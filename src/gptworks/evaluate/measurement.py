"""One model under one task: what the task asks of it, and the result as a dictionary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.checkpoint.pretrained import Pretrained, PretrainedGPT
from gptworks.data.store import sha256_of
from gptworks.errors import TokenizerError
from gptworks.evaluate import identity
from gptworks.evaluate.documents import Document, score_documents
from gptworks.evaluate.progress import Watcher
from gptworks.evaluate.records import Records
from gptworks.evaluate.request import Request
from gptworks.evaluate.rows import Score
from gptworks.tokenizer import Tokenizer


@dataclass(frozen=True)
class Measurement:
    path: str
    model: PretrainedGPT
    weights_sha256: str
    request: Request
    watcher: Watcher

    @classmethod
    def load(cls, path: str, request: Request, watcher: Watcher) -> "Measurement":
        stated: dict[str, Any] = {"tokenizer": request.tokenizer, "shape": request.shape}
        opened = Pretrained.open(path, **stated)
        model = PretrainedGPT.from_pretrained(path, device=request.device, weights=request.weights, **stated)
        return cls(path, model, identity.of_weights(opened), request, watcher)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.model.tokenizer is None:
            raise TokenizerError(
                f"{self.path}: has no tokenizer, and this task is text. Name one with --tokenizer, or put "
                "tokenizer.json (or vocab.json and merges.txt, or a sentencepiece .model) beside the weights."
            )
        return self.model.tokenizer

    def head(self, protocol: str, data_sha256: str) -> dict[str, Any]:
        return {"task": self.request.task, "protocol": protocol, "data_sha256": data_sha256}

    def file_head(self, protocol: str) -> dict[str, Any]:
        return self.head(protocol, sha256_of(Path(self.request.data)))

    def score(self, head: Mapping[str, Any], documents: Sequence[Document]) -> list[Score]:
        """With `per_document`, what an interrupted evaluation of the same has written is not computed again."""
        tokenizer = self.model.tokenizer
        header = {
            **head,
            "weights_sha256": self.weights_sha256,
            "tokenizer": tokenizer.identity if tokenizer else None,
            "weights_kept_in": self.request.weights,
        }
        with Records(self.request.per_document, header, len(documents)) as records:
            return score_documents(
                self.model,
                documents,
                records,
                batch_size=self.request.batch_size,
                watcher=self.watcher,
                name=self.path,
            )

    def result(
        self, head: Mapping[str, Any], rows: list[dict[str, Any]], remarks: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The first of `rows` is the model's; others are of simple models beside it."""
        request = self.request
        limited = [f"only the first {request.limit} were measured"] if request.limit else []
        return {
            "task": request.task,
            "protocol": head["protocol"],
            "data": {"path": request.data, "sha256": head["data_sha256"]},
            "limit": request.limit or None,
            "rows": [self._identity() | rows[0], *rows[1:]],
            "remarks": [*remarks, *limited],
        }

    def _identity(self) -> dict[str, Any]:
        tokenizer = self.model.tokenizer
        named = {"name": tokenizer.name, "identity": tokenizer.identity} if tokenizer else None
        return {
            "model": self.path,
            "weights_sha256": self.weights_sha256,
            "weights_kept_in": self.request.weights,
            "tokenizer": named,
        }
