"""Facts about a host that matter to a run: software, processors, devices, disk, network.

`examine` runs in a supervisor, which does not import torch; what needs torch or the user's code is
looked at by a child process, in `check_devices_and_code`. Requests and answers travel as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field

from rpcmp.checkpoint.files import place_of, require_plain, write_durably
from rpcmp.config import importing
from rpcmp.config.files import COMPARED_BY_VERSION, sha256_of
from rpcmp.config.types import Factory, Strict
from rpcmp.errors import CheckpointError, ConfigError, FactoryError, RpcmpError, one_line
from rpcmp.net.security import Security
from rpcmp.process.channel import Message
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.sandbox import confinement
from rpcmp.process.sandbox.confinement import FileAccess
from rpcmp.process.sockets import listeners
from rpcmp.process.task import run_task
from rpcmp.server.connection import PROTOCOL, machine

PACKAGES = ("rpcmp", "torch", "protobuf", "grpcio", "numpy")
"""Packages whose versions are compared."""

PREFIX = ".rpcmp-doctor-"
"""Beginning of the names of files that try out a folder."""


class CheckRequest(Strict):
    """Requirements of a stage, or of the driver, on its host.

    Attributes:
        callables: "module:callable" of everything that will be built there, by config key.
        devices: torch devices.
        builds: those of the callables that make modules, by config key.
        metrics: "module:callable" of the metrics that the driver may have to compute, by config
            key.
        folder: absolute path of the folder for checkpoints; empty if there are none.
        relative_folder: the same relative to the config's folder; empty if the config has it
            absolute. A server may keep it relative to the folder that it was started in.
        marker: name of a file that is in `folder` if it is the driver's own folder; empty if it
            need not be.
        init: absolute path of the weights to start from; empty if there are none.
    """

    callables: dict[str, str]
    devices: list[str]
    builds: dict[str, Factory] = Field(default_factory=dict)
    metrics: dict[str, str] = Field(default_factory=dict)
    folder: str = ""
    relative_folder: str = ""
    marker: str = ""
    init: str = ""


class Device(Strict):
    """A torch device.

    Attributes:
        name: its product name.
        available_bytes: free memory; None if unknown.
        alike: the names of all devices of its kind, the CPU's aside.
        problem: why it cannot be used; empty if it can.
    """

    name: str = ""
    available_bytes: int | None = None
    alike: list[str] = Field(default_factory=list)
    problem: str = ""


class Folder(Strict):
    """A folder for checkpoints.

    Attributes:
        path: of the folder on its host, which may keep it elsewhere than the driver.
        free_bytes: on its disk.
        has_marker: whether the driver's marker is in it.
        problem: why no file can be kept there; empty if one can.
    """

    path: str = ""
    free_bytes: int = 0
    has_marker: bool = False
    problem: str = ""


class CertificateInfo(Strict):
    """A certificate.

    Attributes:
        role: what its holder may be; empty: nothing.
        hosts: names and addresses that it is for.
        not_after: end of its validity, in seconds since 1970.
    """

    role: str
    hosts: list[str]
    not_after: float


class HostFacts(Strict):
    """One host.

    Attributes:
        host: its name.
        machine: equal for all servers on it.
        versions: of Python, the protocol and `PACKAGES`.
        processors: number that this user may use.
        certificate: None if there is none.
        listens: HOST:PORT of every TCP socket at which the supervisor listens.
        metrics_port: port of the supervisor's own Prometheus endpoint; 0 if there is none.
        network: equal for workers that reach each other by loopback.
        exposed: why other users of the host could reach a worker there; empty if they cannot.
        confinement: what confines the job's code there; empty if nothing does.
        unconfined: what the job's code can do all the same, since the kernel lacks a feature.
        folder: None if the job keeps no checkpoints.
        devices: by the names in the request.
        code: SHA-256 of the code that is installed or was sent along, by top-level module.
        problems: why a callable does not import, or makes no module, by config key.
        driver_metrics: keys of the request's metrics that keep a state.
        has_init: whether the weights to start from are there.
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
    has_init: bool = False


async def examine(
    request: CheckRequest,
    forks: Forks,
    security: Security,
    code_folder: Path | None,
    file_access: FileAccess | None,
    threads: int = 1,
    allowed: Sequence[str] | None = None,
    checkpoints: Path | None = None,
) -> HostFacts:
    """Collect the facts about this host.

    Args:
        request: what the job needs.
        forks: where the child process that looks at devices and code comes from.
        security: of this supervisor.
        code_folder: of the Python files that came with the job; None if none did.
        file_access: what the child process may open; None: it is not confined.
        threads: compute threads of the worker.
        allowed: modules that callables may come from, see `rpcmp.config.importing`; None: any.
        checkpoints: the folder that checkpoints may lie in; None: anywhere.
    """
    checked = await run_task(
        {
            "op": "examine",
            "order": request.model_dump_json(),
            "code_folder": str(code_folder or ""),
            "allowed": allowed,
        },
        compute_environment(threads),
        forks,
        file_access,
    )
    network = await forks.network()
    return HostFacts(
        host=platform.node(),
        machine=machine(),
        versions=_versions(),
        processors=len(os.sched_getaffinity(0)),
        certificate=_certificate(security),
        listens=sorted(listeners().values()),
        network=network.name,
        exposed=network.reason,
        confinement="" if file_access is None else confinement.kernel_support(),
        unconfined="" if file_access is None else confinement.missing_protection(),
        folder=await _check_folder(request, checkpoints),
        devices=checked["devices"],
        code=checked["code"],
        problems=checked["problems"],
        driver_metrics=checked["driver_metrics"],
        has_init=await asyncio.to_thread(os.path.exists, request.init),
    )


