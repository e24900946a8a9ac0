"""The guide's table of all config keys as Markdown: `python -m tests.support.key_table`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rpcmp.config.job_sections import JobSettings
from rpcmp.config.loader import descriptions, level_of, union_members
from rpcmp.config.types import Factory, OptimizerFactory


@functools.cache
def table() -> str:
    """Return every key with its type, default and meaning; keys of the job come first, then
    sections.
    """
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    rows += _rows(JobSettings, "")
    return "\n".join(rows)


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    sections, meanings = [], descriptions(model)
    for name, field in model.model_fields.items():
        level = level_of(field)
        section = level.section
        if section is not None and not issubclass(section, Factory):
            many = "[]" if level.container is list else ""
            sections.append((section, f"{prefix}{name}{many}.", field, meanings[name]))
            continue
        cells = (f"`{prefix}{name}`", _type(field.annotation), _default(field), meanings[name])
        yield f"| {' | '.join(map(str, cells))} |"
        if section is OptimizerFactory and not prefix:  # its key besides the keys of a factory
            groups = descriptions(OptimizerFactory)["groups"]
            yield f"| `{name}.groups` | list of table | | {groups} |"
    for section, path, field, meaning in sections:
        yield f"| **`{path.removesuffix('.')}`** | section | {_default(field)} | {meaning} |"
        yield from _rows(section, path)


def _type(annotation: Any) -> str:
    return " or ".join(map(_kind, union_members(annotation)))


def _kind(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "table of factory" if union_members(arguments[1]) == (Factory,) else "table"
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
