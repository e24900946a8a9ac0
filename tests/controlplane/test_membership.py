"""Hosts that join and leave a run: it ends with the losses and the parameters of one that stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp.job import membership
from rpcmp.job.server_calls import drain, join
from rpcmp.net.security import Security
from rpcmp.observability.events import ReplacedEvent, StagesEvent, SummaryEvent, WarningEvent
from tests.support.controlplane.cluster import Call, Cluster, Committed, Server, in_event_loop

AUTO = 'rebalance="auto"'


def joins(new: Server, server: Server) -> Call:
    return lambda: join(new.address, server.address, Security(), 20.0)


def leaves(server: Server) -> Call:
    return lambda: drain(server.address, False, Security(), leaves=True)


@in_event_loop
async def test_a_host_joins_and_another_leaves(tmp_path: Path, undisturbed: Committed) -> None:
    async with Cluster(tmp_path) as cluster:
        first, second = cluster.servers
        spare = await cluster.serve(None)
        cluster.at(8, joins(spare, first))
        cluster.hold(20, lambda: cluster.run.generation == 2)
        cluster.at(24, leaves(second))
        cluster.hold(36, lambda: cluster.run.generation == 3)
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=[3, 3]))
        await second.ending
    assert run.committed == undisturbed
    assert run.stages == [["stage0", "stage2", "stage1"], ["stage0", "stage2"]]
    assert run.moves[0] == ("moved", [2, 2, 2], [3, 3])
    assert run.repeated <= 1
