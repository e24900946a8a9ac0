"""What an optimizer keeps where no file finds it: attributes that are neither tensors nor plain.

Most are of no matter, such as a helper without a memory of its own. Whether one has changed is told
from its pickle, in which a tensor stands as its identity and the number of its changes in place,
and a parameter as its identity. What has a pickle of more than MOST bytes is not looked at, since
this is done after every step.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

MOST = 2**20
"""Bytes of a pickle."""


class HiddenState:
    """Watches attributes of one optimizer.

    Args:
        found: by name, as they were built.
        parameters: of the optimizer.
    """

    def __init__(self, found: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._told: set[str] = set()
        self._marks = {name: self._mark(value) for name, value in found.items()}

    def changed(self, found: Mapping[str, Any]) -> list[str]:
        """Return the attributes that have changed, or are new; each of them once."""
        now = {name: self._mark(value) for name, value in found.items() if name not in self._told}
        names = [name for name, mark in now.items() if mark != self._marks.get(name)]
        self._told |= set(names)
        return names

    def _mark(self, value: Any) -> bytes | None:
        """Return what differs if the value has changed; None for what is not looked at."""
        hashed = _Hashed()
        try:
            _Marker(hashed, self._parameters).dump(value)
        except Exception:  # of a lock, a local class, too many bytes, anything of the user's
            return None
        return hashed.digest


class _Marker(pickle.Pickler):
    def __init__(self, file: _Hashed, parameters: Collection[int]) -> None:
        super().__init__(file)
        self._parameters = parameters

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        return (id(obj), None if id(obj) in self._parameters else obj._version)


class _Hashed:
    """A file of which only the hash is kept."""

    def __init__(self) -> None:
        self._hash, self._size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        size = memoryview(data).nbytes
        self._size += size
        if self._size > MOST:
            raise ValueError("too large")
        self._hash.update(data)
        return size

    @property
    def digest(self) -> bytes:
        return self._hash.digest()
