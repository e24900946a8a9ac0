"""The base class of all events, and their JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

Json = dict[str, Any]
"""An event as a JSON object: a line of `--json`, and what a user's logger gets."""


def dumps(value: Any) -> str:
    """Return `value` as one line of JSON; NaN and infinity, which JSON lacks, become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(map_floats(value, lambda x: x if math.isfinite(x) else None))


def map_floats(value: Any, convert: Callable[[float], float | None]) -> Any:
    """Return a JSON value with `convert` applied to each float in it."""
    match value:
        case dict():
            return {key: map_floats(item, convert) for key, item in value.items()}
        case list() | tuple():
            return [map_floats(item, convert) for item in value]
        case float():
            return convert(value)
    return value


STAMP = ("time", "generation")
"""Keys that every event has once it is emitted."""

_Kind = TypeVar("_Kind", bound="Event")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a run.

    A field whose default is None is an optional key: while it is None, the JSON form lacks it.

    Attributes:
        event: the value of the key `event`.
        FLAT: the field whose entries are keys of the event itself; empty: none.
        STAMP_FIRST: whether the JSON form has `time` and `generation` before the other keys.
        time: when the event was emitted, in seconds since 1970.
        generation: the generation in which it was emitted.
    """

    event: ClassVar[str] = ""
    FLAT: ClassVar[str] = ""
    STAMP_FIRST: ClassVar[bool] = False

    time: float | None = None
    generation: int | None = None

    def stamped(self, time: float, generation: int) -> Self:
        """Return the event with `time`, and with `generation` unless it has one already."""
        own = self.generation
        return replace(self, time=time, generation=generation if own is None else own)

    def to_json(self) -> Json:
        """Return the event as a JSON object; nested values are not copied."""
        own: Json = {}
        for field in own_fields(type(self)):
            value = getattr(self, field.name)
            if field.name == self.FLAT:
                own |= value
            elif value is not None or field.default is not None:
                own[field.name] = value
        stamp = {key: value for key in STAMP if (value := getattr(self, key)) is not None}
        first, last = (stamp, own) if self.STAMP_FIRST else (own, stamp)
        return {"event": self.event, **first, **last}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], complete: bool) -> Self:
        """Return the event of an object that `to_json` returned, before or after a JSON file.

        Args:
            data: the object; keys that the class does not define are ignored.
            complete: refuse an object that lacks a key. Without it a missing number is NaN or 0,
                and anything else is empty: an older version did not write the key.

        Raises:
            ValueError: a value is of the wrong type, or missing.
        """
        values = {key: _value(cls, "float | int", key, data) for key in STAMP if key in data}
        for field in own_fields(cls):
            key = field.name
            if key == cls.FLAT:
                taken = {"event", *STAMP, *(each.name for each in own_fields(cls))} - {key}
                values[key] = {
                    name: _value(cls, "float", name, data) for name in data if name not in taken
                }
            elif key in data:
                values[key] = _value(cls, str(field.type), key, data)
            elif complete and field.default is not None:
                raise ValueError(f"the event {cls.event!r} has no {key!r}")
            elif field.default is not None:
                values[key] = _empty(str(field.type))
        return cls(**values)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def event_type(
    name: str, *, flat: str = "", stamp_first: bool = False
) -> Callable[[type[_Kind]], type[_Kind]]:
    """Make a class the dataclass of an event; for the arguments see the constants of `Event`."""

    def decorate(cls: type[_Kind]) -> type[_Kind]:
        kind = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        kind.event, kind.FLAT, kind.STAMP_FIRST = name, flat, stamp_first
        return kind

    return decorate


def own_fields(kind: type[Event]) -> list[Field[Any]]:
    """Return the fields of an event's class other than `time` and `generation`, in order."""
    return [field for field in fields(kind) if field.name not in STAMP]


_ACCEPTED: dict[str, type | UnionType] = {
    "str": str,
    "Literal": str,
    "int": int,
    "float": int | float,
    "bool": bool,
    "dict": dict,
    "list": list,
    "None": NoneType,
}
"""The values of each type that an annotation names."""


def _types(annotation: str) -> list[str]:
    """Return the built-in types that a field's annotation allows: "dict" for a TypedDict."""
    names = (part.partition("[")[0] for part in annotation.split(" | "))
    return [name if name in _ACCEPTED else "dict" for name in names]


def _empty(annotation: str) -> Any:
    accepted = _ACCEPTED[_types(annotation)[-1]]
    return accepted() if isinstance(accepted, type) else math.nan


def _value(kind: type[Event], annotation: str, key: str, data: Mapping[str, Any]) -> Any:
    value, types = data[key], _types(annotation)
    if value is None and "float" in types and "None" not in types:
        return math.nan  # see `dumps`
    if not any(isinstance(value, _ACCEPTED[each]) for each in types):
        raise ValueError(f"the event {kind.event!r} has {key} = {value!r:.100}, which is not valid")
    return value
