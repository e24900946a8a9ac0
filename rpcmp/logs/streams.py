"""Standard output and error of a process whose lines go to its supervisor."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, TextIO

from rpcmp.logs.line import cut

Tell = Callable[[str, str, str], None]

_LEVEL = re.compile(r"\b(CRITICAL|ERROR|WARNING|INFO|DEBUG)\b")

_LOOKED_AT = 100
"""Characters in which a line may name its level."""


class Stream(io.TextIOBase):
    """Tells of each line, or of several where they are written at once. Any thread may write.

    Args:
        name: "stdout" or "stderr".
        tell: takes level, name and text.
        behind: what was there before; what has to have a descriptor, or bytes, still gets it.
    """

    def __init__(self, name: str, tell: Tell, behind: TextIO) -> None:
        self._name = name
        self._tell = tell
        self._behind = behind
        self._begun = threading.local()  # lines that are not finished: threads do not mix theirs

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """See io.TextIOBase."""
        return "utf-8"

    @property
    def buffer(self) -> BinaryIO:
        """For bytes: not captured."""
        return self._behind.buffer

    def write(self, text: str) -> int:
        """Tell of all lines that are finished with this."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        begun = cut(getattr(self._begun, "text", "") + text)
        # A carriage return begins a line anew: a progress bar's are as many lines as it is shown.
        finished, newline, self._begun.text = (
            begun.replace("\r\n", "\n").replace("\r", "\n").rpartition("\n")
        )
        if newline:
            self._say(finished)
        return len(text)

    def flush(self) -> None:
        """Tell of what has been begun as well: it may be the last that is ever heard."""
        text, self._begun.text = getattr(self._begun, "text", ""), ""
        self._say(text)

    def fileno(self) -> int:
        """Of what was there before: a program that is started may write to it."""
        return self._behind.fileno()

    def isatty(self) -> bool:
        """See io.TextIOBase."""
        return False

    def writable(self) -> bool:
        """See io.TextIOBase."""
        return True

    def reconfigure(self, **_: Any) -> None:
        """Nothing here depends on it."""

    def _say(self, text: str) -> None:
        text = text.strip("\n").rstrip()
        if text:
            named = _LEVEL.search(text, 0, _LOOKED_AT)
            self._tell(named[1] if named else "INFO", self._name, text)
