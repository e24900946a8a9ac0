"""gRPC servers that no client can stop, or flood the log of, by what it sends.

Each incoming connection gets a gRPC server of its own, with the same servicers behind all of them:

    PortMultiplexer ──Unix socket──> grpc.aio.Server of this connection ──> servicers

That is because of two things in grpc.aio; tests/controlplane/test_servers.py pins down both:

- The name of a call's method is decoded in the loop that takes the server's calls. If the name is
  not UTF-8, the loop ends, and all calls of that server with it: here only those of the connection
  that has sent it.
- To gRPC a message that cannot be parsed is an error of the method, like an exception that the
  method does not catch. If the caller is gone it prints a traceback for it, otherwise nothing.
  `_AnswerErrors` turns both into a status. An RpcmpError travels in the status's details, as JSON
  of `rpcmp.errors`, so that the caller raises the same error as the server.

A server costs 0.3 ms to start, 0.2 ms to stop, 40 KB, and one file descriptor to listen.

gRPC knows only the path that the other end of a Unix socket is bound to. So that end is bound to a
random path, and `Callers` remembers whose connection it carries. Another process of this user that
is quick enough to find the server's socket, which is unlinked as soon as it is connected, has no
such path and is refused. The paths of other connections are no secret, /proc/net/unix has them, so
a server takes only calls from a path of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError

from rpcmp.errors import JobError, RpcmpError, SecurityError, one_line, to_wire
from rpcmp.net.identity import STRANGER, Role
from rpcmp.net.peer_connection import PeerConnection
from rpcmp.net.port import IncomingConnection
from rpcmp.net.tunnel import bind_unix, splice

if TYPE_CHECKING:
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    GrpcContext = grpc.aio.ServicerContext[Any, Any]
    GenericHandler = grpc.GenericRpcHandler[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor

log = logging.getLogger(__name__)


class Callers:
    """Whose connection each gRPC call came by.

    `peer`, a parameter of all methods, is what `grpc_context.peer()` returns: "unix:" and the path
    that the caller's end is bound to, with some characters quoted.
    """

    def __init__(self) -> None:
        self._connections: dict[str, IncomingConnection] = {}

    @contextlib.contextmanager
    def socket_of(self, connection: IncomingConnection, path: Path) -> Iterator[socket.socket]:
        """Yield a socket bound to `path`, which is fresh; its calls are the connection's."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.setblocking(False)
            end.bind(str(path))
            path.unlink()  # the socket keeps its name
            self._connections[path.name] = connection
            try:
                yield end
            finally:
                del self._connections[path.name]

    def came_by(self, peer: str, path: Path) -> bool:
        """Return whether a call came by the socket that `socket_of` has bound to `path`."""
        return self._find(peer) is not None and _name_of(peer) == path.name

    def is_stranger(self, peer: str) -> bool:
        """Return whether the caller is a process that this server does not work for."""
        connection = self._find(peer)
        return connection is not None and connection.role == STRANGER

    def role(self, peer: str) -> Role | None:
        """Return the role in the caller's certificate; None if there are no certificates.

        Raises:
            SecurityError: the call did not come through the port, or its connection is gone.
        """
        connection = self._find(peer)
        if connection is None:
            raise SecurityError("the call did not come through the server's port")
        return connection.role

    def name(self, peer: str) -> str:
        """Return the caller's role and address, for messages."""
        connection = self._find(peer)
        return connection.name if connection is not None else "a connection that is gone"

    def _find(self, peer: str) -> IncomingConnection | None:
        return self._connections.get(_name_of(peer))


def _name_of(peer: str) -> str:
    return peer.rpartition("/")[2]


class _Handlers:
    """Collects the handlers of services as grpc.aio.Server does."""

    def __init__(self) -> None:
        self.generic: list[GenericHandler] = []

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[GenericHandler]) -> None:
        self.generic += generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Do nothing: the generic handlers have the same methods."""


class GrpcServers:
    """The gRPC servers behind the port, one per connection.

    Args:
        folder: private to this user; sockets lie there for a moment.

    Attributes:
        services: takes the place of a server in the generated `add_..._to_server` functions; they
            are to be called before `serve`.
    """

    def __init__(self, folder: Path, callers: Callers) -> None:
        self._folder, self._callers = folder, callers
        self._handlers = _Handlers()
        self.services = cast("grpc.aio.Server", self._handlers)
        self._running: set[grpc.aio.Server] = set()

    def require_room_for_sockets(self) -> None:
        """Bind a socket in the folder, as each connection will: its path may be too long."""
        path = self._path()
        with bind_unix(path):
            path.unlink()

    async def serve(
        self,
        connection: IncomingConnection,
        interceptors: Sequence[Interceptor],
        options: Sequence[tuple[str, int]],
    ) -> None:
        """Answer a connection's calls until it is closed.

        Args:
            interceptors: called in this order.
            options: of gRPC.

        Raises:
            OSError: the connection broke, or there are too many open files.
        """
        path, other_end = self._path(), self._path()
        answering = (*interceptors, _AnswerErrors(self._callers, other_end))
        server = grpc.aio.server(
            handlers=self._handlers.generic, interceptors=answering, options=list(options)
        )
        self._running.add(server)
        try:
            try:
                server.add_insecure_port(f"unix:{path}")
            except RuntimeError as error:
                raise OSError(one_line(error)) from error
            finally:
                await server.start()  # without it stopping does not free the memory
            with self._callers.socket_of(connection, other_end) as end:
                await asyncio.get_running_loop().sock_connect(end, str(path))
                path.unlink()
                await splice(connection.end, PeerConnection(end))
        finally:
            path.unlink(missing_ok=True)
            self._running.discard(server)
            connection.end.close()  # the client need not wait for the server to stop
            await _stop(server, grace=None)

    async def stop(self, grace: float) -> None:
        """Stop all servers; calls have up to `grace` seconds to return."""
        await asyncio.gather(*(_stop(server, grace) for server in self._running))

    def _path(self) -> Path:
        """A fresh path for a socket; all are equally long, so a deep folder fits all or none."""
        return self._folder / secrets.token_hex(8)


async def _stop(server: grpc.aio.Server, grace: float | None) -> None:
    with contextlib.suppress(UnicodeDecodeError):  # why its loop ended: raised once
        await server.stop(grace)
        return
    await server.stop(grace)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for what clients can have logged as often as they like.

    That is what gRPC and asyncio log about bytes that are not UTF-8, and gRPC about a method that
    goes on after its connection, and so its server, has ended, or whose answer finds nobody.
    """
    if record.name == "asyncio":
        error = record.exc_info[1] if record.exc_info else None
        traceback = error.__traceback__ if isinstance(error, UnicodeDecodeError) else None
        return traceback is None or "_cygrpc" not in traceback.tb_frame.f_code.co_filename
    text = record.getMessage()
    is_stopped = text.startswith("Aborting method") and "server stop" in text
    is_unsent = text.startswith("ExecuteBatchError raised in core")
    is_header = text.startswith("Invalid encoding")
    return not (is_stopped or is_unsent or is_header or isinstance(record.msg, UnicodeDecodeError))


