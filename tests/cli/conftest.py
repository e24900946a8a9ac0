"""What tests of commands share."""

from __future__ import annotations

import pytest

from rpcmp.job import server_calls, server_pool
from rpcmp.server.client import StageClient

SECONDS = 0.2
"""How long a server that does not answer is waited for."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this process do not wait two or six seconds for a server to answer."""
    monkeypatch.setattr(StageClient.connect, "__defaults__", (SECONDS,))
    for module in (server_pool, server_calls):
        monkeypatch.setattr(module, "ANSWER_SECONDS", SECONDS)
