"""Going on from a checkpoint: the newest one that is whole, wherever its files are.

Every host says which of the files it has on its disk and whether their hashes are right. A stage
whose host does not have what it needs fetches it from one that does. Layers decide who needs what,
so the stages may be other ones than those that wrote the files.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from rpcmp.checkpoint.folder import CheckpointFolder
from rpcmp.checkpoint.manifest import Manifest, StageFile, check_model
from rpcmp.config import Config
from rpcmp.control.client import StageClient
from rpcmp.errors import CheckpointError
from rpcmp.job.fleet import Fleet
from rpcmp.job.session import Begin
from rpcmp.process.channel import Message
from rpcmp.v1 import control_pb2 as pb


class Checkpointed:
    """The checkpoints that a run can go on from.

    Args:
        config: the job.
        fleet: its servers, opened.
        report: told of checkpoints that cannot be used ("warning").
    """

    def __init__(self, config: Config, fleet: Fleet, report: Callable[[Message], None]) -> None:
        self._config = config
        self._fleet = fleet
        self._report = report
        self._folder = CheckpointFolder(config.checkpoint_folder)

    async def newest(
        self, assignments: Sequence[str], run: str | None
    ) -> tuple[Begin, Manifest] | None:
        """The newest checkpoint that every stage can begin with; None where there is none at all.

        Args:
            assignments: of each stage, JSON of rpcmp.plan.Assignment.
            run: only those of this one; None: of any.

        Raises:
            CheckpointError: there are some, but none of them is whole, or of this model.
        """
        layers = [json.loads(assignment)["layers"] for assignment in assignments]
        problems = []
        for found in await asyncio.to_thread(self._folder.found):
            if run is not None and found.manifest is not None and found.manifest.run != run:
                continue
            try:
                if found.manifest is None:
                    raise CheckpointError(found.problem)
                check_model(found.manifest, [name for of_stage in layers for name in of_stage])
                begin = await self._begin(found.manifest, layers)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                self._report({"event": "warning", "text": f"skipped a checkpoint: {problem}"})
            return begin, found.manifest
        if problems:
            raise CheckpointError("\n  ".join(["no checkpoint can be used:", *problems]))
        return None

    async def _begin(self, manifest: Manifest, layers: Sequence[Sequence[str]]) -> Begin:
        holders = await self._holders(manifest)
        restores = {}
        for index, stage in enumerate(self._config.stage_names):
            needed = [file for file in manifest.stages if set(file.layers) & set(layers[index])]
            own = self._fleet.addresses[index]
            restores[stage] = pb.Restore(
                step=manifest.step,
                files=[self._file(manifest, file, holders[file.file], own) for file in needed],
            )
        return Begin(manifest.step, restores)

    def _file(
        self, manifest: Manifest, file: StageFile, holders: Sequence[str], own: str
    ) -> pb.CheckpointFile:
        return pb.CheckpointFile(
            path=str(self._folder.path_of(manifest.step) / file.file),
            sha256=file.sha256,
            size=file.size,
            address="" if own in holders else holders[0],
        )

    async def _holders(self, manifest: Manifest) -> dict[str, list[str]]:
        """The servers that have each file, whole.

        Raises:
            CheckpointError: nobody has one of them.
        """
        folder = self._folder.path_of(manifest.step)
        request = pb.CheckRequest(
            files=[
                pb.CheckpointFile(path=str(folder / file.file), sha256=file.sha256, size=file.size)
                for file in manifest.stages
            ]
        )
        states = await asyncio.gather(*(_check(a, request) for a in self._fleet.addresses))
        found: dict[str, list[str]] = {}
        for index, file in enumerate(manifest.stages):
            at = dict(zip(self._fleet.addresses, (each[index] for each in states), strict=True))
            found[file.file] = [address for address, state in at.items() if state == "ok"]
            if not found[file.file]:
                said = "damaged" if "damaged" in at.values() else "missing"
                raise CheckpointError(
                    f"step {manifest.step}: {folder / file.file} of stage {file.name!r}, written "
                    f"on {file.host}, is {said}"
                )
        return found


async def _check(address: str, request: pb.CheckRequest) -> list[str]:
    async with StageClient("", address) as client:
        return await client.check(request)
