"""gRPC servers that a client cannot end, or fill the log of, by what it says.

Calls are taken only from the connections of the front, which have names; see `wire.inner`.

Two things of grpc.aio are put right here, tests/cluster/test_listener.py pins down both:

- A call of a method whose name is not UTF-8 ends the loop that takes calls, and soon the process.
  Names of methods are only ever read of those that nobody has registered, so these calls are
  cancelled before anybody does. Left alone they would fill the core's queue, of 3,000 calls.
- A message that cannot be read is an error of the method to gRPC, as is what the method does not
  catch. Of these it prints a traceback where the caller is gone, and nothing where he is not.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc
from grpc.aio import _server as grpc_aio

from rpcmp.errors import one_line
from rpcmp.net.port import Inner

if TYPE_CHECKING:
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    GrpcContext = grpc.aio.ServicerContext[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor

log = logging.getLogger(__name__)

# It prints a traceback for a header that is not UTF-8, and goes on.
logging.getLogger("grpc._cython.cygrpc").addFilter(
    lambda record: not record.getMessage().startswith("Invalid encoding")
)


def make(
    interceptors: Sequence[Interceptor], options: Sequence[tuple[str, int]], inner: Inner
) -> grpc.aio.Server:
    """A server that listens nowhere yet.

    Args:
        inner: knows the callers that are let in.
        interceptors: asked in this order.
        options: of gRPC.
    """
    server: Any = _HardenedServer((*interceptors, _Answering(inner)), tuple(options))
    return server  # type: ignore[no-any-return]


class _Registered(cygrpc.AioServer):  # type: ignore[misc]
    """Lets nobody see a call but those of registered methods."""

    async def _request_call(self) -> None:
        while True:  # what was taken is let go of, and so cancelled
            await super()._request_call()


class _HardenedServer(grpc_aio.Server):
    def __init__(
        self, interceptors: tuple[Interceptor, ...], options: tuple[tuple[str, int], ...]
    ) -> None:
        # Not the base's: that makes a server of its own.
        self._loop = cygrpc.get_working_loop()
        self._server = _Registered(self._loop, None, (), interceptors, options, None)


class _Unreadable:
    """In the place of a message that cannot be read."""


class _Answering(Interceptor):
    """Answers for unknown callers, for messages that cannot be read, and for methods that fail."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        call: grpc.HandlerCallDetails,
    ) -> Handler:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(call)  # None, or a named tuple
        if handler is None or handler.request_deserializer is None:
            return cast("Handler", handler)
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        method = getattr(handler, kind)
        if kind == "stream_unary":
            answering = _answering(_of_readable(method), self._inner)
        elif inspect.isasyncgenfunction(method):
            answering = _answering_in_parts(method, self._inner)
        else:
            answering = _answering(method, self._inner)
        reads = functools.partial(_read, handler.request_deserializer)
        changed = {"request_deserializer": reads, kind: answering}
        return cast("Handler", handler._replace(**changed))


_KINDS = ("unary_unary", "unary_stream", "stream_unary")


def _read(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserialize(data)
    except DecodeError:
        return _Unreadable()


def _answering(
    method: Callable[[Any, GrpcContext], Awaitable[Any]], inner: Inner
) -> Callable[..., Any]:
    async def answering(request: Any, grpc_context: GrpcContext) -> Any:
        try:
            await _require_known(inner, grpc_context)
            await _require_readable(request, grpc_context)
            return await method(request, grpc_context)
        except Exception as error:
            await _fail(error, grpc_context)

    return answering


def _answering_in_parts(
    method: Callable[[Any, GrpcContext], Any], inner: Inner
) -> Callable[..., Any]:
    async def answering(request: Any, grpc_context: GrpcContext) -> Any:
        try:
            await _require_known(inner, grpc_context)
            await _require_readable(request, grpc_context)
            async for part in method(request, grpc_context):
                yield part
        except Exception as error:
            await _fail(error, grpc_context)

    return answering


def _of_readable(
    method: Callable[[Any, GrpcContext], Awaitable[Any]],
) -> Callable[[Any, GrpcContext], Awaitable[Any]]:
    async def readable(requests: Any, grpc_context: GrpcContext) -> AsyncIterator[Any]:
        async for request in requests:
            await _require_readable(request, grpc_context)
            yield request

    return lambda requests, grpc_context: method(readable(requests, grpc_context), grpc_context)


async def _require_known(inner: Inner, grpc_context: GrpcContext) -> None:
    if not inner.knows(grpc_context.peer()):
        await grpc_context.abort(
            grpc.StatusCode.UNAUTHENTICATED, "the call did not come through the server's port"
        )


async def _require_readable(request: Any, grpc_context: GrpcContext) -> None:
    if isinstance(request, _Unreadable):
        await grpc_context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be read")


async def _fail(error: Exception, grpc_context: GrpcContext) -> None:
    """Answer for an error that a method has not answered for itself."""
    if isinstance(error, grpc.aio.BaseError):  # that is an answer; or there is nobody left to hear
        raise error
    if isinstance(error, NotImplementedError):
        await grpc_context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")
    log.error("a bug in a stage server", exc_info=error)
    await grpc_context.abort(grpc.StatusCode.INTERNAL, one_line(error))
