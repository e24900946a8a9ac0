"""The keys of a configuration: their sections, their types, and the table of all of them.

The loader's errors and the completion of command lines walk the sections. `python -m
rpcmp.config.keys` prints the table as Markdown; a test compares it with the documentation.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rpcmp.config.schema import Config
from rpcmp.config.types import Factory, OptimizerFactory


@dataclass(frozen=True)
class Level:
    """The section or table that a dotted key leads to.

    Attributes:
        container: list or dict if there are several such sections, or dict for a plain table.
    """

    section: type[BaseModel] | None
    container: type | None = None

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """The keys that may follow; empty below a list or a table, whose keys are the user's."""
        return {} if self.section is None or self.container else self.section.model_fields

    def below(self, part: str) -> Level:
        """Return the level that the next part of the key leads to."""
        if self.container is dict or (self.container is list and part.isdecimal()):
            return Level(self.section)
        field = self.fields.get(part)
        return Level(None) if field is None else level_of(field)


def level_of(field: FieldInfo) -> Level:
    """Return what may follow a key, which is given by its field."""
    alternatives = kinds(field.annotation)
    for kind in alternatives:
        if (section := _section_in(kind)) is not None:
            origin = get_origin(kind)
            return Level(section, origin if origin in (list, dict) else None)
    return Level(None, dict if any(get_origin(kind) is dict for kind in alternatives) else None)


def kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a value may have besides None; unions and Annotated are taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(kind for member in get_args(annotation) for kind in kinds(member))
    return () if annotation is types.NoneType else (annotation,)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _section_in(arg))), None)


def table() -> str:
    """Every key with its type, default and meaning, the job's own first, then the sections."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    rows += _rows(Config, "")
    return "\n".join(rows)


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    sections = []
    for name, field in model.model_fields.items():
        level = level_of(field)
        section = level.section
        if section is not None and not issubclass(section, Factory):
            many = "[]" if level.container is list else ""
            sections.append((section, f"{prefix}{name}{many}.", field))
            continue
        cells = (f"`{prefix}{name}`", _type(field.annotation), _default(field), field.description)
        yield f"| {' | '.join(map(str, cells))} |"
        if section is OptimizerFactory and not prefix:  # what it has besides a factory's keys
            field = OptimizerFactory.model_fields["groups"]
            yield f"| `{name}.groups` | list of table | | {_text(field)} |"
    for section, path, field in sections:
        yield f"| **`{path.removesuffix('.')}`** | section | {_default(field)} | {_text(field)} |"
        yield from _rows(section, path)


def _text(field: FieldInfo) -> str:
    return field.description or ""


def _type(annotation: Any) -> str:
    return " or ".join(map(_kind, kinds(annotation)))


def _kind(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "table of factory" if kinds(arguments[1]) == (Factory,) else "table"
    if issubclass(kind, Factory):
        return "factory"
    return {str: "string", int: "integer", float: "number", bool: "boolean"}[kind]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined or value in ([], {}):
        return ""
    if isinstance(value, Factory):
        arguments = ", ".join(f"{key} = {item}" for key, item in value.kwargs.items())
        return f'`"{value.callable}"` with {arguments}'
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(table())
