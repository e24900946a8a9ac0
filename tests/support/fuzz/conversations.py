"""Valid messages of clients to a stage server, from which malformed inputs are created."""

from __future__ import annotations

import json
import random
import ssl
import struct
from collections.abc import Iterator

from rpcmp.net.identity import GRPC, RELAY
from tests.support.fuzz import http2
from tests.support.fuzz.messages import Job, calls


def grpc_calls(draw: random.Random, job: Job, is_driver: bool) -> Iterator[bytes]:
    """Yield streams of one to three calls over one connection."""
    source = calls(draw, job, is_driver)
    while True:
        some = (next(source) for _ in range(draw.randrange(1, 4)))
        frames = (http2.call(*call, 2 * number + 1) for number, call in enumerate(some))
        yield http2.opening() + b"".join(frames)


def greetings(draw: random.Random, job: Job, is_driver: bool) -> Iterator[bytes]:
    """Yield first frames for the relay.

    Only peers that do not wait for the running job send them, because the test would wait for such
    a driver.
    """
    while True:
        known = vars(job) if not is_driver else {"job_id": "nobody's", "generation": 1}
        wanted = {**known, "op": draw.choice(["wait", "", None, 7, ["connect"]])}
        if not is_driver:
            wanted["op"] = "wait"
        yield _frame(json.dumps(wanted).encode())


def hellos(draw: random.Random) -> Iterator[bytes]:
    """Yield the first flight of a TLS handshake by a client without a certificate."""
    while True:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(draw.choice([[GRPC], [RELAY], [GRPC, RELAY], []]))
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = context.wrap_bio(received, sent)
        try:
            session.do_handshake()
        except ssl.SSLWantReadError:
            yield sent.read()


def other_protocols(draw: random.Random) -> Iterator[bytes]:
    """Yield requests that scanners send to every port."""
    while True:
        yield draw.choice(
            [
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                b"SSH-2.0-OpenSSH_9.9\r\n",
                b"\x00\x00\x00\x54\xffSMBr" + bytes(76),
                b"*1\r\n$4\r\nPING\r\n",
                http2.opening(),
                _frame(b"{}"),
            ]
        )


def _frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data
