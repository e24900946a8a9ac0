"""A host's certificate, its key, and the CA that it trusts: three PEM files in a folder.

The names are those of a Kubernetes TLS secret, so one that is mounted is such a folder. The files
are read again when they have changed: a certificate that is renewed needs no restart.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from pathlib import Path

from rpcmp.errors import SecurityError

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"

GRPC, RELAY, HTTP = "h2", "rpcmp-relay/1", "http/1.1"
"""Application protocols (ALPN)."""

log = logging.getLogger(__name__)


class Credentials:
    """What a process shows to others, and what it accepts of them.

    Args:
        folder: with ca.crt, tls.crt and tls.key.

    Raises:
        SecurityError: a file is missing, does not fit the others, or is a key that others can read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp: object = None
        self._load()

    def server(self) -> ssl.SSLContext:
        """For connections that others open."""
        self._refresh()
        return self._server

    def website(self) -> ssl.SSLContext:
        """For connections that browsers open, which show no certificate."""
        self._refresh()
        return self._website

    def client(self, protocol: str) -> ssl.SSLContext:
        """For connections to servers, to speak `protocol`."""
        self._refresh()
        return self._clients[protocol]

    def _refresh(self) -> None:
        try:
            if self._stat() != self._stamp:
                self._load()
        except (SecurityError, OSError) as error:  # being written: what was read before still holds
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
        self._server = self._context(ssl.PROTOCOL_TLS_SERVER, [GRPC, RELAY])
        self._website = self._context(ssl.PROTOCOL_TLS_SERVER, [HTTP])
        self._website.verify_mode = ssl.CERT_NONE
        client = ssl.PROTOCOL_TLS_CLIENT
        self._clients = {protocol: self._context(client, [protocol]) for protocol in (GRPC, RELAY)}
        self._stamp = stamp

    def _context(self, side: int, protocols: list[str]) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if side == ssl.PROTOCOL_TLS_SERVER:  # nobody resumes: each connection shows a certificate
            context.num_tickets = 0
        context.set_alpn_protocols(protocols)
        try:
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
            context.load_verify_locations(self.folder / CA)
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise SecurityError(
                f"the files in {self.folder} cannot be used: {reason}; {CERTIFICATE} and {KEY} "
                f"have to belong together, and {CA} to be a certificate"
            ) from error
        return context

    def _stat(self) -> object:
        found = [os.stat(self.folder / name) for name in (CA, CERTIFICATE, KEY)]
        return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]


def require_private(key: Path) -> None:
    """Refuse a key that others can read, by PostgreSQL's rule.

    Root may let a group read it, as mounted secrets do.

    Raises:
        SecurityError: they can.
    """
    found = key.stat()
    allowed = 0o640 if found.st_uid == 0 and os.geteuid() != 0 else 0o600
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~allowed & 0o077:
        raise SecurityError(f"{key} can be read by others (mode {mode:04o}): chmod 600 {key}")
