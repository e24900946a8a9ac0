"""Reading a JSON object piece by piece, so that a long array in it need not fit into memory.

Values of bounded length are parsed one at a time: the elements of one array, and all other values
of the object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import IO, Any

BLOCK = 2**16
"""Characters per read."""

MAX_VALUE = 2**20
"""Characters of the longest value; a parsed value takes up to 25 times that in bytes."""


class JsonStream:
    """A reader of one JSON object.

    Args:
        file: the text.
        limit: characters of the longest text.
        object_hook: see json.JSONDecoder.
    """

    def __init__(
        self, file: IO[str], limit: int, object_hook: Callable[[dict[str, Any]], Any]
    ) -> None:
        self._file = file
        self._left = self._limit = limit
        self._decoder = json.JSONDecoder(object_hook=object_hook)
        self._text = ""
        self._at = 0

    def read(self, array: str, take: Callable[[Any], None]) -> Any:
        """Read the document, and pass the elements of the key `array` to `take`.

        Returns:
            The object with an empty `array`; any other document unchanged.

        Raises:
            ValueError: the text is not JSON, or too long.
            RecursionError: it is nested too deeply.
        """
        document: Any = {}
        if self._peek() == "{":
            for _ in self._items("{", "}"):
                key = self._value()
                if not isinstance(key, str):
                    raise ValueError("Expecting property name enclosed in double quotes")
                self._expect(":")
                if key == array and self._peek() == "[":
                    document[key] = []
                    for _ in self._items("[", "]"):
                        take(self._value())
                else:
                    document[key] = self._value()
        else:
            document = self._value()
        if self._peek():
            raise ValueError("Extra data")
        return document

    def _items(self, opening: str, closing: str) -> Iterator[None]:
        """Consume the brackets and commas; yield before each item, which the caller consumes."""
        self._expect(opening)
        is_first = True
        while self._peek() != closing:
            if not is_first:
                self._expect(",")
            is_first = False
            yield
        self._at += 1

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise ValueError(f"Expecting {sign!r}")
        self._at += 1

    def _peek(self) -> str:
        """Return the next character other than white space; empty at the end of the file."""
        while True:
            while self._at < len(self._text):
                if (sign := self._text[self._at]) not in " \t\n\r":
                    return sign
                self._at += 1
            if not self._more():
                return ""

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_VALUE:
                    raise ValueError(
                        f"{error.msg}, or a value is longer than {MAX_VALUE:,} characters"
                    ) from error
                if not self._more():
                    raise ValueError(error.msg) from error
            else:
                if end < len(self._text) or not self._more():  # a number may go on
                    self._at = end
                    return value

    def _more(self) -> bool:
        """Read a block, and drop consumed text; return False at the end of the file."""
        block = self._file.read(BLOCK)
        self._left -= len(block)
        if self._left < 0:
            raise ValueError(f"it is longer than {self._limit:,} characters")
        self._text, self._at = self._text[self._at :] + block, 0
        return bool(block)
