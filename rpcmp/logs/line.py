"""A line of a log, on its way from the process that says it to those who show it."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass

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
