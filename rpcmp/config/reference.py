"""Print the table of all config keys, generated from the models, as Markdown.

Run it with `python -m rpcmp.config.reference`. A test compares the table with the documentation.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rpcmp.config.loader import section_of
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory, OptimizerFactory


def table() -> str:
    """Every key with its type, default and meaning, the job's own first, then the sections."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    rows += _rows(Config, "")
    return "\n".join(rows)


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    sections = []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and not issubclass(section, Factory):
            many = "[]" if get_origin(field.annotation) is list else ""
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
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(kind) for kind in arguments if kind is not types.NoneType)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "table of factory" if section_of(arguments[1]) is Factory else "table"
    if origin is not None:  # Annotated, such as config.Arguments
        return _type(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, Factory):
        return "factory"
    return {str: "string", int: "integer", float: "number", bool: "boolean"}[annotation]


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
