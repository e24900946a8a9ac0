"""What an optimizer keeps where no file finds it: attributes that are neither tensors nor plain.

Most are of no matter, such as a helper without a memory of its own. Whether one has changed is told
from its pickle, in which a tensor stands as its identity and the number of its changes in place, so
that looking costs microseconds, after every step.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class HiddenState:
    """Watches attributes of one optimizer.

    Args:
        found: by name, as they were built.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._told: set[str] = set()
        self._marks = {name: _mark(value) for name, value in found.items()}

    def changed(self, found: Mapping[str, Any]) -> list[str]:
        """Return the attributes that have changed, or are new; each of them once."""
        now = {name: _mark(value) for name, value in found.items() if name not in self._told}
        names = [name for name, mark in now.items() if mark != self._marks.get(name)]
        self._told |= set(names)
        return names


class _Marker(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return (id(obj), obj._version) if isinstance(obj, Tensor) else None


def _mark(value: Any) -> bytes | None:
    """Return what differs if the value has changed; None for what cannot be pickled."""
    written = io.BytesIO()
    try:
        _Marker(written).dump(value)
    except Exception:  # of a lock, a local class, anything of the user's
        return None
    return hashlib.sha256(written.getbuffer()).digest()
