"""Ports of a stage server by certificate and protocol, and the valid messages for each."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rpcmp.net.identity import CA, CERTIFICATE, GRPC, KEY, RELAY
from tests.support.fuzz.conversations import greetings, grpc_calls, hellos, other_protocols
from tests.support.fuzz.messages import Job

OPEN_SECONDS = 20.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class EntryPoint:
    """One way to connect to a stage server.

    Attributes:
        name: its name in reports.
        share: its share of all inputs, relative to the other entry points.
        folder: folder of the client's certificate; None: no TLS.
        protocol: the announced protocol (ALPN).
        is_driver: whether its peers may steer a job.
    """

    name: str
    share: int
    folder: Path | None = None
    protocol: str = ""
    is_driver: bool = False

    @property
    def speaks_grpc(self) -> bool:
        """Return whether a gRPC server answers here."""
        return self.protocol == GRPC or (self.folder is None and self.is_driver)

    async def open(self, address: str) -> Connection:
        """Connect to a server and complete the handshake.

        Raises:
            OSError: the server closed the connection.
        """
        host, port = address.rsplit(":", 1)
        tls = None if self.folder is None else context_of(self.folder, self.protocol)
        name = None if tls is None else host
        async with asyncio.timeout(OPEN_SECONDS):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=tls, server_hostname=name
            )
        return reader, writer

    def conversations(self, draw: random.Random, job: Job) -> Iterator[bytes]:
        """Yield valid messages for this entry point."""
        if self.folder is None:
            plain = [grpc_calls(draw, job, True), greetings(draw, job, True), other_protocols(draw)]
            outside = [hellos(draw), other_protocols(draw)]
            return _mixed(draw, plain if self.is_driver else outside)
        if self.protocol == RELAY:
            return greetings(draw, job, self.is_driver)
        return grpc_calls(draw, job, self.is_driver)


def plain_entry_points() -> list[EntryPoint]:
    """Return the entry points of a server without certificates: any local process may drive."""
    return [EntryPoint("plain port", 1, is_driver=True)]


def tls_entry_points(certs: Path) -> list[EntryPoint]:
    """Return the entry points of a server with certificates.

    They send few inputs, because TLS is expensive.
    """
    return [
        EntryPoint("TLS port, no handshake", 4),
        EntryPoint("stage's certificate, relay", 1, certs / "stage1", RELAY),
        EntryPoint("stage's certificate, gRPC", 3, certs / "stage1", GRPC),
        EntryPoint("driver's certificate, relay", 1, certs / "driver", RELAY, True),
        EntryPoint("driver's certificate, gRPC", 1, certs / "driver", GRPC, True),
    ]


def context_of(folder: Path, protocol: str) -> ssl.SSLContext:
    """Return a TLS context for a client with this certificate."""
    if (folder, protocol) not in _contexts:
        context = ssl.create_default_context(cafile=str(folder / CA))
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        context.set_alpn_protocols([protocol])
        _contexts[folder, protocol] = context
    return _contexts[folder, protocol]


_contexts: dict[tuple[Path, str], ssl.SSLContext] = {}


def _mixed(draw: random.Random, sources: list[Iterator[bytes]]) -> Iterator[bytes]:
    return (next(draw.choice(sources)) for _ in itertools.count())
