"""Access to objects that code creates without exposing them, so that a test can close them."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

Instance = TypeVar("Instance")


def record_instances(patch: pytest.MonkeyPatch, kind: type[Instance]) -> list[Instance]:
    """Return a list of all instances created until `patch` is undone."""
    made: list[Instance] = []
    construct = kind.__init__

    def note(self: Instance, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        made.append(self)

    patch.setattr(kind, "__init__", note)
    return made
