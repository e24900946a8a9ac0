"""The guide's table of events has each that the code reports, with its fields."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache

import pytest

from tests.support.docs import guide
from tests.support.places import PACKAGE

STAMPED = {"event", "time", "generation"}
"""Fields that every event has."""

BETWEEN_PROCESSES = {
    *("network", "address", "socket", "started", "ended"),  # a process that forks others
    *("beat", "ready", "joined", "left", "built", "failed", "error", "done"),  # a child
    *("planned", "segment", "progress", "store"),  # the driver process
    *("snapshot", "saved", "draining"),  # a worker and its server
    *("sampled", "profiled", "examined", "counted", "ran", "refused"),  # errands
}
"""What a child tells its supervisor, which reports nothing of this kind."""


@cache
def in_the_code() -> dict[str, set[str]]:
    """Every kind of message that the code makes, with the fields that stand there."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Dict):
                continue
            keys = {
                key.value: value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }
            kind = keys.get("event")
            if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                found[kind.value] |= set(keys)
    return dict(found)


@cache
def in_the_guide() -> dict[str, set[str]]:
    """Return the rows of the table with the names in its column of fields."""
    _, _, after = guide("events").partition("<!-- events: begin -->")
    table, _, _ = after.partition("<!-- events: end -->")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| ", table, re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", fields)) for kind, fields in rows}


def test_the_table_has_every_event_and_no_other() -> None:
    assert set(in_the_guide()) == set(in_the_code()) - BETWEEN_PROCESSES
    assert set(in_the_code()) >= BETWEEN_PROCESSES


@pytest.mark.parametrize("kind", in_the_guide())
def test_each_row_lists_every_field_of_its_event(kind: str) -> None:
    assert in_the_code()[kind] - STAMPED <= in_the_guide()[kind]
