"""Fixtures of the tests of commands."""

from __future__ import annotations

import pytest

from rpcmp.job import server_calls, server_pool
from rpcmp.server.client import StageClient

SECONDS = 0.2
"""How long a server that does not answer is waited for."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make commands in this process wait less than the usual two or six seconds for a server."""
    monkeypatch.setattr(StageClient.connect, "__defaults__", (SECONDS,))
    for module in (server_pool, server_calls):
        monkeypatch.setattr(module, "ANSWER_SECONDS", SECONDS)
