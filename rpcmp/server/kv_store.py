"""The keys and values of a group's rendezvous: small things, and not many of them.

Any stage of the group may write here. One that has gone wrong, or that somebody else has taken
over, must not get hold of all memory by that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rpcmp.errors import BusyError, JobError

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

MAX_WAITING = 16 * 1024
"""Questions for keys that nobody has set yet."""

_LONGEST = len(str(-(2**63)))


class KeyValueStore:
    """A key-value store with bounds, in one event loop.

    Who waits for a key is woken by that key alone: in a group of a thousand each waits for each.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by key
        self._num_waiting = 0
        self._is_closed = False

    def get(self, key: str) -> bytes | None:
        """A value; None where there is none."""
        return self._values.get(key)

    async def wait_for(self, keys: Iterable[str]) -> None:
        """Return when there is a value for each key.

        Raises:
            BusyError: the job ended first.
            JobError: too many wait already.
        """
        if self._num_waiting >= MAX_WAITING:
            raise JobError(f"{MAX_WAITING} questions to the rendezvous are unanswered already")
        self._num_waiting += 1
        try:
            for key in keys:
                await self._wait_for(key)
        finally:
            self._num_waiting -= 1

    async def _wait_for(self, key: str) -> None:
        while key not in self._values:
            if self._is_closed:
                raise BusyError("the job ended while a worker waited for the others")
            wait = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(key, {})
            waiting[wait] = None
            try:
                await wait
            finally:
                waiting.pop(wait, None)
                if not waiting and self._waiting.get(key) is waiting:
                    del self._waiting[key]

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._is_closed = True
        for key in list(self._waiting):
            self._wake(key)

    def _wake(self, key: str) -> None:
        for wait in self._waiting.pop(key, {}):
            if not wait.done():
                wait.set_result(None)

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
        self._wake(key)

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
