"""Identity of the other end of a connection: roles in certificates, and the TLS handshake.

A role is a URI among the certificate's subject alternative names, where any CA can put it:
rpcmp://stage/1, rpcmp://spare, rpcmp://driver.

`security.py` has the TLS contexts that refuse a peer without a certificate of our CA. `port.py`
makes the handshake for connections that arrive, and `peer_connection.py` for those to servers.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpcmp.errors import SecurityError

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""Files of a certificate's folder, named as in a Kubernetes TLS secret: that can be mounted."""

CRL = "ca.crl"
"""Optional: without it nothing is revoked."""

GRPC, RELAY, HTTP = "h2", "rpcmp-relay/1", "http/1.1"
"""Application protocols (ALPN)."""


def require_private(key: Path) -> None:
    """Refuse a key that others can read, by PostgreSQL's rule.

    Root may let a group read it, as mounted secrets do.
    """
    status = key.stat()
    allowed = 0o640 if status.st_uid == 0 and os.geteuid() != 0 else 0o600
    mode = stat.S_IMODE(status.st_mode)
    if mode & ~allowed & 0o077:
        raise SecurityError(f"{key} can be read by others (mode {mode:04o}): chmod 600 {key}")


_URI = re.compile(r"rpcmp://(?:stage/(\d{1,5})|(spare|driver))/?")


@dataclass(frozen=True)
class Role:
    """The role of a certificate's holder: "stage" with an index, "spare" or "driver"."""

    kind: str
    stage_index: int | None = None

    @property
    def uri(self) -> str:
        number = "" if self.stage_index is None else f"/{self.stage_index}"
        return f"rpcmp://{self.kind}{number}"

    @property
    def is_driver(self) -> bool:
        return self.kind == "driver"

    def may_serve(self, stage_index: int | None) -> bool:
        """Return whether the holder may serve a stage; None stands for any."""
        if stage_index is None:
            return not self.is_driver
        return self.kind == "spare" or self.stage_index == stage_index

    def __str__(self) -> str:
        return self.kind if self.stage_index is None else f"stage {self.stage_index}"


DRIVER, SPARE = Role("driver"), Role("spare")

STRANGER = Role("stranger")
"""A local process that a server without certificates does not work for; in no certificate."""


def stage(index: int) -> Role:
    return Role("stage", index)


def find(uris: Iterable[str]) -> Role | None:
    """Return the role in a certificate's URIs; None if there is not exactly one."""
    matches = [match for uri in uris if (match := _URI.fullmatch(uri))]
    if len(matches) != 1:
        return None
    index, kind = matches[0].groups()
    return Role(kind) if kind else stage(int(index))


