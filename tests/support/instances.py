"""What code has made that keeps it to itself, for a test to end it."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

Instance = TypeVar("Instance")


def record_instances(patch: pytest.MonkeyPatch, kind: type[Instance]) -> list[Instance]:
    """All of a class that are made from now on, until `patch` is undone."""
    made: list[Instance] = []
    construct = kind.__init__

    def note(self: Instance, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        made.append(self)

    patch.setattr(kind, "__init__", note)
    return made
