"""All kinds of events: each survives JSON and is documented."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from rpcmp.observability.events import EVENTS, Event, own_fields, parse
from rpcmp.observability.events.wording import table
from tests.support.docs import guide
from tests.support.places import PACKAGE


@pytest.mark.parametrize("kind", EVENTS.values(), ids=list(EVENTS))
def test_every_event_survives_json(kind: type[Event]) -> None:
    empty = parse({"event": kind.event, "time": 1.0, "generation": 1}, complete=False)
    assert type(empty) is kind
    assert empty is not None
    text = json.dumps(empty.to_json())
    again = parse(json.loads(text))
    assert again is not None
    assert json.dumps(again.to_json()) == text


def test_the_guide_has_the_table_of_events() -> None:
    _, _, after = guide("events").partition("<!-- events: begin -->\n")
    shown, end, _ = after.partition("\n<!-- events: end -->")
    assert end
    assert shown == table(), (
        "run `python -m rpcmp.observability.events.wording` and paste its table"
    )


MESSAGES = {
    *("network", "address", "socket", "started", "ended"),  # a process that forks others
    *("beat", "ready", "joined", "left", "built", "failed", "error", "done"),  # a child
    *("planned", "segment", "progress", "paused", "store"),  # the driver process
    *("snapshot", "saved", "draining", "joining", "devices"),  # a worker and its server
    *("cut", "sampled", "profiled", "examined", "counted", "ran", "refused"),  # other children
    *("log", "step"),  # process.logging.records, and the reference of `rpcmp verify`
}
"""The messages that a child process sends to its supervisor, as dicts."""


def test_only_messages_between_processes_are_made_as_dicts() -> None:
    made = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                made |= {
                    value.value
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant)
                    and key.value == "event"
                    and isinstance(value, ast.Constant)
                }
    assert made == MESSAGES


def test_the_table_explains_every_key() -> None:
    rows = table().splitlines()
    assert len(rows) == 2 + sum(1 + len(own_fields(kind)) for kind in EVENTS.values())
    assert all(row.count(" | ") == 2 for row in rows)


def test_events_are_cheap_to_import() -> None:
    code = """
import sys, rpcmp.observability.events
print([name for name in ("torch", "pydantic", "rich", "grpc") if name in sys.modules])
"""
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == "[]"
