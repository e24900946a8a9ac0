"""Identities: a host's certificate, its key, the CA that it trusts, and the roles in certificates.

The files have the names of a Kubernetes TLS secret, so a mounted one is such a folder. They are
read again when they have changed: a certificate that is renewed needs no restart.

A role is a URI among the certificate's subject alternative names, where any CA can put it:
rpcmp://stage/1, rpcmp://spare, rpcmp://driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rpcmp.errors import SecurityError

if TYPE_CHECKING:
    from rpcmp.net.revocation import Revocations


CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"

CRL = "ca.crl"
"""Optional: without it nothing is revoked."""

GRPC, RELAY, HTTP = "h2", "rpcmp-relay/1", "http/1.1"
"""Application protocols (ALPN)."""

log = logging.getLogger(__name__)


class Credentials:
    """TLS contexts of a process.

    Args:
        folder: with ca.crt, tls.crt and tls.key, and ca.crl if anything is revoked.

    Raises:
        SecurityError: a file is missing, does not fit the others, or is a key that others can read.

    Attributes:
        folder: as given.
        revocations: of ca.crl; None if there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.revocations: Revocations | None = None
        self._stamp: object = None
        self._refused: object = None  # what could not be used, and was warned of
        self._load()

    def server(self) -> ssl.SSLContext:
        """Return the context for connections of stages and drivers."""
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

    def _load(self) -> None:
        try:
            stamp = self._stat()
        except OSError as error:
            raise SecurityError(
                f"{error.filename} cannot be read ({error.strerror}); --certs wants a folder with "
                f"{CA}, {CERTIFICATE} and {KEY}: `rpcmp certs issue` makes one"
            ) from error
        require_private(self.folder / KEY)
        revocations = self._read_revocations()
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
        self.revocations, self._stamp = revocations, stamp

    def _read_revocations(self) -> Revocations | None:
        """Read the CRL. If its file is gone, the last one stays, so nothing becomes valid again."""
        path = self.folder / CRL
        try:
            content = path.read_bytes()
            authorities = (self.folder / CA).read_bytes()
        except FileNotFoundError:
            if self.revocations is not None:
                log.warning("%s is gone: what it has revoked stays so until a restart", path)
            return self.revocations
        except OSError as error:
            raise SecurityError(f"{error.filename} cannot be read ({error.strerror})") from error
        from rpcmp.net.revocation import Revocations  # cryptography is needed for a CRL only

        return Revocations(content, authorities, path)

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
        found = [os.stat(self.folder / name) for name in (CA, CERTIFICATE, KEY)]
        with contextlib.suppress(FileNotFoundError):
            found.append(os.stat(self.folder / CRL))
        return [(one.st_mtime_ns, one.st_size, one.st_ino, one.st_mode) for one in found]


def require_private(key: Path) -> None:
    """Refuse a key that others can read, by PostgreSQL's rule.

    Root may let a group read it, as mounted secrets do.

    Raises:
        SecurityError: others can read it.
    """
    found = key.stat()
    allowed = 0o640 if found.st_uid == 0 and os.geteuid() != 0 else 0o600
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~allowed & 0o077:
        raise SecurityError(f"{key} can be read by others (mode {mode:04o}): chmod 600 {key}")


_URI = re.compile(r"rpcmp://(?:stage/(\d{1,5})|(spare|driver))/?")


@dataclass(frozen=True)
class Role:
    """The role of a certificate's holder.

    Attributes:
        kind: "stage", "spare" or "driver".
        stage_index: the stage; None for other kinds.
    """

    kind: str
    stage_index: int | None = None

    @property
    def uri(self) -> str:
        """The URI in the certificate."""
        number = "" if self.stage_index is None else f"/{self.stage_index}"
        return f"rpcmp://{self.kind}{number}"

    @property
    def is_driver(self) -> bool:
        return self.kind == "driver"

    def may_serve(self, stage_index: int | None) -> bool:
        """Return whether the holder may serve a stage; None stands for any, as of a spare."""
        if stage_index is None:
            return not self.is_driver
        return self.kind == "spare" or self.stage_index == stage_index

    def __str__(self) -> str:
        return self.kind if self.stage_index is None else f"stage {self.stage_index}"


DRIVER, SPARE = Role("driver"), Role("spare")

STRANGER = Role("stranger")
"""Role of a local process that a server without certificates does not work for; in no certificate.
"""


def stage(index: int) -> Role:
    """Return the role of one stage's server."""
    return Role("stage", index)


def find(uris: Iterable[str]) -> Role | None:
    """Return the role in a certificate's URIs; None if there is not exactly one."""
    found = [match for uri in uris if (match := _URI.fullmatch(uri))]
    if len(found) != 1:
        return None
    index, kind = found[0].groups()
    return Role(kind) if kind else stage(int(index))
