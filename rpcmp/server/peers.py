"""What a stage's certificate is good for: the little that stages ask of each other.

The rest is for drivers: who prepares a job says which code a host runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from rpcmp.server.listener import Interceptor
from rpcmp.wire.inner import Inner

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
    """Refuses everything else, before a byte of the message is looked at.

    Args:
        inner: knows the callers' roles.
    """

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

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
        return _refusing(handler, call.method, self._inner)


def _refusing(handler: Handler, method: str, inner: Inner) -> Handler:
    async def refuse(request: object, grpc_context: GrpcContext) -> None:
        why = (
            f"the certificate is for a stage, and only a driver may call {method}: `rpcmp certs "
            "issue DIR --driver` makes one for it"
        )
        if inner.is_stranger(grpc_context.peer()):
            why = (
                f"this server does not let that process call {method}: either it works for another "
                "process's job alone, or the caller is confined or in another container; with "
                "--certs both ends prove who they are"
            )
        await grpc_context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
