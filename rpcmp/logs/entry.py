"""An entry of a log: a line with where and when it was said, as the event `log` of a run has it."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rpcmp.logs.line import Line
from rpcmp.visible import visible

Entry = dict[str, Any]

LEVELS = ("debug", "info", "warning", "error")
"""What `--log-level` takes."""


def entry_of(line: Line, stage: str, generation: int) -> Entry:
    """The event for a line.

    Args:
        line: what was said.
        stage: the label of the worker; "driver" for the driver's processes.
        generation: of the group; 0: none.
    """
    said = asdict(line)
    return {
        "event": "log",
        "time": time.time(),
        "generation": generation,
        "stage": stage,
        "step": said.pop("step"),
        **said,
    }


def as_text(entry: Entry) -> str:
    """One line for people, more only where the text has more; no control characters.

    2026-11-22 10:15:00.123 WARNING generation 1 stage0 step 12: UserWarning: ... (my_model.py:12)
    """
    when = datetime.fromtimestamp(entry["time"]).isoformat(" ", "milliseconds")
    generation = f" generation {entry['generation']}" if entry["generation"] else ""
    stage = f" {entry['stage']}" if entry["stage"] else ""
    step = f" step {entry['step']}" if entry["step"] else ""
    more = f" (... {entry['count'] - 1:,} more like it)" if entry["count"] > 1 else ""
    head = visible(f"{when} {entry['level']}{generation}{stage}{step}: ").replace("\n", " ")
    return head + visible(entry["text"]).replace("\n", "\n    ") + more


def as_json(entry: Entry) -> str:
    """One JSON object, for machines; `time` in seconds since 1970."""
    keys = ("time", "level", "generation", "stage", "step", "logger", "count")
    return json.dumps({**{key: entry[key] for key in keys}, "message": entry["text"]})


def number_of(level: str) -> int:
    """How severe a level is, as `logging` counts; that of INFO where it is not known."""
    return logging.getLevelNamesMapping().get(level.upper(), logging.INFO)


def pass_on(entry: Entry) -> None:
    """Have `logging` show an entry; on standard error where nobody has configured that.

    Its logger is "rpcmp.stages.LABEL", and its level has let it pass already: a program that uses
    rpcmp as a library sees its model's prints and warnings wherever its own records go.
    """
    logger = logging.getLogger(f"rpcmp.stages.{entry['stage']}")
    if not logger.hasHandlers():
        print(as_text(entry), file=sys.stderr, flush=True)
        return
    level = number_of(entry["level"])
    extra = {"entry": entry}
    logger.handle(
        logger.makeRecord(logger.name, level, "", 0, entry["text"], (), None, extra=extra)
    )
