"""The table of all events, as Markdown: generated from their classes, so it cannot go stale.

python -m rpcmp.observability.events        prints it; a test compares it with the documentation
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from rpcmp.observability.events import EVENTS, Event, own_fields

NAMES = {
    "str": "string",
    "Literal": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "list",
}


def table() -> str:
    """Every event with its keys, their types and their meaning, in the order of a run."""
    rows = ["| event, key | type | meaning |", "| --- | --- | --- |"]
    for kind in EVENTS.values():
        rows += _rows(kind)
    return "\n".join(rows)


def _rows(kind: type[Event]) -> Iterator[str]:
    when, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    attributes = re.sub(r"\n {8}", " ", attributes)
    meanings = dict(re.findall(r"^    (\w+): (.*)$", attributes, re.MULTILINE))
    yield f"| **`{kind.event}`** | event | {when} |"
    for field in own_fields(kind):
        is_flat = field.name == kind.FLAT
        key, type_ = ("NAME", "float") if is_flat else (field.name, str(field.type))
        yield f"| `{kind.event}.{key}` | {_type(type_)} | {meanings[field.name]} |"


def _type(annotation: str) -> str:
    first = annotation.partition("[")[0].removesuffix(" | None")
    return NAMES.get(first, "table")


if __name__ == "__main__":
    print(table())
