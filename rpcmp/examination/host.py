"""Finding out what this host is and has; by a supervisor, which does not import torch."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rpcmp.checkpoint.inside import beneath, require_plain
from rpcmp.control.options import PROTOCOL, machine
from rpcmp.errors import CheckpointError
from rpcmp.examination import folder
from rpcmp.examination.facts import Folder, HostFacts, Order, Paper
from rpcmp.process import confinement
from rpcmp.process.child import Child
from rpcmp.process.confinement import Reach
from rpcmp.process.environment import compute_environment
from rpcmp.process.forking import Forks
from rpcmp.process.listeners import listeners
from rpcmp.wire.security import Security

PACKAGES = ("rpcmp", "torch", "protobuf", "grpcio", "numpy")


async def examine(
    order: Order,
    forks: Forks,
    security: Security,
    code_folder: Path | None,
    threads: int = 1,
    allowed: Sequence[str] | None = None,
    checkpoints: Path | None = None,
    reach: Reach | None = None,
) -> HostFacts:
    """What this host is and has, as `order` needs it.

    Args:
        order: what will be needed.
        forks: where the process comes from that looks at devices and code.
        security: of this supervisor.
        code_folder: of the Python files that came with the job; None: none did.
        threads: of the worker's compute.
        allowed: modules that callables may come from, see `rpcmp.allowlist`; None: any.
        checkpoints: the folder that checkpoints may lie in; None: anywhere.
        reach: what that process may open; None: it is not confined.

    Raises:
        JobError: that process failed; WorkerDiedError: it ended.
    """
    environment = compute_environment(threads)
    child = await Child.spawn("rpcmp.examination", environment, forks=forks, reach=reach)
    found = await child.ask(
        {
            "op": "examine",
            "order": order.model_dump_json(),
            "code_folder": str(code_folder or ""),
            "allowed": allowed,
        }
    )
    network = await forks.network()
    return HostFacts(
        host=platform.node(),
        machine=machine(),
        versions=_versions(),
        processors=len(os.sched_getaffinity(0)),
        certificate=_paper(security),
        listens=sorted(listeners().values()),
        network=network.name,
        exposed=network.reason,
        confinement="" if reach is None else confinement.told(),
        unconfined="" if reach is None else confinement.lacks(),
        folder=await _folder(order, checkpoints),
        devices=found["devices"],
        code=found["code"],
        problems=found["problems"],
        driver_metrics=found["driver_metrics"],
    )


def _versions() -> dict[str, str]:
    return {
        **{package: metadata.version(package) for package in PACKAGES},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "protocol": str(PROTOCOL),
    }


def _paper(security: Security) -> Paper | None:
    if security.credentials is None:
        return None
    from rpcmp.wire.certificate import Certificate  # only who has one needs its libraries

    found = Certificate.load(security.credentials.folder)
    return Paper(
        role="" if found.role is None else str(found.role),
        hosts=found.hosts,
        not_after=found.not_after.timestamp(),
    )


async def _folder(order: Order, checkpoints: Path | None) -> Folder | None:
    """On a thread: a disk may take its time."""
    if not order.folder:
        return None
    try:
        if checkpoints is not None:
            beneath(checkpoints, order.folder)
        if order.marker:
            require_plain(order.marker)
    except CheckpointError as error:
        return Folder(problem=f"{error}: start its server with --checkpoints, or set `dir`")
    return await asyncio.to_thread(folder.try_out, Path(order.folder), order.marker)
