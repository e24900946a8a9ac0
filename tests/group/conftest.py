"""What tests of a group in this process share: its threads end with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.processes import poll_for


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """Fail a test that leaves a thread behind for which the process would wait at its end."""
    before = set(threading.enumerate())

    def left() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in before and not each.daemon]

    yield
    poll_for(lambda: not left(), "all threads of the test to end")
