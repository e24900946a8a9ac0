"""What a stage's certificate is good for: the little that stages ask of each other.

The rest is for drivers: who prepares a job says which code a host runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from rpcmp.server.listener import Interceptor

if TYPE_CHECKING:
    from rpcmp.server.listener import GrpcContext, Handler

ALLOWED = (
    "/grpc.health.v1.Health/",
    "/rpcmp.v1.Control/Describe",
    "/rpcmp.v1.Rendezvous/",
    "/rpcmp.v1.Snapshots/Fetch",
)
"""How the names of their methods begin."""


class OnlyPeers(Interceptor):
    """Refuses everything else, before a byte of the message is looked at."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        call: grpc.HandlerCallDetails,
    ) -> Handler:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(call)
        if call.method.startswith(ALLOWED) or handler is None:
            return handler
        return _refusing(handler, call.method)


def _refusing(handler: Handler, method: str) -> Handler:
    async def refuse(request: object, grpc_context: GrpcContext) -> None:
        await grpc_context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"the certificate is for a stage, and only a driver may call {method}: `rpcmp certs "
            "issue DIR --driver` makes one for it",
        )

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
