"""Walk the models of a configuration: its sections, their keys, and the kinds of values.

The errors of the loader, the table of all keys and the completion of command lines use it.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Level:
    """What a dotted key leads to.

    Attributes:
        section: the model of the keys below it; None if there are none, or none that are known.
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
    """Return the model inside `annotation`, such as StageConfig in list[StageConfig]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _section_in(arg))), None)
