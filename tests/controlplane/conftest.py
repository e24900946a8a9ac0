"""Fixtures of jobs in one event loop."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.controlplane.cluster import Cluster, Committed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """What a job of six layers and 40 steps commits, whatever its balance and its faults."""

    async def train() -> Committed:
        async with Cluster(tmp_path_factory.mktemp("undisturbed"), stages=1) as cluster:
            return (await cluster.drive(cluster.config(steps=40, balance=[6]))).committed

    return asyncio.run(train())
