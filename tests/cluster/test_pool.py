"""The pool of stage servers that tests share: no state of an earlier job is reused."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from rpcmp.v1.control_pb2_grpc import ControlStub
from tests.support import pool
from tests.support.claims import prepared
from tests.support.pool import POOL, lend_servers
from tests.support.processes import describe


@pytest.mark.cluster
def test_a_pool_server_left_busy_fails_its_test_and_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SECONDS", 0.5)
    server = POOL.take()
    with grpc.insecure_channel(server.address) as channel:
        ControlStub(channel).Prepare(prepared(server, str(tmp_path)), timeout=60)
    with pytest.raises(AssertionError, match=f"{server.address} was left busy"):
        POOL.put(server)
    assert server.has_ended
    assert server not in POOL.taken()


@pytest.mark.cluster
def test_a_killed_pool_server_is_replaced() -> None:
    with lend_servers(1) as (killed,):
        killed.end()
    with lend_servers(1) as (other,):
        assert other is not killed
        assert describe(other).job == ""