for _name in ("grpc._cython.cygrpc", "asyncio"):
    logging.getLogger(_name).addFilter(_is_worth_logging)


class _Unreadable:
    """In place of a message that cannot be parsed."""


class _AnswerErrors(Interceptor):
    """Answers unknown callers, messages that cannot be parsed, and exceptions of methods.

    Args:
        path: of the other end of the server's connection.
    """

    def __init__(self, callers: Callers, path: Path) -> None:
        self._callers, self._path = callers, path

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        call: grpc.HandlerCallDetails,
    ) -> Handler:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(call)  # None for an unknown method
        if handler is None or handler.request_deserializer is None:
            return cast("Handler", handler)
        make, method = next(
            (make, method)
            for kind, make in _HANDLERS.items()
            if (method := getattr(handler, kind)) is not None
        )
        if handler.request_streaming:
            method = _with_readable_requests(method)
        wrap = self._wrap_stream if inspect.isasyncgenfunction(method) else self._wrap
        parse = functools.partial(_parse, handler.request_deserializer)
        return make(wrap(method), parse, handler.response_serializer)

    def _wrap(self, method: Callable[[Any, GrpcContext], Awaitable[Any]]) -> Callable[..., Any]:
        async def answer(request: Any, grpc_context: GrpcContext) -> Any:
            async with self._answering(request, grpc_context):
                return await method(request, grpc_context)

        return answer

    def _wrap_stream(self, method: Callable[[Any, GrpcContext], Any]) -> Callable[..., Any]:
        async def answer(request: Any, grpc_context: GrpcContext) -> Any:
            async with self._answering(request, grpc_context):
                async for part in method(request, grpc_context):
                    yield part

        return answer

    @contextlib.asynccontextmanager
    async def _answering(self, request: Any, grpc_context: GrpcContext) -> AsyncIterator[None]:
        """Refuse an unknown caller or unreadable message; answer with what the block raises."""
        try:
            if not self._callers.came_by(grpc_context.peer(), self._path):
                await grpc_context.abort(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "the call did not come through the server's port",
                )
            await _require_readable(request, grpc_context)
            yield
        except Exception as error:
            await _fail(error, grpc_context)


_HANDLERS: dict[str, Callable[..., Handler]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
}


def _parse(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserialize(data)
    except DecodeError:
        return _Unreadable()


def _with_readable_requests(
    method: Callable[[Any, GrpcContext], Awaitable[Any]],
) -> Callable[[Any, GrpcContext], Awaitable[Any]]:
    async def readable(requests: Any, grpc_context: GrpcContext) -> AsyncIterator[Any]:
        async for request in requests:
            await _require_readable(request, grpc_context)
            yield request

    return lambda requests, grpc_context: method(readable(requests, grpc_context), grpc_context)


async def _require_readable(request: Any, grpc_context: GrpcContext) -> None:
    if isinstance(request, _Unreadable):
        await grpc_context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be read")


async def _fail(error: Exception, grpc_context: GrpcContext) -> None:
    """Answer a call with an exception that its method has not caught."""
    if isinstance(error, grpc.aio.BaseError):  # already an answer, or the caller is gone
        raise error
    if isinstance(error, RpcmpError | OSError):  # an OSError: a full disk, no more processes
        known = error if isinstance(error, RpcmpError) else JobError(one_line(error))
        await grpc_context.abort(grpc.StatusCode.FAILED_PRECONDITION, to_wire(known))
    if isinstance(error, NotImplementedError):
        await grpc_context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")
    log.error("a bug in a stage server", exc_info=error)
    await grpc_context.abort(grpc.StatusCode.INTERNAL, one_line(error))
