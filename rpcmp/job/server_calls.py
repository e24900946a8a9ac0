"""Calls to stage servers from outside of a run, and what every caller needs to make them.

That is a dialer with the config's certificates, the rule for the number of addresses, and the
user's code that the servers import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from rpcmp.config.files import leads_out, python_files
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import ConfigError, UnavailableError, UnreachableError
from rpcmp.job import cut_cache
from rpcmp.job.driver_record import invitation
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.observability.events import state_name
from rpcmp.process.sandbox.confinement import FileAccess, has_home, hidden_by, secrets_in
from rpcmp.server.client import StageClient
from rpcmp.server.connection import versions
from rpcmp.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

Result = TypeVar("Result")

ANSWER_SECONDS = 2.0
"""How long a server may take to answer that may be gone; without a listener it fails at once."""

MAX_SECRETS = 32 * 1024
"""Characters of the paths that are hidden from a job's code in its own folder."""

POLL_SECONDS = 0.2
"""Between two checks whether a server has ended."""

MAX_FILES = 500
MAX_BYTES = 8 * 2**20


def code_access(config: Config, addresses: Sequence[str]) -> FileAccess | None:
    """Return the files that the job's code may open on the driver's host; None: it is not confined.

    This holds for the driver process and for every task that runs the job's code beside it.

    Args:
        addresses: of running servers; empty: the job starts its own on this host, and its author
            trusts it.
    """
    confine = config.security.confine
    if confine is False or (confine is None and not addresses):
        return None
    secrets = [*secrets_in(config.folder)]
    if sum(map(len, secrets)) > MAX_SECRETS:  # one message to the fork server has all of them
        raise ConfigError(
            f"{config.folder} has {len(secrets)} files with names of keys and credentials, such as "
            f"{Path(secrets[0]).name}, too many to hide from the job's code: move them elsewhere"
        )
    hidden = [*hidden_by(config.certs_folder, needed=config.folder), *secrets]
    with contextlib.suppress(RuntimeError):  # this user has no home
        hidden.append(str(cut_cache.key_file()))
    access = FileAccess(hidden=tuple(hidden))
    if not has_home(config.folder):
        return access.reading(config.folder, *config.paths_read)
    log.warning(
        "the config lies in %s, which is or has your home: of it the job's code can read Python "
        "files and what data.paths names alone; give the job a folder of its own",
        config.folder,
    )
    return access.reading(*python_files(config.folder, config.modules), *config.paths_read)


def server_addresses(config: Config, connect: Sequence[str] | None) -> Sequence[str]:
    """Return where the servers of a job run, one per worker; empty: the run starts them.

    Args:
        connect: None: where the config says.

    Raises:
        ConfigError: there is not one per worker, each once, or there are spares for servers that a
            run starts by itself, or a planned config was not made for these servers.
    """
    addresses = config.addresses if connect is None else connect
    planned = config.planned_for
    if strangers := [address for address in addresses if planned and address not in planned]:
        raise ConfigError(
            f"this config was planned for {', '.join(planned)}, and {', '.join(strangers)} is none "
            "of them: make a plan with it by `rpcmp plan`, or remove `planned_for`"
        )
    if addresses and len(addresses) != len(config.workers):
        members = "workers (replicas of stages)" if config.is_replicated else "stages"
        raise ConfigError(
            f"{len(config.workers)} {members} need as many addresses, not {len(addresses)}: "
            f"{', '.join(addresses)}"
        )
    spares = config.recovery.spares
    if spares and not addresses:
        raise ConfigError(
            "recovery.spares stand in for hosts, and the stages have no addresses: servers "
            "that a run starts by itself it starts again as well; give addresses, or no spares"
        )
    everything = [*addresses, *spares]
    if twice := sorted({address for address in everything if everything.count(address) > 1}):
        raise ConfigError(f"{', '.join(twice)} is given twice: a server serves one stage at a time")
    return addresses


def dialer_for(config: Config, addresses: Sequence[str], drives: bool = True) -> Dialer:
    """Return a dialer for the servers at `addresses`.

    Args:
        addresses: of running servers; empty: servers that are started on this machine.
        drives: whether to run a job there, or only to ask for their status.

    Raises:
        ConfigError: an address is not on loopback, and there are no certificates.
        SecurityError: the certificate cannot be used, or is not a driver's.
    """
    if not addresses:
        return Dialer(Security())
    security = Security(config.certs_folder, config.security.insecure)
    security.require_allowed(addresses)
    if drives:
        security.require_may_drive()
    return Dialer(security)


