"""The section `data`: what is read, in which shares, and how it is cut into samples."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gptworks.config.section import Count, CountOrOff, Section


class StageConfig(Section):
    """Tokens of training in which the stores of data.path have weights of their own."""

    from_tokens: CountOrOff = Field(0, description="The first one; that of the stage before ends here.")
    to_tokens: CountOrOff = Field(0, description="Where it ends; 0 = it does not, which only the last stage may say.")
    weights: tuple[Annotated[float, Field(gt=0.0)], ...] = Field((), description="One per path.")


class DataConfig(Section):
    """What is read and how it is cut into samples."""

    path: tuple[str, ...] = Field(
        (),
        description="Prefix, file, folder or pattern (shards/*.bin) of a dataset in any known format, a file or folder "
        "of text of up to 64 MB, or a list.",
    )
    held_out_path: tuple[str, ...] = Field(
        (), description="The same for held-out text of its own; the second share of data.path is then trained on."
    )
    weights: tuple[Annotated[float, Field(gt=0.0)], ...] = Field(
        (), description="One per path: its share of the samples; empty = in proportion to its size."
    )
    stages: tuple[StageConfig, ...] = Field(
        (),
        description="Instead of weights: a list of {from_tokens, to_tokens, weights}, for weights that change as "
        "training goes on; rounded down to whole samples.",
    )
    split: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(
        (949.0, 50.0, 1.0), description="Shares of documents for training, held-out and test."
    )
    seq_len: Count = Field(
        1024, description="Predicted tokens per sample (a window has one more); empty = model.max_positions."
    )
    order: Literal["shuffled", "sequential", "megatron", "paddle", "oneflow"] = Field(
        "shuffled",
        description="Order of the windows within an epoch; a function of train.seed and the sample index. megatron, "
        "paddle, oneflow: the samples of megatron-core, of PaddleNLP and FleetX, or of OneFlow, for a fixed number of "
        "steps.",
    )
    tokenizer: str = Field(
        "",
        description="The tokenizer of stores that do not say which it is, and of text: gpt2, a folder or a file; "
        "chars: the characters of the text.",
    )
    key: str = Field(
        "",
        description="Key or column of the text, where data.path is text; empty = text. Several with commas between "
        "(title,steps) are joined, one below the other.",
    )
    mask_eod: bool = Field(False, description="Do not score what follows an end-of-document token.")
    reset_positions: bool = Field(False, description="Positions start at 0 after each end-of-document token.")
    reset_attention: bool = Field(False, description="Attention does not cross an end-of-document token.")
    too_long: Literal["refuse", "truncate", "skip"] = Field(
        "refuse",
        description="What to do with prompt/completion examples, and rows that are samples already, longer than "
        "seq_len + 1.",
    )

    @field_validator("path", "held_out_path", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("weights", mode="before")
    @classmethod
    def _one_weight(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    @field_validator("split", mode="before")
    @classmethod
    def _split_from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                return tuple(float(part) for part in value.replace("/", ",").split(","))
            except ValueError:
                raise ValueError(f"{value!r} is not a list of numbers such as '949,50,1'") from None
        return (value,) if isinstance(value, int | float) else value

    @field_validator("split")
    @classmethod
    def _split_alone(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(value) == 1 and 0 < value[0] < 1:
            raise ValueError(
                f"needs a share for each part: alone it gives everything to training. {value[0]:g} held out is "
                f"data.split={1 - value[0]:g},{value[0]:g}"
            )
        return value

    @field_validator("key", mode="before")
    @classmethod
    def _key_is_one_text(cls, value: Any) -> Any:
        is_list = isinstance(value, list | tuple)
        if is_list:
            raise ValueError(f"needs one text, with commas between several columns: {','.join(map(str, value))}")
        return value

    @model_validator(mode="after")
    def _lengths_agree(self) -> "DataConfig":
        if self.weights and len(self.weights) != len(self.path):
            raise ValueError(f"weights: {len(self.weights)} weights for {len(self.path)} paths; give one for each.")
        self._check_stages()
        if not 1 <= len(self.split) <= 3 or sum(self.split) <= 0:
            raise ValueError(
                f"split: got {list(self.split)}; needs one to three shares, not all zero, such as '949,50,1'."
            )
        return self

    def _check_stages(self) -> None:
        """They follow each other without gaps, from the first token on."""
        if self.stages and self.weights:
            raise ValueError("stages: data.weights are given, too. Keep one of them.")
        end = 0
        for number, stage in enumerate(self.stages):
            stage_name = f"stages: number {number + 1} (from_tokens {stage.from_tokens:,})"
            if len(stage.weights) != len(self.path):
                raise ValueError(
                    f"{stage_name} has {len(stage.weights)} weights for {len(self.path)} paths; give one for each."
                )
            if stage.from_tokens != end:
                problem = "leaves a gap" if stage.from_tokens > end else "overlaps the one before it"
                raise ValueError(f"{stage_name} {problem}: what comes before ends at {end:,}. Set from_tokens={end}.")
            if stage.to_tokens and stage.to_tokens <= stage.from_tokens:
                raise ValueError(f"{stage_name} ends at {stage.to_tokens:,}, before it begins. Set a higher to_tokens.")
            if not stage.to_tokens and number + 1 < len(self.stages):
                raise ValueError(f"{stage_name} has no to_tokens, but another stage follows. Say where it ends.")
            end = stage.to_tokens
