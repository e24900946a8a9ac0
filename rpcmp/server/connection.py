"""Connections to a stage server: gRPC's options, versions at both ends, and the health check.

Orchestrators start `rpcmp health` anew every few seconds, so this imports neither jobs nor the
control service.
"""

from __future__ import annotations

import asyncio
import functools
import platform
import re
from importlib import metadata
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from rpcmp.errors import ConfigError, RpcmpError, UnreachableError
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.tunnel import Tunnel
from rpcmp.v1 import control_pb2 as pb

PROTOCOL = 20
"""Incremented whenever a message or the data plane changes its meaning."""

MAX_JOINING = 64
"""Spares that may ask a server to join one generation."""

MAX_MESSAGE = 64 * 2**20
"""Bytes; enough for the code that a job ships."""

# A client notices within the sum of both times that a server's host has vanished. A server does not
# close a connection whose client answers no pings: that is left to TCP, see `rpcmp.net.port`.
_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_KEEPALIVE,
    # A server that is restarted is found again at once, not after a minute of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # With SO_REUSEPORT two servers would share a port and each get half of the calls.
    ("grpc.so_reuseport", 0),
    # Per connection; further calls wait at the client.
    ("grpc.max_concurrent_streams", 64),
]

MAX_PEERS_MESSAGE = 64 * 1024
"""Bytes of a stage's request to another; answers may be longer."""

PEERS_OPTIONS = list(
    {**dict(SERVER_OPTIONS), "grpc.max_receive_message_length": MAX_PEERS_MESSAGE}.items()
)


TORCH = ((2, 11), (2, 16))
"""The releases of torch that rpcmp was proven with, from the first up to below the second."""


@functools.cache
def versions() -> pb.Versions:
    """Return the versions that this process runs. Reads package metadata: torch is not imported.

    Raises:
        ConfigError: torch is none of the releases that rpcmp works with.
    """
    major, minor, _ = platform.python_version_tuple()
    torch = metadata.version("torch")
    first, end = TORCH
    release = tuple(int(part) for part in re.findall(r"\d+", torch)[:2])
    if not first <= release < end:
        needed = f"torch>={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        raise ConfigError(
            f"torch {torch} is installed on {platform.node()}, and rpcmp was not proven with it: "
            f"pip install '{needed}'"
        )
    return pb.Versions(
        rpcmp=metadata.version("rpcmp"),
        torch=torch,
        python=f"{major}.{minor}",
        protocol=PROTOCOL,
    )


def software_versions() -> dict[str, str]:
    """Return what a manifest and the event `run` say of the software."""
    software = versions()
    return {name: getattr(software, name) for name in ("rpcmp", "torch", "python")}


def machine() -> str:
    """Return an id shared by all processes on one kernel, and so on the same cores and memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


NEEDED_EQUAL = ("protocol", "rpcmp", "torch", "python")
"""Fields that have to be the same on all hosts of a job."""


def is_same_release(one: str, other: str) -> bool:
    """Return whether versions differ at most in local build tags, "2.13.0" and "2.13.0+cpu"."""
    return one.partition("+")[0] == other.partition("+")[0]


def differences(ours: pb.Versions, theirs: pb.Versions) -> list[str]:
    """Return "torch: 2.13.0 here, 2.12.1 there" per difference; ignores local build tags."""
    values = [(each, str(getattr(ours, each)), str(getattr(theirs, each))) for each in NEEDED_EQUAL]
    return [
        f"{field}: {local} here, {remote} there"
        for field, local, remote in values
        if not is_same_release(local, remote)
    ]


IS_IT_RUNNING = "is `rpcmp serve` running there?"
"""Hint for a server that does not answer."""

SERVING = "SERVING"


async def check_health(address: str, dialer: Dialer, seconds: float) -> str:
    """Return a server's status by the health service: "SERVING", or "NOT_SERVING" in a drain.

    Raises:
        UnreachableError: the server has not answered in time.
        SecurityError: the server is not the expected one, or refuses our certificate.
        ConfigError: the address is not on loopback, and there are no certificates.
    """
    dialer.security.require_allowed([address])
    # Also without certificates: the tunnel's errors are clearer than gRPC's.
    tunnel = Tunnel(dialer, address, stage_index=None)
    try:
        async with (
            asyncio.timeout(seconds),
            grpc.aio.insecure_channel(tunnel.target, options=CHANNEL_OPTIONS) as channel,
        ):
            answer: HealthCheckResponse = await HealthStub(channel).Check(HealthCheckRequest())
    except TimeoutError as error:
        raise UnreachableError(
            f"{address} does not answer within {seconds:g} s; {IS_IT_RUNNING}"
        ) from error
    except grpc.aio.AioRpcError as error:
        wants_tls = await dialer.tls_required_error(address)
        raise (wants_tls or _health_error(error, tunnel, address)) from error
    finally:
        await tunnel.close()
    return str(HealthCheckResponse.ServingStatus.Name(answer.status))


def _health_error(error: grpc.aio.AioRpcError, tunnel: Tunnel, address: str) -> RpcmpError:
    if isinstance(tunnel.failure, UnreachableError):
        return UnreachableError(f"{tunnel.failure}; {IS_IT_RUNNING}")
    if tunnel.failure is not None:
        return tunnel.failure
    return UnreachableError(
        f"{address} does not answer as a stage server does: {error.code().name}: {error.details()}"
    )
