"""The keys and values of a group's rendezvous: small things, and not many of them.

Any stage of the group may write here. One that has gone wrong, or that somebody else has taken
over, must not get hold of all memory by that.
"""

from __future__ import annotations

from collections.abc import Iterable

from rpcmp.errors import JobError

MAX_KEY = 4096
"""Characters. Workers' names are in there, and stages' names in these."""

MAX_VALUE = 32 * 1024
"""Bytes; an agent's address has some hundred."""

MAX_KEYS = 16 * 1024
"""For groups of a thousand: an agent has a few."""

MAX_BYTES = 16 * 2**20
"""Of all keys and values together."""

MAX_ASKED = 1024
"""Keys that one question may name."""

_LONGEST = len(str(-(2**63)))


class Values:
    """A key-value store with bounds."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0

    def get(self, key: str) -> bytes | None:
        """A value; None where there is none."""
        return self._values.get(key)

    def has_all(self, keys: Iterable[str]) -> bool:
        """Whether there is a value for each key."""
        return all(key in self._values for key in keys)

    def set(self, key: str, value: bytes) -> None:
        """Set a value.

        Raises:
            JobError: it is too large, or there are too many.
        """
        if len(key) > MAX_KEY:
            raise JobError(f"a rendezvous takes no key of {len(key)} characters, {MAX_KEY} at most")
        if len(value) > MAX_VALUE:
            raise JobError(
                f"a rendezvous takes no value of {len(value)} bytes, {MAX_VALUE} at most"
            )
        held = self._values.get(key)
        grown = self._bytes + (_size(key, value) - (0 if held is None else _size(key, held)))
        if grown > MAX_BYTES or (held is None and len(self._values) >= MAX_KEYS):
            raise JobError("the rendezvous is full")
        self._values[key] = value
        self._bytes = grown

    def add(self, key: str, amount: int) -> int:
        """Add to a value that counts; what it is then.

        Raises:
            JobError: it does not count, or beyond 64 bits.
        """
        held = self._values.get(key, b"0")
        if not held.removeprefix(b"-").isdigit() or len(held) > _LONGEST:
            raise JobError("the value is no number")
        value = int(held) + amount
        if not -(2**63) <= value < 2**63:
            raise JobError(f"{value} is no number of 64 bits")
        self.set(key, str(value).encode())
        return value


def require_askable(keys: Iterable[str]) -> None:
    """Refuse a question for no key, or for too many.

    Raises:
        JobError: it is one.
    """
    if not 1 <= (count := len(list(keys))) <= MAX_ASKED:
        raise JobError(f"a rendezvous answers no question for {count} keys")


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)