def _versions() -> dict[str, str]:
    return {
        **{package: metadata.version(package) for package in PACKAGES},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "protocol": str(PROTOCOL),
    }


def _certificate(security: Security) -> CertificateInfo | None:
    if security.credentials is None:
        return None
    from rpcmp.net.certificates import Certificate  # imports `cryptography`

    certificate = Certificate.load(security.credentials.folder)
    return CertificateInfo(
        role="" if certificate.role is None else str(certificate.role),
        hosts=certificate.hosts,
        not_after=certificate.not_after.timestamp(),
    )


async def _check_folder(request: CheckRequest, checkpoints: Path | None) -> Folder | None:
    if not request.folder:
        return None
    folder = Path(request.folder)
    try:
        if checkpoints is not None:
            folder = place_of(checkpoints, request.folder, request.relative_folder).real
        if request.marker:
            require_plain(request.marker)
    except CheckpointError as error:
        return Folder(problem=f"{error}: start its server with --checkpoints, or set `dir`")
    # On a thread: a disk may be slow.
    return await asyncio.to_thread(try_folder, folder, request.marker)


def try_folder(path: Path, marker: str = "") -> Folder:
    """Write a file into `path` as checkpoints are written, by fsync and rename, and remove it.

    A folder that does not exist is not made: the nearest one above it is tried.
    """
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with marked(existing):
            has_marker = bool(marker) and (path / marker).exists()
            free = shutil.disk_usage(existing).free
            return Folder(path=str(path), free_bytes=free, has_marker=has_marker)
    except OSError as error:
        return Folder(path=str(path), problem=error.strerror or one_line(error))


@contextlib.contextmanager
def marked(path: Path) -> Iterator[str]:
    """Keep a fresh file in the folder `path` for the length of the block; gives its name.

    A missing folder is made, and removed again unless other files are in it by then.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    marker = path / f"{PREFIX}{uuid.uuid4().hex}"
    try:
        try:
            write_durably(marker, [b"rpcmp doctor was here\n"])
            yield marker.name
        finally:
            marker.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            for folder in missing:
                folder.rmdir()


def check_devices_and_code(message: Message) -> Iterator[Message]:
    """Task: try the devices, import the callables, and hash the code they come from."""
    if message["code_folder"]:
        sys.path.insert(0, message["code_folder"])
    importing.set_allow_list(message["allowed"])
    request = CheckRequest.model_validate_json(message["order"])
    problems = {key: _import_problem(name, key) for key, name in request.callables.items()}
    if not request.init or os.path.exists(request.init):  # without it, the driver sends some
        for key, factory in request.builds.items():
            problems[key] = problems[key] or _build_problem(factory, key, request.init)
    yield {
        "event": "examined",
        "devices": {name: _try_device(name).model_dump() for name in request.devices},
        "problems": {key: problem for key, problem in problems.items() if problem},
        "code": _code_hashes(request, problems),
        "driver_metrics": [key for key, name in request.metrics.items() if _keeps_state(name, key)],
    }


def _import_problem(name: str, key: str) -> str:
    """Return why a callable cannot be imported, or an empty string."""
    try:
        importing.resolve(name, key)
    except FactoryError as error:
        return str(error)
    except BaseException as error:  # a module that calls sys.exit()
        return f"{key} = {name!r} does not import: {one_line(error)}"
    return ""


def _build_problem(factory: Factory, key: str, init: str) -> str:
    """Return why a module or a list of layers cannot be made, or an empty string.

    It gets no memory for its parameters, unless it cannot be made without.
    """
    from rpcmp.splitting.building import build_without_weights, init_at  # imports torch

    def make() -> Any:
        with init_at(init or None):
            return importing.create(factory, key)

    if key != "model.layers":
        with contextlib.suppress(Exception):
            build_without_weights(make)
            return ""
    try:
        make()
    except RpcmpError as error:
        return str(error)
    return ""


def _keeps_state(name: str, key: str) -> bool:
    """Return whether the driver computes a metric; one that does not import here is the sink's."""
    from rpcmp.metrics import keeps_state  # imports torch

    try:
        return keeps_state(importing.resolve(name, key))
    except BaseException:
        return False


def _code_hashes(request: CheckRequest, problems: dict[str, str]) -> dict[str, str]:
    """Hash rpcmp and the top-level modules of all callables that could be imported."""
    imported = [name for key, name in request.callables.items() if not problems[key]]
    modules = {"rpcmp", *(name.partition(":")[0].partition(".")[0] for name in imported)}
    return {name: sha256_of(name) for name in sorted(modules.difference(COMPARED_BY_VERSION))}


def _try_device(name: str) -> Device:
    from rpcmp.pipelining import devices  # imports torch

    try:
        device = devices.working_device(name)
        return Device(
            name=devices.device_name(device),
            available_bytes=devices.available_bytes(device),
            alike=devices.alike(device.type),
        )
    except ConfigError as error:
        return Device(problem=str(error))
    except RuntimeError as error:  # such as a lack of memory
        return Device(problem=f"device = {name!r} cannot be used now: {one_line(error)}")
