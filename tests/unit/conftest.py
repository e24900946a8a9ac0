"""What unit tests share: what they start ends with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_collection_finish() -> None:
    """Spare this process what stages are spared as well: two seconds for the first optimizer."""
    if "torch" in sys.modules:
        from rpcmp import lazydynamo

        lazydynamo.defer()


@pytest.fixture(autouse=True)
def _threads_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the compute threads end that a test of a worker's parts has started."""
    if "worker" not in request.path.parts and "trace" not in request.path.parts:
        yield
        return
    from rpcmp.worker.compute import ComputeThread

    started: list[ComputeThread] = []
    construct = ComputeThread.__init__

    def note(self: ComputeThread, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        started.append(self)

    monkeypatch.setattr(ComputeThread, "__init__", note)
    yield
    for each in started:
        each.close()