class TlsState:
    """The TLS state of one connection, apart from its socket.

    It works on memory BIOs: one thread carries any number of connections without blocking, and
    encrypts as much at once as it has read, with the fewest calls per byte that `ssl` allows.

    Args:
        context: of our certificate.
        server_hostname: the server's name, for a client; None: this is the server.

    Attributes:
        has_received: whether the peer has sent data, and so has accepted us.
    """

    def __init__(self, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        self.has_received = False
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._received,
            self._to_send,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )

    @property
    def protocol(self) -> str | None:
        return self._tls.selected_alpn_protocol()

    @property
    def peer_role(self) -> Role | None:
        """The role in the peer's certificate; None if it has none."""
        certificate: dict[str, Any] = dict(self._tls.getpeercert() or {})
        names = certificate.get("subjectAltName", ())
        return find(value for kind, value in names if kind == "URI")

    @property
    def peer_certificate(self) -> bytes | None:
        """The peer's certificate, DER; None if it has sent none."""
        return self._tls.getpeercert(binary_form=True)

    def handshake(self) -> bool:
        """Continue the handshake; return whether it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def feed(self, data: bytes | memoryview) -> None:
        """Add data that the socket has received."""
        self._received.write(data)

    def decrypt(self, into: memoryview) -> int:
        """Decrypt data that was received; return the number of bytes, 0 if there are no more now.

        Raises:
            EOFError: the peer has closed the connection.
            ssl.SSLError: the data was tampered with.
        """
        count = 0
        try:
            while count < len(into) and (self._received.pending or self._tls.pending()):
                got: int = self._tls.read(len(into) - count, into[count:])  # type: ignore[assignment]
                if not got:
                    break
                count += got
                self.has_received = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError as error:
            if not count:
                raise EOFError("the other side has closed the connection") from error
        return count

    def encrypt(self, data: bytes | memoryview) -> None:
        """Encrypt `data`; get it from `to_send`."""
        self._tls.write(data)

    def close(self) -> None:
        """Announce the end of our data; get that from `to_send`."""
        with contextlib.suppress(ssl.SSLError, ValueError):  # it has not, or not shaken hands
            self._tls.unwrap()

    def to_send(self) -> bytes:
        """Return the bytes to send over the socket."""
        return self._to_send.read()


_OF_ONE_AUTHORITY = "both hosts need certificates and the ca.crt of one (`rpcmp certs issue`)"

_OTHER_AUTHORITY = (
    "tls.crt of that host is of another authority than {certs}/ca.crt here: " + _OF_ONE_AUTHORITY
)

_OTHER_NAME = (
    "issue that host a certificate for this name, too (`rpcmp certs issue DIR --name stageN "
    "--host NAME`), or use a name that its certificate has: `rpcmp certs show` lists them there"
)

NO_TLS = "the other side does not speak TLS at all: start it with --certs"

REMEDIES = {
    3: "{certs}/ca.crl has no list of that authority: copy its ca.crl here as well",
    9: "set the clock of one of the two hosts",
    10: "renew tls.crt of that host with `rpcmp certs renew DIR`, where its authority is, and copy "
    "it there",
    18: _OTHER_AUTHORITY,
    19: _OTHER_AUTHORITY,
    20: _OTHER_AUTHORITY,
    21: _OTHER_AUTHORITY,
    23: "issue that host another one with `rpcmp certs issue DIR`, unless it is in other hands",
    47: "{certs}/ca.crt here permits other names; if its authority permits more by now, copy the "
    "newest ca.crt here",
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
"""What to do if we refuse a certificate, by OpenSSL's X509_V_ERR_* (x509_vfy.h)."""

ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other side wants a certificate: give --certs",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not know the CA of our certificate: "
    "{certs}/tls.crt here is of another authority than ca.crt of that host; " + _OF_ONE_AUTHORITY,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other side says that our certificate has expired: "
    "renew {certs}/tls.crt with `rpcmp certs renew DIR`, where its authority is",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the other side says that our certificate is revoked: "
    "issue another one with `rpcmp certs issue DIR`, and copy it to {certs}",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the other side's ca.crt does not permit the names in our "
    "certificate: copy the newest ca.crt of its authority to that host",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other side does not accept our certificate: see `rpcmp "
    "certs show {certs}`, and whether the clocks of both hosts are right",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other side does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "the other side does not speak TLS 1.3",
    "WRONG_VERSION_NUMBER": NO_TLS,
    "HTTP_REQUEST": NO_TLS,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "NO_SHARED_CIPHER": "no cipher in common",
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "the other side is no rpcmp server",
}
"""What failed, and what to do, by OpenSSL's name of the reason; mostly alerts of the peer."""


def refusal(error: BaseException, certs: Path | None = None) -> str:
    """Describe why a handshake failed, and what to do; `certs` has our certificate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = error.verify_message.rstrip(".")
        if error.verify_code in REMEDIES:
            text += f"; {REMEDIES[error.verify_code]}"
    elif isinstance(error, ssl.SSLError) and error.reason:
        text = ALERTS.get(error.reason, error.reason.lower().replace("_", " "))
    else:
        return str(error) or type(error).__name__
    return text.replace("{certs}", str(certs or "DIR"))
