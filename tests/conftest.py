"""What the process tests share. Every process that a test starts, however deep, inherits a token in
its environment, and none with that token may be left when the test ends."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.processes import Server, poll_for


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The token of this test's processes; fails the test where one is left behind."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(processes.TOKEN, value)
    yield value
    try:
        poll_for(lambda: not processes.with_token(value), "all processes of the test to end")
    finally:
        for process in processes.with_token(value):
            process.kill()


@pytest.fixture
def job(tmp_path: Path) -> processes.JobFolder:
    """A folder with the test models, to write configs into."""
    return processes.JobFolder(tmp_path / "job")


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Three running stage servers, on free ports."""
    with processes.running_servers(3) as started:
        yield started
