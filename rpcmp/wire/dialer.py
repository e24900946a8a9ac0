"""Opening connections to stage servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl

from rpcmp.addresses import parse
from rpcmp.errors import SecurityError, UnreachableError
from rpcmp.process.links import keep_alive
from rpcmp.wire.credentials import GRPC
from rpcmp.wire.end import End, refusal
from rpcmp.wire.localpeer import require_own_server
from rpcmp.wire.security import Security
from rpcmp.wire.session import Session

OPEN_SECONDS = 6.0
"""How long a host may take to answer, handshake included."""

HINT_SECONDS = 2.0
"""How long to find out why it did not."""


class Dialer:
    """Opens connections to stage servers, as whom our certificate says that we are.

    Args:
        security: what this process was told about it.
        server_name: whom their certificates have to be for; None: the host that is dialled.

    Attributes:
        security: as given.
    """

    def __init__(self, security: Security, server_name: str | None = None) -> None:
        self.security = security
        self._server_name = server_name

    async def open(self, address: str, protocol: str, stage_index: int | None) -> End:
        """A connection to the server at `address`.

        Args:
            protocol: what will be spoken, GRPC or RELAY.
            stage_index: of the stage that it has to be; None: any.

        Raises:
            UnreachableError: nobody answers.
            SecurityError: it is not who it should be.
        """
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self._open(address, protocol, stage_index)
        except TimeoutError as error:
            raise UnreachableError(
                f"{address} does not answer within {OPEN_SECONDS:.0f} s"
            ) from error
        except ssl.SSLError as error:
            raise SecurityError(f"{address} is not trusted: {refusal(error)}") from error
        except EOFError as error:
            raise UnreachableError(f"{address} hung up during the handshake") from error
        except OSError as error:
            raise UnreachableError(f"{address} cannot be reached: {_reason(error)}") from error

    async def misunderstanding(self, address: str) -> SecurityError | None:
        """Why a server that was spoken to in the open does not answer: it wants TLS. None: else."""
        if self.security.credentials is not None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to it
        context.set_alpn_protocols([GRPC])
        host, port = parse(address)
        try:
            async with asyncio.timeout(HINT_SECONDS):
                connection = await _connect(host, port)
                with connection:
                    await self._require_own(connection, address)
                    _, writer = await asyncio.open_connection(
                        sock=connection, ssl=context, server_hostname=""
                    )
                    writer.transport.abort()  # not close: that waits for the other end's goodbye
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError, EOFError, SecurityError):
            return None
        return SecurityError(
            f"{address} wants TLS, and is spoken to in the open: give --certs, a folder with a "
            "certificate of its authority"
        )

    async def _open(self, address: str, protocol: str, stage_index: int | None) -> End:
        host, port = parse(address)
        session = self._session(protocol, host)
        end = End(await _connect(host, port), session)
        try:
            await self._require_own(end.socket, address)
            await end.shake_hands()
            if session is not None:
                self._require(session, address, stage_index)
                self.security.establish(end)
        except BaseException:
            end.close()
            raise
        return end

    async def _require_own(self, connection: socket.socket, address: str) -> None:
        """Refuse another user's server, which without certificates gets no byte of ours.

        Raises:
            SecurityError: it is one, or the kernel does not say whose it is.
        """
        if self.security.credentials is None and not self.security.insecure:
            await require_own_server(connection, address)

    def _session(self, protocol: str, host: str) -> Session | None:
        credentials = self.security.credentials
        if credentials is None:
            return None
        name = host if self._server_name is None else self._server_name
        try:
            return Session(credentials.client(protocol), name)
        except ValueError as error:
            raise SecurityError(f"no certificate can be for a host called {name!r}") from error

    @staticmethod
    def _require(session: Session, address: str, stage_index: int | None) -> None:
        found = session.peer_role
        if found is None or not found.may_serve(stage_index):
            wanted = "a stage" if stage_index is None else f"stage {stage_index}"
            raise SecurityError(
                f"{address} has a certificate for {found or 'no role of rpcmp'}, not for {wanted}"
            )


def _reason(error: OSError) -> str:
    """What the system says; asyncio's own words repeat the address."""
    if error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


async def _connect(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for index, (family, kind, number, _, address) in enumerate(found):
        connection = socket.socket(family, kind, number)
        connection.setblocking(False)
        keep_alive(connection.fileno())
        try:
            async with asyncio.timeout(OPEN_SECONDS / len(found)):  # one of them may be a dead end
                await loop.sock_connect(connection, address)
        except OSError:
            connection.close()
            if index + 1 == len(found):
                raise
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise OSError(f"{host} has no address")
