"""A line of a log, on its way from the process that says it to those who show it.

An entry of a log: a line with where and when it was said, as the event `log` of a run has it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, astuple, dataclass
from datetime import datetime
from typing import Any

from rpcmp.process.logging.printable import visible

MAX_TEXT = 16 * 1024
"""Characters of a text; of a longer one the middle is left out."""

TAIL = 4 * 1024
"""Characters that are kept of its end, where a traceback says what happened."""

NOTE = 64
"""Characters for the note of what is left out, so that a text is cut once."""

MAX_BYTES = 128 * 1024
"""Of a line that is packed: a character takes up to six bytes."""

MOST = 2**31 - 1
"""Of steps and lines; what is more was not counted."""


@dataclass(frozen=True)
class Line:
    """One line, or several that were said at once.

    Attributes:
        level: a name of `logging`'s.
        logger: who says it: a logger's name, "stdout" or "stderr".
        text: what.
        step: optimizer step; 0 before the first.
        count: how many lines it stands for: itself, and those like it that were not passed on.
    """

    level: str
    logger: str
    text: str
    step: int = 0
    count: int = 1

    def pack(self) -> bytes:
        """At most MAX_BYTES, read by `unpack`."""
        return json.dumps(astuple(self), ensure_ascii=False).encode(errors="backslashreplace")


class Unreported(Line):
    """A line of one who is told of all others: it is shown, and reported to nobody."""


def unpack(data: bytes) -> Line:
    """The line that `Line.pack` wrote.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    kinds = [type(part) for part in found] if isinstance(found, list) else []
    if kinds != [str, str, str, int, int]:
        raise ValueError("not a line of a log")
    level, logger, text, step, count = found
    level, logger = cut(level)[:16], cut(logger)[:256]
    return Line(level, logger, cut(text), min(max(0, step), MOST), min(max(1, count), MOST))


def cut(text: str) -> str:
    """`text`, without its middle where it is too long, and a note of how much that was.

    What no file takes, such as half a character of a file name's, is written out.
    """
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= MAX_TEXT:
        return text
    head = MAX_TEXT - TAIL - NOTE
    left_out = len(text) - head - TAIL
    return f"{text[:head]} ... {left_out:,} characters left out ... {text[-TAIL:]}"


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
