"""Fixtures for groups in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.processes import poll_for


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """Fail a test that leaves a thread which would block the exit of the process."""
    before = set(threading.enumerate())

    def left() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in before and not each.daemon]

    yield
    poll_for(lambda: not left(), "all threads of the test to end")
