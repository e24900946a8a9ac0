"""Fixtures of unit tests, which stop all threads that a test has started."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.instances import record_instances


def pytest_collection_finish() -> None:
    """Defer dynamo as in stages, which saves two seconds at the first optimizer."""
    if "torch" in sys.modules:
        from rpcmp.pipelining import lazy_dynamo

        lazy_dynamo.defer_dynamo()


@pytest.fixture(autouse=True)
def _threads_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the compute threads that a test has started."""
    if "worker" not in request.path.parts and "trace" not in request.path.parts:
        yield
        return
    from rpcmp.worker.executor import ComputeThread

    started = record_instances(monkeypatch, ComputeThread)
    yield
    for each in started:
        each.close()
