"""Log lines and log entries, made safe for a terminal, and a limit on how many lines pass.

An entry is a line with its time and process, as the run's event `log` has it. Texts come from
users' code, files and servers, so `visible` replaces what a terminal would act on:

    colours, moves of the cursor (ESC [ ... letter)    dropped
    carriage returns                                   a new line, as a progress bar means it
    other control characters but tab and newline       escaped, such as \\x1b
    characters that reverse the order of what follows  escaped, such as \\u202e
    halves of surrogate pairs, which no output takes   escaped, such as \\udc80

`LogRateLimiter` lets the first few lines of a kind pass and counts the others:

    logged    a1 a2 a3 a4 a5 a6 a7 a8 . . . a90   │          b1
    passed    a1 a2 a3 a4 a5                      │ a90 x85  b1
              └─ FIRST of a kind ─┘      end of the window: the last, and how many it stands for

Lines that differ only in numbers and punctuation are of one kind. A kind that goes on and on is
summarized ever more rarely, down to once in LONGEST. In addition a budget, which refills with time,
limits the text that passes, whatever its kinds.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import OrderedDict
from dataclasses import asdict, astuple, dataclass, replace
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
        stage: the label of the worker; "driver" for the driver's processes.
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


FIRST = 5
"""Lines of a kind that pass in a window."""

SECONDS = 5.0
"""The first window of a kind; each window that had to count doubles the next."""

LONGEST = 60.0

KINDS = 256
"""Kinds that are remembered."""

BURST, REFILL = 400.0, 100.0
"""What may pass at once, and per second. A line costs 1, and 1 more per 256 characters."""

# Words with a digit, and everything between words. Linear: a word is matched from its start only,
# and only once.
_NOT_WORDS = re.compile(r"(?<![^\W_])[^\W\d_]*+\d\w*+|[\W_]+")

_KIND_CHARACTERS = 200
"""Characters that decide a line's kind."""

Kind = tuple[str, str]


@dataclass
class _RateWindow:
    ends: float
    seconds: float = SECONDS
    passed: int = 0
    held: int = 0
    last: Line | None = None

    def take_summary(self) -> list[Line]:
        """Return the last line that was held, with the count of all, and reset."""
        if self.last is None:
            return []
        line, self.last = replace(self.last, count=self.held), None
        self.held = 0
        return [line]


class LogRateLimiter:
    """Decides which lines pass. Pure: times are arguments, in seconds of any clock."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Kind, _RateWindow] = OrderedDict()
        self._budget, self._filled = BURST, 0.0
        self._rest = _RateWindow(ends=float("inf"))
        self._next = float("inf")  # nothing is due before
        self._newest: _RateWindow | None = None

    @property
    def newest_held(self) -> Line | None:
        """The line that was held last, with the count of its kind."""
        window = self._newest
        return replace(window.last, count=window.held) if window and window.last else None

    def take(self, line: Line, now: float) -> list[Line]:
        """Add a line, and return the lines that pass."""
        passing = self.due(now)
        kind = line.level, _NOT_WORDS.sub(" ", line.text[:_KIND_CHARACTERS])
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _RateWindow(ends=now + SECONDS)
            self._next = min(self._next, window.ends)
            self._forget_oldest(now)
        if window.passed < FIRST and self._affords(line, now):
            window.passed += 1
            passing.append(line)
        else:
            window.held += line.count
            window.last = line
            self._newest = window
        return passing

    def due(self, now: float) -> list[Line]:
        """Return the summaries of windows that have ended."""
        if now < self._next:
            return []
        passing = []
        for kind, window in list(self._windows.items()):
            if now < window.ends:
                continue
            if window.last is None:  # it was quiet: its next line is news again
                del self._windows[kind]
                continue
            passing += window.take_summary()
            window.seconds = min(2 * window.seconds, LONGEST)
            window.ends, window.passed = now + window.seconds, FIRST
        if now >= self._rest.ends:
            passing += self._summary_of_rest()
        windows = [*self._windows.values(), self._rest]
        self._next = min(window.ends for window in windows)
        return passing

    def next_due(self) -> float | None:
        """Return when `due` will return a line; None if none is held."""
        windows = [*self._windows.values(), self._rest]
        return min((window.ends for window in windows if window.last is not None), default=None)

    def flush(self) -> list[Line]:
        """Return the summaries of all lines that are held."""
        lines = [line for window in self._windows.values() for line in window.take_summary()]
        return [*lines, *self._summary_of_rest()]

    def _affords(self, line: Line, now: float) -> bool:
        elapsed = max(0.0, now - self._filled)
        self._budget, self._filled = min(BURST, self._budget + REFILL * elapsed), now
        cost = 1 + len(line.text) / 256
        if self._budget < cost:
            return False
        self._budget -= cost
        return True

    def _forget_oldest(self, now: float) -> None:
        """Bound the memory: lines that the oldest kind holds join a window shared by such kinds."""
        if len(self._windows) <= KINDS:
            return
        _, oldest = self._windows.popitem(last=False)
        if oldest.last is None:
            return
        if self._rest.last is None:
            self._rest.ends = now + SECONDS
            self._next = min(self._next, self._rest.ends)
        self._rest.held += oldest.held
        self._rest.last = oldest.last

    def _summary_of_rest(self) -> list[Line]:
        number, self._rest.ends = self._rest.held, float("inf")
        return [
            replace(line, text=f"... {number:,} lines left out, the last: {line.text}", count=1)
            for line in self._rest.take_summary()
        ]
