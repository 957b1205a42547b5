"""Figures that others published, to be read beside a result: none of them was reproduced here."""

from dataclasses import dataclass

_PAPER = "Radford et al. 2019 (GPT-2), table 3"
_PADDLE = "PaddleNLP, examples/language_model/gpt, log of run_eval"
_FLEETX = "FleetX/PaddleFleetX, README of the 345M model"
_FLEETX_RUN = "FleetX/PaddleFleetX, single-card document, log"
_MINDFORMERS = "MindFormers, document of gpt2"


@dataclass(frozen=True)
class Published:
    task: str
    model: str
    metric: str
    value: float
    source: str
    rule: str  # how it was measured, as far as that is known

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "status": STATUS}


STATUS = "published, not reproduced here"

_STRICT = "strict last word"
_STRICT_BUGGY = "strict last word; sums slightly off (a batch repeated, the last dropped)"
_STRICT_CUT = "strict last word; drops the last incomplete batch"
_WORDS_2 = "WikiText-2, reversible detokenizers"
_WORDS_103 = "WikiText-103, reversible detokenizers"
_OWN_RULE = "last word, with a filter of stop words"
_SLIDING = "sliding window, detokenized"
_ZERO_SHOT = "WikiText-2, zero-shot, exp of the mean of batch losses"
_BATCHES = "WikiText-2, exp of the mean of batch losses"

PUBLISHED = (
    Published("lambada", "GPT-2 124M (gpt2-en)", "accuracy", 1678 / 5153, _PADDLE, _STRICT),
    Published("lambada", "FleetX 345M", "accuracy", 0.4417, _FLEETX, _STRICT_BUGGY),
    Published("lambada", "FleetX 345M, single card", "accuracy", 2124 / 5153, _FLEETX_RUN, _STRICT_BUGGY),
    Published("lambada", "FleetX 345M, int8 (QAT)", "accuracy", 0.4494, "FleetX/PaddleFleetX, README", _STRICT_BUGGY),
    Published("lambada", "OneFlow 117M, 500k iterations", "accuracy", 1345 / 5152, "OneFlow-Benchmark", _STRICT_CUT),
    Published("lambada", "bflm GPT-2", "accuracy", 0.4667, "bflm", "last BPE token"),
    Published("lambada", "GPT-2 117M", "accuracy", 0.4599, _PAPER, _OWN_RULE),
    Published("lambada", "GPT-2 345M", "accuracy", 0.5548, _PAPER, _OWN_RULE),
    Published("lambada", "GPT-2 762M", "accuracy", 0.6012, _PAPER, _OWN_RULE),
    Published("lambada", "GPT-2 1542M", "accuracy", 0.6324, _PAPER, _OWN_RULE),
    Published("lambada", "GPT-2 117M", "target_perplexity", 35.13, _PAPER, _OWN_RULE),
    Published("lambada", "GPT-2 345M", "target_perplexity", 15.60, _PAPER, _OWN_RULE),
    Published("lambada", "GPT-2 762M", "target_perplexity", 10.87, _PAPER, _OWN_RULE),
    Published("lambada", "GPT-2 1542M", "target_perplexity", 8.63, _PAPER, _OWN_RULE),
    Published("wikitext", "FleetX 345M", "perplexity", 18.01, _FLEETX, _SLIDING),
    Published("wikitext", "FleetX 345M, single card", "perplexity", 19.21, _FLEETX_RUN, _SLIDING),
    Published("wikitext", "FleetX 345M, single card", "adjusted_perplexity", 24.948, _FLEETX_RUN, _SLIDING),
    Published("wikitext", "GPT-2 117M", "adjusted_perplexity", 29.41, _PAPER, _WORDS_2),
    Published("wikitext", "GPT-2 345M", "adjusted_perplexity", 22.76, _PAPER, _WORDS_2),
    Published("wikitext", "GPT-2 762M", "adjusted_perplexity", 19.93, _PAPER, _WORDS_2),
    Published("wikitext", "GPT-2 1542M", "adjusted_perplexity", 18.34, _PAPER, _WORDS_2),
    Published("wikitext", "GPT-2 117M", "adjusted_perplexity", 37.50, _PAPER, _WORDS_103),
    Published("wikitext", "GPT-2 345M", "adjusted_perplexity", 26.37, _PAPER, _WORDS_103),
    Published("wikitext", "GPT-2 762M", "adjusted_perplexity", 22.05, _PAPER, _WORDS_103),
    Published("wikitext", "GPT-2 1542M", "adjusted_perplexity", 17.48, _PAPER, _WORDS_103),
    Published("wikitext", "MindFormers gpt2", "perplexity", 25.55, _MINDFORMERS, _ZERO_SHOT),
    Published("wikitext", "MindFormers gpt2, fine-tuned", "perplexity", 22.11, _MINDFORMERS, _BATCHES),
    Published("wikitext", "MindFormers gpt2, LoRA", "perplexity", 22.46, _MINDFORMERS, _BATCHES),
    Published("wikitext", "MindFormers gpt2 13B", "perplexity", 10.49, _MINDFORMERS, _BATCHES),
)  # fmt: skip


def figures(task: str) -> list[Published]:
    return [figure for figure in PUBLISHED if figure.task == task]
