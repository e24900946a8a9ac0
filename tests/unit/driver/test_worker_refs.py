"""What is asked of all workers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from rpcmp.config.topology import Member
from rpcmp.driver.worker_refs import WorkerRefs
from rpcmp.rpc.transport import Transport
from tests.support.settings import chain


class Hosts(WorkerRefs):
    """Workers of a chain of two stages that are on given hosts, with so many cores."""

    def __init__(self, members: list[Member], cores: list[tuple[str, list[int]]]) -> None:
        super().__init__(cast(Transport, None), dict.fromkeys(members))  # type: ignore[arg-type]
        self._cores = cores

    def everywhere(self, method: Callable[..., Any], *args: Any) -> Mapping[str, Any]:  # type: ignore[override]
        assert method.__name__ == "cores"
        return dict(zip((worker.label for worker in self), self._cores, strict=True))


@pytest.mark.parametrize(
    ("cores", "shared"),
    [
        ([("a", [3]), ("a", [3])], [(1, {"stage0": 0.0, "stage1": 0.0})]),
        ([("a", [0, 1]), ("a", [0, 1])], []),
        ([("a", [0]), ("a", [1])], []),
        ([("a", [0]), ("b", [0])], []),
    ],
)
def test_stages_share_cores_on_a_host_that_has_fewer(
    cores: list[tuple[str, list[int]]], shared: list[tuple[int, dict[str, float]]]
) -> None:
    assert [tuple(each) for each in Hosts(chain().workers, cores).shared_cores()] == shared


def test_replicas_count_as_one_fast_host() -> None:
    config = chain(stages=[{"replicas": 2}, {}])
    assert Hosts(config.workers, [("a", [0])] * 3).shared_cores() == []
