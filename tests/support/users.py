"""Users of this machine that are not the one who runs the tests, root. Takes root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tests.support.needs import needs_root

MALLORY, TRENT = 61001, 61002


@contextlib.contextmanager
def acting_as(user: int) -> Iterator[None]:
    """Sockets that are made in the block are another user's."""
    needs_root("act as another user")
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
