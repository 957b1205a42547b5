"""What every section of the configuration is: frozen, strict, refused in words. The kinds of value they share."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gptworks.config.explain import explain
from gptworks.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _SectionType
else:

    class _SectionType(type(BaseModel)):
        def __call__(cls, *args: Any, **values: Any) -> Any:
            """A section that a Python program makes by hand is refused in the same words as one in a file."""
            if args:
                texts = ", ".join(repr(value) for value in args)
                first = next(iter(cls.model_fields))
                raise ConfigError(
                    cls.__name__, [f"got {texts} without a name; needs keywords, such as {cls.__name__}({first}=...)."]
                )
            try:
                return super().__call__(**values)
            except ValidationError as error:
                problems = [problem for _, problem in explain(cls.section(), error, cls.whole)]
                raise ConfigError(cls.__name__, problems) from None


Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0, description="0 = off")]
Rate = Annotated[float, Field(ge=0.0)]


def _whole_or_auto(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("needs a whole number of 1 or more, or auto")
    return value


def _count_or_auto(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError("needs a whole number of 0 or more, or auto")
    return value


CountOrAuto = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(_count_or_auto)]
Degree = Annotated[Count | Literal["auto"], BeforeValidator(_whole_or_auto)]


class Section(BaseModel, metaclass=_SectionType):
    # strict: "12" is not a number and 1 is not true; YAML has already told them apart.
    whole: ClassVar[type[BaseModel]]  # the configuration whose sections these are; its keys are those that are known
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    @classmethod
    def section(cls) -> str:
        """The name of this section in a file."""
        sections = {field.annotation: name for name, field in cls.whole.model_fields.items()}
        return sections.get(cls, cls.__name__.removesuffix("Config").lower())

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            type(self).__name__,
            [
                f"{self.section()}.{name}: cannot be set to {value!r}: a configuration does not change. Make another "
                f"one, such as {type(self).__name__}(**{{**dict(config), {name!r}: {value!r}}})."
            ],
        )

    def __delattr__(self, name: str) -> None:
        raise ConfigError(
            type(self).__name__, [f"{self.section()}.{name}: cannot be deleted: a configuration does not change."]
        )

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, values: Any) -> Any:
        """YAML has lists where we keep tuples, and people write whole numbers as 3e11."""
        if not isinstance(values, dict):
            return values
        converted = {}
        for name, value in values.items():
            field = cls.model_fields.get(name)
            if isinstance(value, list):
                value = tuple(value)
            elif isinstance(value, float) and field is not None and field.annotation is int and value.is_integer():
                value = int(value)
            converted[name] = value
        return converted
