"""Health check of a stage server: one call of the standard health service, for orchestrators.

Orchestrators start it anew every few seconds, so it imports neither jobs nor the control service.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from rpcmp.errors import RpcmpError, UnreachableError
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.tunnel import Tunnel
from rpcmp.server.connection import CHANNEL_OPTIONS, IS_IT_RUNNING

SERVING = "SERVING"


async def probe(address: str, dialer: Dialer, seconds: float) -> str:
    """Return the status of the server at `address`: "SERVING", or "NOT_SERVING" while it drains.

    Args:
        address: HOST:PORT.
        dialer: opens the connection.
        seconds: time limit.

    Raises:
        UnreachableError: no answer in time.
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
        raise (wants_tls or _reason(error, tunnel, address)) from error
    finally:
        await tunnel.close()
    return str(HealthCheckResponse.ServingStatus.Name(answer.status))


def _reason(error: grpc.aio.AioRpcError, tunnel: Tunnel, address: str) -> RpcmpError:
    if isinstance(tunnel.failure, UnreachableError):
        return UnreachableError(f"{tunnel.failure}; {IS_IT_RUNNING}")
    if tunnel.failure is not None:
        return tunnel.failure
    return UnreachableError(
        f"{address} does not answer as a stage server does: {error.code().name}: {error.details()}"
    )
