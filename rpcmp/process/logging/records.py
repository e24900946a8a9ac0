"""Log lines, and log entries: a line with its time and process, as the run's event `log` has it.

Texts come from users' code, files and servers, so `visible` makes them safe for a terminal:

    colours, moves of the cursor (ESC [ ... letter)    dropped
    carriage returns                                   a new line, as a progress bar means it
    other control characters but tab and newline       escaped, such as \\x1b
    characters that reverse the order of what follows  escaped, such as \\u202e
    halves of surrogate pairs, which no output takes   escaped, such as \\udc80
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from dataclasses import asdict, astuple, dataclass
from datetime import datetime
from typing import Any

MAX_TEXT = 16 * 1024
"""Characters of a text; a longer one loses its middle."""

TAIL = 4 * 1024
"""Characters kept of its end, where a traceback says what happened."""

NOTE = 64
"""Characters for the note about the lost middle, so that a text is cut only once."""

MAX_BYTES = 128 * 1024
"""Of a packed line: a character takes up to six bytes."""

MAX_NUMBER = 2**31 - 1
"""Of steps and counts; a larger one comes from corrupt memory."""

LEVELS = ("debug", "info", "warning", "error")
"""What `--log-level` takes."""

_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_RETURN = re.compile(r"\r\n?")
_CONTROL_CHARACTER = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # C0 and C1
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # marks, overrides, ... of direction
    r"|[\u2028\u2029]"  # new lines, to some
    r"|[\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return `text` without anything that a terminal would act on; idempotent."""
    if text.isascii() and text.isprintable():
        return text
    text = _CONTROL_SEQUENCE.sub("", _RETURN.sub("\n", text))
    # After the sequences: removing one may have joined its surroundings to another.
    return _CONTROL_CHARACTER.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


@dataclass(frozen=True)
class Line:
    """One line, or several that were written at once.

    Attributes:
        level: a level name of `logging`.
        logger: a logger's name, "stdout" or "stderr".
        text: the message.
        step: optimizer step; 0 before the first.
        count: how many lines it stands for: itself, and similar ones that were held back.
    """

    level: str
    logger: str
    text: str
    step: int = 0
    count: int = 1

    def pack(self) -> bytes:
        """Serialize for `unpack`, to at most MAX_BYTES."""
        return json.dumps(astuple(self), ensure_ascii=False).encode(errors="backslashreplace")


class Unreported(Line):
    """A line logged by an observer: displayed, but not reported, which would cause another one."""


def unpack(data: bytes) -> Line:
    """Restore a line from `Line.pack`.

    Raises:
        ValueError: it is not a packed line.
    """
    try:
        fields = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    types = [type(field) for field in fields] if isinstance(fields, list) else []
    if types != [str, str, str, int, int]:
        raise ValueError("not a line of a log")
    level, logger, text, step, count = fields
    step, count = min(max(0, step), MAX_NUMBER), min(max(1, count), MAX_NUMBER)
    return Line(cut(level)[:16], cut(logger)[:256], cut(text), step, count)


def cut(text: str) -> str:
    """Return `text`, with a note in place of its middle if it is too long.

    Characters that no file takes, such as half of a surrogate pair, are escaped.
    """
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= MAX_TEXT:
        return text
    head = MAX_TEXT - TAIL - NOTE
    left_out = len(text) - head - TAIL
    return f"{text[:head]} ... {left_out:,} characters left out ... {text[-TAIL:]}"


Entry = dict[str, Any]


def entry_of(line: Line, stage: str, generation: int) -> Entry:
    """Return the event for a line.

    Args:
        line: the line.
        stage: the label of the worker; "driver" for the driver's processes.
        generation: of the group; 0 if there is none.
    """
    fields = asdict(line)
    return {
        "event": "log",
        "time": time.time(),
        "generation": generation,
        "stage": stage,
        "step": fields.pop("step"),
        **fields,
    }


def as_text(entry: Entry) -> str:
    """Return one line for people, or more if the text has more; no control characters.

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
    """Return one JSON object for programs; `time` is in seconds since 1970."""
    keys = ("time", "level", "generation", "stage", "step", "logger", "count")
    return json.dumps({**{key: entry[key] for key in keys}, "message": entry["text"]})


def number_of(level: str) -> int:
    """Return the number of a level in `logging`; an unknown level counts as INFO."""
    return logging.getLevelNamesMapping().get(level.upper(), logging.INFO)


def pass_on(entry: Entry) -> None:
    """Hand an entry to `logging`, or print it on standard error if no handler is configured.

    The logger is "rpcmp.stages.LABEL", and its level is not checked again. So a program that uses
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
