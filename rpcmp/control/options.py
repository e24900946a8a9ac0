"""gRPC settings that both ends share, and the version of what they say."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from rpcmp.v1 import control_pb2 as pb

PROTOCOL = 8
"""Raised whenever a message or the data plane changes its meaning."""

MAX_MESSAGE = 64 * 2**20
"""Bytes; enough for the code that a job ships."""

# A host that vanished without closing its connections is noticed within KEEPALIVE + its timeout.
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
    # Of one connection: more wait for their turn, at who asks.
    ("grpc.max_concurrent_streams", 64),
]

MAX_PEERS_MESSAGE = 64 * 1024
"""Bytes of what stages ask each other; answers may be longer."""

PEERS_OPTIONS: list[tuple[str, int]] = [
    *[option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"],
    ("grpc.max_receive_message_length", MAX_PEERS_MESSAGE),
]


def versions() -> pb.Versions:
    """What this host runs; read from package metadata, so torch is not imported."""
    major, minor, _ = platform.python_version_tuple()
    return pb.Versions(
        rpcmp=metadata.version("rpcmp"),
        torch=metadata.version("torch"),
        python=f"{major}.{minor}",
        protocol=PROTOCOL,
    )


def machine() -> str:
    """The same for all processes that share a kernel, and with it processors and memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


NEEDED_EQUAL = ("protocol", "rpcmp", "torch", "python")
"""What has to be the same at all who work on one job."""


def is_same_release(one: str, other: str) -> bool:
    """Whether two versions differ in their local build tags at most, "2.13.0" and "2.13.0+cpu"."""
    return one.partition("+")[0] == other.partition("+")[0]


def differences(ours: pb.Versions, theirs: pb.Versions) -> list[str]:
    """ "torch: 2.13.0 here, 2.12.1 there" for all that differs; local build tags do not count."""
    result = []
    for field in NEEDED_EQUAL:
        mine, other = str(getattr(ours, field)), str(getattr(theirs, field))
        if not is_same_release(mine, other):
            result.append(f"{field}: {mine} here, {other} there")
    return result
