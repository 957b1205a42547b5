"""The section 'generate': how text is drawn from the model, by the rules of three systems."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gptworks.config.section import Count, CountOrOff, Rate, Section


class GenerateConfig(Section):
    """How text is drawn from the model."""

    strategy: Literal["greedy", "sampling", "beam"] = Field(
        "sampling", description="greedy: the likeliest token each time; beam: search for the likeliest text."
    )
    max_new_tokens: Count = Field(
        64, description="Tokens to generate; with `rules: mindformers` those of the prompt are counted too."
    )
    min_new_tokens: CountOrOff = Field(0, description="No end of document before this many; 0 = it may come at once.")
    ignore_eod: bool = Field(False, description="Go on after an end of document, which is then text like any other.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Texts that end a generation; neither they nor what follows is given out."
    )
    window: Literal["refuse", "slide"] = Field(
        "refuse",
        description="Text longer than model.max_positions: an error, or each token is predicted from the last "
        "max_positions tokens, read anew.",
    )
    rules: Literal["huggingface", "paddle", "mindformers"] = Field(
        "huggingface", description="Whose order of operations, penalties and scores."
    )
    temperature: Annotated[float, Field(ge=1e-5)] = Field(1.0, description="sampling: logits are divided by this.")
    top_k: CountOrOff = Field(0, description="sampling: keep the k likeliest tokens; 0 = all.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="sampling: keep the likeliest tokens up to this mass."
    )
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="sampling: keep tokens at least this many times as likely as the likeliest; 0 = off."
    )
    typical_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="sampling: keep the tokens nearest to the expected surprise up to this mass; 1 = off."
    )
    repetition_penalty: Annotated[float, Field(ge=1e-5)] = Field(
        1.0, description="Logits of tokens already in prompt or text: positive ones divided, negative ones multiplied."
    )
    presence_penalty: float = Field(0.0, description="Subtracted from the logit of every generated token.")
    frequency_penalty: float = Field(0.0, description="The same, times how often it was generated.")
    no_repeat_ngram: CountOrOff = Field(0, description="No sequence of this many tokens twice; 0 = off.")
    logit_bias: tuple[str, ...] = Field(
        (), description="ID:BIAS, such as 198:-2.5, added to the logit of that token; -inf forbids it."
    )
    num_return_sequences: Count = Field(1, description="sampling, beam: texts per prompt.")
    best_of: CountOrOff = Field(
        0, description="sampling: draw this many, give out those with the highest mean log-probability; 0 = off."
    )
    num_beams: Count = Field(1, description="beam: texts followed at the same time; 2 or more.")
    length_penalty: float = Field(1.0, description="beam: scores are divided by length to this power.")
    early_stopping: Literal[True, False, "never"] = Field(
        False,
        description="beam: true ends with num_beams finished texts; false when none is likely to get better; "
        "never when none can.",
    )
    num_beam_groups: Count = Field(1, description="beam: groups that avoid each other's tokens; divides num_beams.")
    diversity_penalty: Rate = Field(
        0.0, description="beam: subtracted for each time an earlier group took the same token in this step."
    )
    speculate: str = Field(
        "",
        description="greedy, sampling: read several tokens at once that are guessed: `ngram` from what the text had "
        "before, or a folder of a smaller model with the same vocabulary. The text stays the same; empty = off.",
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        1234, description="Seed of the random draws; a command or call that gives none (or this default) draws anew."
    )

    @field_validator("stop", "logit_bias", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("temperature", mode="before")
    @classmethod
    def _above_zero(cls, value: Any) -> Any:
        if isinstance(value, int | float) and value <= 0:
            raise ValueError("needs a number above 0; for the likeliest token each time use strategy: greedy")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _ids_and_numbers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        ids = [_bias(text)[0] for text in value]
        twice = next((number for number in ids if ids.count(number) > 1), None)
        if twice is not None:
            raise ValueError(f"token {twice} has two biases; give one")
        return value

    @property
    def biases(self) -> dict[int, float]:
        return dict(_bias(text) for text in self.logit_bias)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "GenerateConfig":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: {self.min_new_tokens} is above generate.max_new_tokens ({self.max_new_tokens})."
            )
        problem = self._beam_problem() or self._count_problem() or self._rules_problem()
        if problem:
            raise ValueError(problem)
        return self

    def _beam_problem(self) -> str:
        if self.strategy == "beam":
            if self.speculate:
                return f"speculate: {self.speculate} needs strategy: greedy or sampling, got beam. Leave it out."
            if self.num_beams < 2:
                return f"num_beams: {self.num_beams}, but generate.strategy is beam. Set num_beams to 2 or more."
            if self.num_beams % self.num_beam_groups:
                return f"num_beam_groups: {self.num_beam_groups} does not divide generate.num_beams ({self.num_beams})."
            if (self.num_beam_groups > 1) != (self.diversity_penalty > 0):
                return (
                    f"diversity_penalty: {self.diversity_penalty:g} with generate.num_beam_groups: "
                    f"{self.num_beam_groups}. Groups need a penalty above 0, and a penalty needs 2 groups or more."
                )
            return ""
        for name, off in (("num_beams", 1), ("num_beam_groups", 1), ("diversity_penalty", 0)):
            if getattr(self, name) != off:
                return (
                    f"{name}: {getattr(self, name):g} needs strategy: beam, got {self.strategy}. "
                    f"Set strategy: beam, or {name}: {off}."
                )
        return ""

    def _count_problem(self) -> str:
        """Several texts of one prompt."""
        if self.best_of and self.strategy != "sampling":
            return f"best_of: {self.best_of} needs strategy: sampling, got {self.strategy}. Set best_of: 0."
        most = {"greedy": 1, "sampling": self.best_of, "beam": self.num_beams}[self.strategy]
        if most and self.num_return_sequences > most:
            why = {"greedy": "greedy has one", "sampling": f"best_of draws {most}", "beam": f"there are {most} beams"}
            return (
                f"num_return_sequences: {self.num_return_sequences}, but {why[self.strategy]}. Ask for at most {most}."
            )
        return ""

    def _rules_problem(self) -> str:
        """A setting that the system whose rules are asked for does not have."""
        if self.rules == "huggingface":
            return ""
        missing = ["min_p", "typical_p", "presence_penalty", "frequency_penalty", "no_repeat_ngram", "logit_bias"]
        missing += ["num_beam_groups"]
        if self.rules == "mindformers":
            missing += ["temperature", "min_new_tokens"]
            if self.strategy == "beam":
                return "strategy: beam, but generate.rules: mindformers has none. Use greedy or sampling."
        for name in missing:
            if getattr(self, name) != GenerateConfig.model_fields[name].default:
                return f"{name}: is set, but generate.rules: {self.rules} has no such setting. Leave one of them out."
        if self.early_stopping == "never":
            return f"early_stopping: never, but generate.rules: {self.rules} knows only true and false."
        return ""


def _bias(text: str) -> tuple[int, float]:
    """'198:-2.5' as (198, -2.5)."""
    number, _, bias = text.partition(":")
    try:
        token, value = int(number), float(bias)
    except ValueError:
        token, value = -1, 0.0
    if token < 0 or not value < 1e30:
        raise ValueError(f"{text!r} is not ID:BIAS, a token id and a number such as '198:-2.5'")
    return token, value
