"""Security of a process's connections: certificates, its own machine only, or none at all.

It fails closed: without certificates everything stays on loopback, and there between the processes
of one user, unless the user explicitly asks for `insecure`. With certificates the TLS contexts of
`Credentials` refuse a peer without a certificate of our CA, on either side of a connection.

`watch` ends connections of revoked peers, and warns before our own certificate expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import ssl
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rpcmp.config.addresses import parse
from rpcmp.errors import ConfigError, SecurityError
from rpcmp.net.identity import (
    CA,
    CERTIFICATE,
    CRL,
    GRPC,
    HTTP,
    KEY,
    RELAY,
    Role,
    TlsState,
    require_private,
)

if TYPE_CHECKING:
    from rpcmp.net.certificates import Certificate, Revocations
    from rpcmp.net.signatures import Signer, Verifier

log = logging.getLogger(__name__)


class Credentials:
    """TLS contexts of a process. They are read again when their files have changed.

    Args:
        folder: with ca.crt, tls.crt and tls.key, and ca.crl if anything is revoked.

    Attributes:
        revocations: of ca.crl; None if there is none.
        authorities: the content of ca.crt.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.revocations: Revocations | None = None
        self._stamp: object = None
        self._refused: object = None  # what could not be used, and was warned of
        self._signer: Signer | None = None
        self._signs_since: object = None
        self.authorities = b""
        self._load()

    def server(self) -> ssl.SSLContext:
        """Return the context for connections of stages and drivers, which need a certificate."""
        self.refresh()
        return self._server

    def website(self) -> ssl.SSLContext:
        """Return the context for connections of browsers, which send no certificate."""
        self.refresh()
        return self._website

    def metrics(self) -> ssl.SSLContext:
        """Return the context for connections of Prometheus, which sends a certificate."""
        self.refresh()
        return self._metrics

    def client(self, protocol: str) -> ssl.SSLContext:
        """Return the context for connections to servers, with ALPN `protocol`."""
        self.refresh()
        return self._clients[protocol]

    def refresh(self) -> None:
        """Read the files again if they have changed; log a warning if they cannot be used."""
        try:
            stamp: object = self._stat()
        except OSError as error:  # being replaced
            stamp = str(error)
        if stamp in (self._stamp, self._refused):
            return
        try:
            self._load()
            self._refused = None
        except (SecurityError, OSError) as error:  # being written: what was read before still holds
            self._refused = stamp
            log.warning("the certificate is not renewed: %s", error)

    def certificate(self) -> Certificate:
        from rpcmp.net.certificates import Certificate  # imports cryptography

        return Certificate.load(self.folder)

    def signer(self) -> Signer:
        """Return what signs with our key."""
        self.refresh()
        if self._signer is None or self._signs_since != self._stamp:
            from rpcmp.net.signatures import Signer  # imports cryptography

            try:
                self._signer, self._signs_since = Signer(self.folder), self._stamp
            except SecurityError:  # its files are being replaced
                if self._signer is None:
                    raise
        return self._signer

    def verifier(self) -> Verifier:
        """Return what verifies signatures of drivers."""
        self.refresh()
        from rpcmp.net.signatures import Verifier  # imports cryptography

        return Verifier(self.authorities, self.revocations)

    def _load(self) -> None:
        try:
            stamp = self._stat()
            authorities = (self.folder / CA).read_bytes()
        except OSError as error:
            raise SecurityError(
                f"{error.filename} cannot be read ({error.strerror}); --certs wants a folder with "
                f"{CA}, {CERTIFICATE} and {KEY}: `rpcmp certs issue` makes one"
            ) from error
        require_private(self.folder / KEY)
        revocations = self._read_revocations(authorities)
        server = self._context(ssl.PROTOCOL_TLS_SERVER, [GRPC, RELAY], revocations)
        metrics = self._context(ssl.PROTOCOL_TLS_SERVER, [HTTP], revocations)
        website = self._context(ssl.PROTOCOL_TLS_SERVER, [HTTP], None)
        website.verify_mode = ssl.CERT_NONE
        clients = {
            protocol: self._context(ssl.PROTOCOL_TLS_CLIENT, [protocol], revocations)
            for protocol in (GRPC, RELAY)
        }
        self._server, self._website, self._clients = server, website, clients
        self._metrics = metrics
        self.authorities = authorities
        self.revocations, self._stamp = revocations, stamp

    def _read_revocations(self, authorities: bytes) -> Revocations | None:
        """Read the CRL. If its file is gone, the last one stays, so nothing becomes valid again."""
        path = self.folder / CRL
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            if self.revocations is not None:
                log.warning("%s is gone: what it has revoked stays so until a restart", path)
            return self.revocations
        except OSError as error:
            raise SecurityError(f"{error.filename} cannot be read ({error.strerror})") from error
        from rpcmp.net.certificates import Revocations  # imports cryptography

        found = Revocations(content, authorities, path)
        if self.revocations is not None and found.is_older_than(self.revocations):
            raise SecurityError(
                f"{path} is older than the one before, and would make valid again what that has "
                "revoked: copy the newest from the authority's host"
            )
        return found

    def _context(
        self, side: int, protocols: list[str], revocations: Revocations | None
    ) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if side == ssl.PROTOCOL_TLS_SERVER:  # no resumption: each connection sends a certificate
            context.num_tickets = 0
        context.set_alpn_protocols(protocols)
        try:
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
            context.load_verify_locations(self.folder / CA)
            if revocations is not None:
                revocations.require(context)
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise SecurityError(
                f"the files in {self.folder} cannot be used: {reason}; {CERTIFICATE} and {KEY} "
                f"have to belong together, and {CA} to be a certificate"
            ) from error
        return context

    def _stat(self) -> object:
        files = [os.stat(self.folder / name) for name in (CA, CERTIFICATE, KEY)]
        with contextlib.suppress(FileNotFoundError):
            files.append(os.stat(self.folder / CRL))
        return [(file.st_mtime_ns, file.st_size, file.st_ino, file.st_mode) for file in files]


