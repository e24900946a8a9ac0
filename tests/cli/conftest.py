"""What tests of commands share."""

from __future__ import annotations

import pytest

from rpcmp.control.client import StageClient
from rpcmp.job import fleet
from rpcmp.job import status as job_status


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this process wait half a second for a server to answer, not two or six."""
    monkeypatch.setattr(StageClient.connect, "__defaults__", (0.5,))
    for module in (fleet, job_status):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
