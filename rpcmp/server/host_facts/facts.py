"""What is asked of a host before a run, and what it answers; travels as JSON.

Trying whether a folder keeps what is written there: as checkpoints are, by fsync and rename.

Finding out what this host is and has; by a supervisor, which does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import uuid
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from pydantic import Field

from rpcmp.checkpoint.files import write_durably
from rpcmp.checkpoint.paths import beneath, require_plain
from rpcmp.config.types import Strict
from rpcmp.errors import CheckpointError, one_line
from rpcmp.net.security import Security
from rpcmp.process.child import Child
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.sandbox import confinement
from rpcmp.process.sandbox.confinement import Reach
from rpcmp.process.sockets import listeners
from rpcmp.server.connection import PROTOCOL, machine


class CheckRequest(Strict):
    """What one stage of a job, or its driver, will need.

    Attributes:
        callables: "module:callable" of what will be built there, by config key.
        devices: torch devices.
        metrics: "module:callable" of those that the driver may have to compute, by config key.
        folder: where checkpoints go, absolute; empty: nowhere.
        marker: name of a file that is in that folder if it is the driver's; empty: it need not be.
    """

    callables: dict[str, str]
    devices: list[str]
    metrics: dict[str, str] = Field(default_factory=dict)
    folder: str = ""
    marker: str = ""


class Device(Strict):
    """A device.

    Attributes:
        name: what a person would call it.
        available_bytes: of memory; None where nobody knows.
        problem: why it cannot be used; empty: it can.
    """

    name: str = ""
    available_bytes: int | None = None
    problem: str = ""


class Folder(Strict):
    """A folder for checkpoints.

    Attributes:
        free_bytes: on its disk.
        has_marker: whether the driver's marker is in it.
        problem: why nothing can be kept there; empty: it can.
    """

    free_bytes: int = 0
    has_marker: bool = False
    problem: str = ""


class CertificateInfo(Strict):
    """A certificate.

    Attributes:
        role: what its holder may be; empty: nothing.
        hosts: names and addresses that it is for.
        not_after: until when it is valid, in seconds since 1970.
    """

    role: str
    hosts: list[str]
    not_after: float


class HostFacts(Strict):
    """One host.

    Attributes:
        host: its name.
        machine: equal for all servers on it.
        versions: of rpcmp and what it is made of, by package.
        processors: that this user may use.
        certificate: None where it has none.
        listens: HOST:PORT of every TCP socket at which the supervisor listens.
        metrics_port: where the supervisor was told to have its figures; 0: nowhere.
        network: equal for workers that reach each other by loopback.
        exposed: why other users of the host could reach a worker there; empty: they cannot.
        confinement: what confines the job's code there; empty: it is not confined.
        unconfined: what it can do all the same, since the kernel lacks something.
        folder: None where there are to be no checkpoints.
        devices: those that were asked for, by what they were called.
        code: SHA-256 of what is installed or was sent along, by top-level module.
        problems: of callables, by config key: why one does not import.
        driver_metrics: keys of those of the order's metrics that keep a state.
    """

    host: str
    machine: str
    versions: dict[str, str]
    processors: int
    certificate: CertificateInfo | None
    listens: list[str]
    metrics_port: int = 0
    network: str
    exposed: str
    confinement: str = ""
    unconfined: str = ""
    folder: Folder | None
    devices: dict[str, Device]
    code: dict[str, str]
    problems: dict[str, str]
    driver_metrics: list[str] = Field(default_factory=list)


PREFIX = ".rpcmp-doctor-"


def try_out(path: Path, marker: str = "") -> Folder:
    """Write a file into the folder and remove it; where it is missing, where it would be made.

    Args:
        path: of the folder, which need not exist.
        marker: name of a file to look for in there; empty: none.
    """
    place = next(one for one in (path, *path.parents) if one.exists())
    try:
        with marked(place):
            found = bool(marker) and (path / marker).exists()
            return Folder(free_bytes=shutil.disk_usage(place).free, has_marker=found)
    except OSError as error:
        return Folder(problem=error.strerror or one_line(error))


@contextlib.contextmanager
def marked(path: Path) -> Iterator[str]:
    """The name of a fresh file in the folder, for the length of the block.

    A folder that is missing is made, and removed again unless others have begun to use it.

    Raises:
        OSError: it cannot be written, or not removed.
    """
    missing = [one for one in (path, *path.parents) if not one.exists()]
    marker = path / f"{PREFIX}{uuid.uuid4().hex}"
    try:
        try:
            write_durably(marker, [b"rpcmp doctor was here\n"])
            yield marker.name
        finally:
            marker.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            for one in missing:
                one.rmdir()


PACKAGES = ("rpcmp", "torch", "protobuf", "grpcio", "numpy")


async def examine(
    order: CheckRequest,
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
        allowed: modules that callables may come from, see `rpcmp.config.importing`; None: any.
        checkpoints: the folder that checkpoints may lie in; None: anywhere.
        reach: what that process may open; None: it is not confined.

    Raises:
        JobError: that process failed; WorkerDiedError: it ended.
    """
    environment = compute_environment(threads)
    child = await Child.spawn("rpcmp.server.host_facts", environment, forks=forks, reach=reach)
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
        confinement="" if reach is None else confinement.kernel_support(),
        unconfined="" if reach is None else confinement.missing_protection(),
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


def _paper(security: Security) -> CertificateInfo | None:
    if security.credentials is None:
        return None
    from rpcmp.net.certificates import Certificate  # only who has one needs its libraries

    found = Certificate.load(security.credentials.folder)
    return CertificateInfo(
        role="" if found.role is None else str(found.role),
        hosts=found.hosts,
        not_after=found.not_after.timestamp(),
    )


async def _folder(order: CheckRequest, checkpoints: Path | None) -> Folder | None:
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
    return await asyncio.to_thread(try_out, Path(order.folder), order.marker)
