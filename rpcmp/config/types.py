"""The types of values in a configuration: factories, parameter groups, sizes of memory.

They are strict, so that a wrong type or an unknown key is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    PrivateAttr,
    Tag,
    TypeAdapter,
    model_validator,
)

from rpcmp.config import addresses
from rpcmp.errors import ConfigError

COPY = "@"
"""In the name of a parameter's copy, before the number of the layer that has it: a parameter that
stands in several layers of a `module` by one name. No state dict has such a name."""

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
"""Bytes of each unit."""


def parse_size(text: str) -> int:
    """Return the bytes of "8 GiB" or "1.5 GB"; raises ConfigError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    size = float(match[1]) * UNITS.get(match[2], 0) if match else 0.0
    if not 1 <= size < math.inf:
        raise ConfigError(f'{text!r} is not a size; write one such as "8 GiB" ({", ".join(UNITS)})')
    return int(size)


def format_size(size: int) -> str:
    """Return `size` in bytes with a binary unit that leaves few digits, "1.5 GiB"."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if abs(size) >= UNITS[unit]), "B")
    return f"{size / UNITS[unit]:,.1f} {unit}" if unit != "B" else f"{size} B"


def _valid(check: Callable[[str], object]) -> AfterValidator:
    """Make a check that raises ConfigError a validator of pydantic."""

    def validate(text: str) -> str:
        try:
            check(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text

    return AfterValidator(validate)


Size = Annotated[str, _valid(parse_size)]
"""A size such as "8 GiB"."""

Address = Annotated[str, _valid(addresses.parse)]
"""HOST:PORT."""

_PLAIN: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return _PLAIN.validate_python(_without_tuples(arguments))


def _without_tuples(value: Any) -> Any:
    """Return tuples as lists: `betas=(0.9, 0.99)` is usual in code, and JSON has only lists."""
    if isinstance(value, dict):
        return {key: _without_tuples(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_without_tuples(item) for item in value]
    return value


Arguments = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Keyword arguments: plain values only, since they are sent to other hosts as JSON."""

NAME = r"^[A-Za-z0-9_-]+$"

CALLABLE = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


class Strict(BaseModel):
    """Base of all sections: unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants"
    )


class Factory(Strict):
    """Something the job builds: a callable and its keyword arguments."""

    callable: str = Field(pattern=CALLABLE)
    """"module:callable"."""
    kwargs: Arguments = Field(default_factory=dict)
    """Its keyword arguments."""

    def adapted(self, own: Self | dict[str, Any]) -> Self:
        """Return `own` if it is a factory, else this one with its arguments overridden by `own`."""
        if isinstance(own, Factory):
            return own
        return self.model_copy(update={"kwargs": {**self.kwargs, **own}})


class ParameterGroup(BaseModel):
    """Parameters with options of their own, which are all keys besides `match`."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, ser_json_inf_nan="constants")

    match: list[str] = Field(min_length=1)
    """Their names in the unsplit model, with * and ?, such as "*.bias"."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="before")
    @classmethod
    def _check_options(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        options = _plain({key: value for key, value in given.items() if key != "match"})
        if not options:
            raise ValueError("a group needs at least one option, such as lr = 0.1")
        if "params" in options:
            raise ValueError("`params` is not an option; `match` selects the parameters")
        return {**given, **options}


class OptimizerFactory(Factory):
    """What makes an optimizer, with parameter groups."""

    groups: list[ParameterGroup] = Field(default_factory=list)
    """Parameters that have other options, such as [{ match = ["*.bias"], weight_decay = 0.0 }]; the
    first that matches holds."""

    _tied: list[list[str]] = PrivateAttr(default_factory=list)

    def with_tied(self, tied: list[list[str]]) -> Self:
        copy = self.model_copy()
        copy._tied = tied
        return copy

    def names_of(self, parameter: str) -> list[str]:
        """Return all names of a parameter in the unsplit model; groups may match any of them."""
        return next((names for names in self._tied if parameter in names), [parameter])


def _expand(value: Any) -> Any:
    return {"callable": value} if isinstance(value, str) else value


FactoryOrName = Annotated[Factory, BeforeValidator(_expand)]
"""A Factory; a bare "module:callable" stands for one without arguments."""

OptimizerOrName = Annotated[OptimizerFactory, BeforeValidator(_expand)]
"""The same for an optimizer."""


def _own(value: Any) -> Any:
    """Check a stage's table: a factory of its own, or arguments for the job's, but not both."""
    value = _expand(value)
    if isinstance(value, dict) and "callable" in value:
        mixed = ", ".join(f"`{key}`" for key in value if key not in OptimizerFactory.model_fields)
        if mixed:
            raise ValueError(
                f"{mixed} beside `callable`: write a stage's own factory as "
                "{ callable = ..., kwargs = { ... } }; a table without `callable` holds arguments "
                "that override the job's"
            )
    elif isinstance(value, dict) and isinstance(value.get("kwargs"), dict):
        raise ValueError(
            "`kwargs` without `callable`: write arguments that override the job's as they are, "
            "such as { lr = 0.1 }"
        )
    elif isinstance(value, dict) and "groups" in value:
        raise ValueError(
            "`groups` without `callable`: give them in the job's [optimizer], where `match` says "
            "which parameters of which stage they are"
        )
    return value


def _kind(value: Any) -> str:
    is_factory = isinstance(value, Factory) or (isinstance(value, dict) and "callable" in value)
    return "<factory>" if is_factory else "<arguments>"


_Own = TypeVar("_Own", Factory, OptimizerFactory)

StageOverride = Annotated[
    Annotated[_Own, Tag("<factory>")] | Annotated[Arguments, Tag("<arguments>")],
    Discriminator(_kind),
    BeforeValidator(_own),
]
"""A stage's own factory, or arguments that override those of the job's. Tags in brackets are not
keys, so errors leave them out."""

Positive = Annotated[int, Field(ge=1)]

Schedule = Literal["gpipe", "1f1b", "zero-bubble"]
"""The names of rpcmp.pipelining.schedule's policies."""

Auto = Literal["auto"]
"""A run finds the value by itself."""

PositiveOrAuto = Annotated[
    Annotated[Positive, Tag("<number>")] | Annotated[Auto, Tag("<auto>")],
    Discriminator(lambda value: "<auto>" if isinstance(value, str) else "<number>"),
]

Autocast = Literal["bfloat16", "float16"]
"""The dtypes that `torch.autocast` may compute in."""

Balance = Annotated[
    Annotated[list[Positive], Tag("<list>")] | Annotated[Literal["auto"], Tag("<auto>")],
    Discriminator(lambda value: "<auto>" if isinstance(value, str) else "<list>"),
]
"""Layers of each stage, or "auto"."""