INSECURE = (
    "insecure: nothing is encrypted, and whoever reaches a stage server runs code on its host"
)

WARN_SECONDS = 60.0
"""Interval of that warning."""


class VerifiedConnection(Protocol):
    """A connection whose peer has a certificate; it ends if that is revoked."""

    @property
    def session(self) -> TlsState | None: ...
    @property
    def gone(self) -> asyncio.Event: ...
    def shut_down(self) -> None: ...


class Security:
    """A process's certificate, from a folder; `insecure` talks to other machines without one."""

    def __init__(self, certs: Path | None = None, insecure: bool = False) -> None:
        if certs is not None and insecure:
            raise ConfigError("give --certs or --insecure, not both")
        self.certs, self.insecure = certs, insecure
        self.credentials = None if certs is None else Credentials(certs)
        self._established: weakref.WeakSet[VerifiedConnection] = weakref.WeakSet()

    def establish(self, end: VerifiedConnection) -> None:
        """Register a verified connection, so that it can be ended if the peer is revoked."""
        if self._has(end, self._is_revoked):
            raise SecurityError("certificate revoked")
        self._established.add(end)

    def end_revoked(self) -> list[str]:
        """End the connections of revoked peers; return their roles."""
        return self._end(self._is_revoked)

    def end_of_other_authorities(self, before: bytes) -> list[str]:
        """End the connections of peers whose authority has left ca.crt; return their roles.

        Args:
            before: what ca.crt was.
        """
        from rpcmp.net.signatures import has_left  # imports cryptography

        now = b"" if self.credentials is None else self.credentials.authorities
        return self._end(lambda certificate: has_left(certificate, before, now))

    def _end(self, is_refused: Callable[[bytes], bool]) -> list[str]:
        ended = [end for end in self._established if self._has(end, is_refused)]
        for end in ended:
            self._established.discard(end)
            end.shut_down()
        return [str(end.session.peer_role) for end in ended if end.session is not None]

    def _has(self, end: VerifiedConnection, is_refused: Callable[[bytes], bool]) -> bool:
        """Return whether a connection's peer has a certificate that is refused now."""
        if end.session is None or end.gone.is_set():
            return False
        certificate = end.session.peer_certificate
        return certificate is not None and is_refused(certificate)

    def _is_revoked(self, certificate: bytes) -> bool:
        revocations = None if self.credentials is None else self.credentials.revocations
        return revocations is not None and revocations.has(certificate)

    @property
    def role(self) -> Role | None:
        """The role in our certificate; None without certificates."""
        if self.credentials is None:
            return None
        certificate = self.credentials.certificate()
        if certificate.role is None:
            raise SecurityError(
                f"{certificate.path} has no role: among its alternative names there has to be one "
                "URI such as rpcmp://stage/1, rpcmp://spare or rpcmp://driver"
            )
        return certificate.role

    def require_allowed(self, addresses: Iterable[str]) -> None:
        """Refuse addresses on other machines, or that they could reach, without certificates."""
        for address in addresses:
            host, _ = parse(address)
            if not (self.credentials or self.insecure or is_loopback(host)):
                raise ConfigError(
                    f"{address} is not a loopback address: whoever reaches a stage server runs "
                    "code on its host. Give --certs DIR, which `rpcmp certs issue` makes, so that "
                    "only the hosts of the job do; or --insecure, where nobody else is on the "
                    "network"
                )

    def require_valid(self) -> None:
        """Refuse to start with a certificate that peers would not accept."""
        if self.credentials is None:
            return
        certificate, now = self.credentials.certificate(), datetime.now(UTC)
        if now > certificate.not_after:
            raise SecurityError(
                f"{certificate.path} has expired on {certificate.not_after:%Y-%m-%d}, so peers "
                "would refuse us: renew it where its authority is, by `rpcmp certs renew DIR`, and "
                "copy it here"
            )
        if now < certificate.not_before:
            raise SecurityError(
                f"{certificate.path} is valid from {certificate.not_before:%Y-%m-%d %H:%M} UTC on, "
                f"and here it is {now:%Y-%m-%d %H:%M}: set one of the two clocks"
            )

    def require_may_serve(self, stage_index: int | None) -> None:
        """Refuse to serve a stage with a certificate for another role, or one that has expired."""
        self.require_valid()
        role = self.role
        if role is None:
            return
        if stage_index is None and role.kind != "spare":
            raise SecurityError(f"the certificate is for {role}, not for a spare")
        if not role.may_serve(stage_index):
            raise SecurityError(f"the certificate is for {role}, not for stage {stage_index}")

    def require_may_drive(self) -> None:
        role = self.role
        if role is not None and not role.is_driver:
            raise SecurityError(
                f"the certificate is for {role}, which cannot drive: `rpcmp certs issue DIR "
                "--driver` makes one that can"
            )


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


