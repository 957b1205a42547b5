"""GPT-2 as MindFormers has it: one call for logits and loss, `set_train`, and tensors of kind "ms"."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.errors import UsageError
from gptworks.tokenizer import Tokenizer

EOS = 50256  # eos_token of MindFormers' GPT2Config, whose tokens are not scored


@dataclass(frozen=True)
class GPT2Config:
    """The names of MindFormers for what a model of ours has."""

    seq_length: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int


class GPT2LMHeadModel(PretrainedGPT):
    """Called with token ids [rows, tokens]: logits, or after `set_train(True)` the loss of tokens 2 to the last."""

    @property
    def config(self) -> GPT2Config:
        cfg = self.cfg
        return GPT2Config(cfg.max_positions, cfg.vocab_size, cfg.hidden_size, cfg.num_layers, cfg.num_heads)

    def set_train(self, mode: bool = True) -> Self:
        return self.train(mode)

    def forward(self, input_ids: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """In training a position is scored where its input is not the end of text: so padding is not, as it is one."""
        tokens_BT = torch.as_tensor(input_ids).long()
        if not self.training or options:  # our own code gives options, and wants logits
            return super().forward(tokens_BT, **options)
        if tokens_BT.ndim != 2 or tokens_BT.shape[1] < 2:
            raise UsageError(
                f"GPT2LMHeadModel: got input_ids of shape {list(tokens_BT.shape)}; training needs [rows, tokens], "
                "2 tokens or more: seq_length + 1 in the document."
            )
        inputs_BT, labels_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        logits_BTV = super().forward(inputs_BT, **options)
        scored = inputs_BT != EOS
        if not scored.any():
            raise UsageError(f"GPT2LMHeadModel: nothing to score: all of input_ids is {EOS}, the end of text.")
        return cross_entropy(logits_BTV[scored].float(), labels_BT[scored])


class GPT2Tokenizer(Tokenizer):
    """Ours, which also knows `return_tensors="ms"`: MindSpore is not here, so they are torch's."""

    def __call__(
        self, text: str | Iterable[str], *, return_tensors: str | None = None, **settings: Any
    ) -> dict[str, Any]:
        return super().__call__(text, return_tensors="pt" if return_tensors == "ms" else return_tensors, **settings)
