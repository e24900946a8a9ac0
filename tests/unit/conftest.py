"""What unit tests share: what they start ends with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


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