POLL_SECONDS = 2.0
"""Interval of checks of the files: how soon a revocation reaches open connections."""

EXPIRES_DAYS = 7
"""Certificates that expire within so many days are warned of."""

WARN_EACH_SECONDS = 24 * 3600.0


async def watch(security: Security, warn: Callable[[str], None]) -> None:
    """End connections of peers that would be refused now; warn before the certificate expires.

    Returns at once if there are no certificates, otherwise runs until it is cancelled.

    `warn` is called with the text of a warning.
    """
    credentials = security.credentials
    if credentials is None:
        return
    checked, authorities = credentials.revocations, credentials.authorities
    warned = -WARN_EACH_SECONDS
    while True:
        credentials.refresh()
        if credentials.revocations is not checked:
            checked = credentials.revocations
            for role in security.end_revoked():
                warn(f"a connection with {role} is ended: its certificate is revoked")
        if credentials.authorities != authorities:
            for role in security.end_of_other_authorities(authorities):
                warn(f"a connection with {role} is ended: its authority is not in ca.crt any more")
            authorities = credentials.authorities
        if time.monotonic() - warned >= WARN_EACH_SECONDS:
            warned = time.monotonic()
            if text := expiry_warning(credentials, datetime.now(UTC)):
                warn(text)
        await asyncio.sleep(POLL_SECONDS)


def expiry_warning(credentials: Credentials, now: datetime) -> str:
    """Return a warning if a certificate expires soon, else an empty string."""
    try:
        certificate = credentials.certificate()
    except SecurityError:  # being written; the last one that could be read holds
        return ""
    days = (certificate.not_after - now).total_seconds() / 86400
    if days >= EXPIRES_DAYS:
        return ""
    when = "has expired"
    if days > 0:
        when = f"expires on {certificate.not_after:%Y-%m-%d}, in {days:.0f} days"
    return (
        f"{certificate.path} {when}: renew it where its authority is, by `rpcmp certs renew DIR` "
        "for one of rpcmp's, and copy it here; it is loaded without a restart"
    )
