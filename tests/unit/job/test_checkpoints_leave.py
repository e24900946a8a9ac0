"""A run that gives up: a checkpoint of the newest step, whatever cut the servers hold it of."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from rpcmp.checkpoint.folder import CheckpointFolder
from rpcmp.checkpoint.slots import HeldSnapshots
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.server_pool import ServerPlace, ServerPool
from rpcmp.observability.events import Event
from rpcmp.v1 import control_pb2 as pb
from tests.support.graphs import chain_of

CUTS = ([["a", "b"], ["c"]], [["a"], ["b", "c"]])


@dataclass
class FakePool:
    """Servers that hold step 4 of the first cut, and step 5 of the second at one of them only."""

    run_folder: str = ""
    job_id: str = "r1"
    addresses: tuple[str, ...] = ("a:1", "b:1")
    saved: list[pb.SaveRequest] = field(default_factory=list)

    def place(self, label: str) -> ServerPlace:
        index = ("stage0", "stage1").index(label)
        return ServerPlace(self.addresses[index], index)

    def is_guest(self, address: str) -> bool:
        return False

    async def holdings(self) -> dict[str, HeldSnapshots]:
        return {
            "stage0": HeldSnapshots([3, 4], later_cuts={1: HeldSnapshots([5])}),
            "stage1": HeldSnapshots([3, 4]),
        }

    @contextlib.asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[FakePool]:
        yield self

    async def save(self, request: pb.SaveRequest) -> pb.Saved:
        self.saved.append(request)
        file, state = f"{request.stage_name}.safetensors", json.dumps({})
        return pb.Saved(step=request.step, file=file, sha256="0" * 64, size=1, state=state)


def test_the_checkpoint_has_the_layers_of_the_cut_that_was_held(tmp_path: Path) -> None:
    data, section = {"train": "m:train"}, {"dir": str(tmp_path)}
    config = chain_of(2, data=data, checkpoint=section, rebalance="auto")
    pool, events = FakePool(), list[Event]()
    checkpoints = Checkpoints(config, cast(ServerPool, pool), events.append)
    for cut in CUTS:
        checkpoints.set_assignments([json.dumps({"layers": names}) for names in cut])
    for step in (4, 5):
        state = {"step": step, "epoch": 1, "batch": step, "awaits_save": False}
        asyncio.run(checkpoints.add_progress(state))
    asyncio.run(checkpoints.leave())
    assert [(each.stage_name, each.step, each.cut) for each in pool.saved] == [
        ("stage0", 4, 0),
        ("stage1", 4, 0),
    ]
    (manifest,) = CheckpointFolder(tmp_path).valid()
    assert manifest.step == 4
    assert [stage.layers for stage in manifest.stages] == CUTS[0]
