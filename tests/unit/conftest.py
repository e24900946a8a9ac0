"""What unit tests share: what they start ends with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.instances import noted


def pytest_collection_finish() -> None:
    """Spare this process what stages are spared as well: two seconds for the first optimizer."""
    if "torch" in sys.modules:
        from rpcmp.pipelining import optimizers

        optimizers.defer_dynamo()


@pytest.fixture(autouse=True)
def _threads_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the compute threads end that a test of a worker's parts has started."""
    if "worker" not in request.path.parts and "trace" not in request.path.parts:
        yield
        return
    from rpcmp.worker.executor import ComputeThread

    started = noted(monkeypatch, ComputeThread)
    yield
    for each in started:
        each.close()
