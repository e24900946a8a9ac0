"""Text from elsewhere, made safe to print: a terminal obeys no file, server or layer.

colours, moves of the cursor (ESC [ ... letter)    dropped
carriage returns                                   a new line, as a progress bar means it
other control characters but tab and newline       shown, such as \\x1b
characters that reverse the order of what follows  shown, such as \\u202e
halves of surrogate pairs, which no output takes   shown, such as \\udc80
"""

from __future__ import annotations

import re

_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_RETURN = re.compile(r"\r\n?")
_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # C0 and C1
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # marks, overrides, ... of direction
    r"|[\u2028\u2029]"  # new lines, to some
    r"|[\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return `text` without anything that a terminal would act on; twice is as once."""
    if text.isascii() and text.isprintable():
        return text
    text = _CONTROL_SEQUENCE.sub("", _RETURN.sub("\n", text))
    return _OBEYED.sub(_escaped, text)  # also what has become one by the loss of one inside


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