async def gather_all(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Await all to their ends; raises the first error, or one for all unreachable servers."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if len(errors) > 1 and all(isinstance(error, UnreachableError) for error in errors):
        raise UnreachableError("; ".join(map(str, errors)))
    for error in errors:
        raise error
    return cast(list[Result], results)


def prepare_request(
    config: Config,
    worker: Member,
    stage_index: int,
    code: Iterable[pb.CodeFile],
    **fields: Any,
) -> pb.PrepareRequest:
    """Return the request that gives a worker's server its job; `fields` are further ones.

    Args:
        stage_index: the stage that the server's certificate is for.
    """
    return pb.PrepareRequest(
        job=config.name,
        versions=versions(),
        stage_index=stage_index,
        replica=worker.replica,
        threads=config.stage(worker.stage_index).threads,
        code=code,
        data_paths=config.data_paths,
        init=config.init_path,
        moves_layers=config.rebalance == "auto",
        **fields,
    )


async def describe(client: StageClient) -> pb.DescribeResponse | None:
    """Return a server's description, or None if it does not answer. Closes the connection."""
    async with client:
        try:
            return await client.connect(ANSWER_SECONDS, starting=False)
        except UnreachableError:
            return None


def is_free_spare(server: pb.DescribeResponse) -> bool:
    """Return whether a server may serve any stage, and serves none."""
    return server.spare and not (server.job or server.draining)


async def status_of_all(config: Config, addresses: Sequence[str]) -> list[dict[str, Any]]:
    """Return the status of each worker's server, reachable or not, in the config's order."""
    dialer = dialer_for(config, addresses, drives=False)
    if len(addresses) != len(config.workers):
        raise ConfigError(f"{len(config.workers)} workers need as many addresses")
    return await asyncio.gather(
        *(
            _status(worker, address, dialer)
            for worker, address in zip(config.workers, addresses, strict=True)
        )
    )


async def _status(worker: Member, address: str, dialer: Dialer) -> dict[str, Any]:
    async with StageClient(worker.label, address, dialer, worker.stage_index) as client:
        try:
            server = await client.connect(ANSWER_SECONDS, starting=False)
            health = await client.health()
        except UnreachableError:
            server = pb.DescribeResponse()
            health = "UNREACHABLE"
    return {
        "index": worker.stage_index,
        "replica": worker.replica,
        "name": worker.label,
        "address": address,
        "health": health,
        "state": state_name(pb.ServerState.Name(server.state)),
        "job": server.job,
        "held_s": round(server.holds_s),
        "generation": server.generation,
        "step": server.step,
        "parameters": server.num_parameters,
        "memory": server.worker_memory,
        "rpcmp": server.versions.rpcmp,
        "torch": server.versions.torch,
        "python": server.versions.python,
        "supervisor_pid": server.supervisor_pid,
        "worker_pid": server.worker_pid,
    }


async def join(address: str, server: str, security: Security, seconds: float) -> str:
    """Have the run of a server take in the spare at `address`; return the name of its job.

    Args:
        server: of any stage of that run.
        seconds: how long to wait until the spare serves a stage; 0: do not.

    Raises:
        ConfigError: there is no spare that is free, or no run that it could join.
        UnavailableError: it serves no stage within this time.
    """
    security.require_allowed([address, server])
    dialer = Dialer(security)
    async with StageClient("", address, dialer) as spare:
        if not is_free_spare(await spare.connect(starting=False)):
            raise ConfigError(f"{address} is no spare that is free: `rpcmp serve --spare` is one")
    async with StageClient("", server, dialer) as client:
        await client.connect(starting=False)
        job_id = (await client.recall()).job_id
        job = await client.join(invitation(security, job_id, address, int(time.time())))
    ends = time.monotonic() + seconds
    while seconds:
        described = await describe(StageClient("", address, dialer))
        if described and described.job == job and described.state == pb.SERVER_STATE_RUNNING:
            break
        if time.monotonic() > ends:
            raise UnavailableError(
                f"job {job!r} has not taken in {address} within {seconds:g} s: its driver says "
                "why, or its step takes longer than that"
            )
        await asyncio.sleep(POLL_SECONDS)
    return job


async def drain(address: str, wait: bool, security: Security, leaves: bool = False) -> str:
    """Stop the server at `address`; returns the name of the job that has to end first, if any.

    Args:
        wait: return only when the server has ended.
        leaves: see StageClient.drain.
    """
    security.require_allowed([address])
    dialer = Dialer(security)
    async with StageClient("", address, dialer) as client:
        await client.connect(starting=False)
        job = await client.drain(leaves)
    while wait and await describe(StageClient("", address, dialer)) is not None:
        await asyncio.sleep(POLL_SECONDS)
    return job


def shipped_code(config: Config) -> list[pb.CodeFile]:
    """Return the user's code that the stage servers of a job get; empty unless `ship_code`."""
    if not config.ship_code:
        return []
    may_lead = None if config.security.confine is False else config.data_paths
    return collect_code(config.folder, config.modules, may_lead)


def collect_code(
    folder: Path, named: Iterable[str] = (), may_lead: Iterable[str] | None = ()
) -> list[pb.CodeFile]:
    """Return the modules and packages beside a config; see `python_files`.

    Args:
        may_lead: folders that links may lead to besides this one; None: they may lead anywhere.

    Raises:
        ConfigError: there are too many, one cannot be read, or a link leads elsewhere. What this
            process may read, such as a key, is nothing that the job's code may.
    """
    files: list[pb.CodeFile] = []
    size = 0
    for path in python_files(folder, named):
        if may_lead is not None and (target := leads_out(path, folder, *may_lead)) is not None:
            raise ConfigError(
                f"{path} leads to {target}, outside of the job's folder: copy that file, name its "
                "folder in data.paths, or set security.confine = false if you trust the job"
            )
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        files.append(pb.CodeFile(path=path.relative_to(folder).as_posix(), content=content))
        size += len(content)
        if len(files) > MAX_FILES or size > MAX_BYTES:
            raise ConfigError(
                f"{folder} holds more than {MAX_FILES} Python files or {MAX_BYTES // 2**20} MiB of "
                "them; put the config into a folder of its own, or install the model's package on "
                "every host and set ship_code = false"
            )
    return files
