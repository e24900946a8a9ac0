"""Trees of tensors from one process to another, without pickle.

On the same machine shape and plain values go as JSON over a socket pair, tensors through shared
memory whose file descriptor goes along: no limit on size, nothing left in /dev/shm after a crash.
Between machines `dumps` and `loads` make bytes of a small tree.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from typing import Any

from torch import Tensor

from rpcmp import tensorfile, treespec

_HEADER = struct.Struct("!Q")


def dumps(message: Any) -> bytes:
    """A tree of tensors, numbers, strings and None, for `loads`.

    Raises:
        TypeError: a leaf is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}
    data = json.dumps(treespec.encode(message, tensors)).encode()
    return _HEADER.pack(len(data)) + data + tensorfile.to_bytes(tensors)


def loads(message: bytes) -> Any:
    """The tree that `dumps` was given."""
    (size,) = _HEADER.unpack_from(message)
    end = _HEADER.size + size
    return treespec.decode(
        json.loads(message[_HEADER.size : end]), tensorfile.from_bytes(message[end:])
    )


class Handoff:
    """One end of the connection; messages are trees of tensors, numbers, strings and None.

    Args:
        connection: a Unix stream socket, owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
            TypeError: a leaf is neither a tensor nor plain.
        """
        tensors: dict[str, Tensor] = {}
        data = json.dumps(treespec.encode(message, tensors)).encode()
        fds = [tensorfile.to_memory(tensors)] if tensors else []
        try:
            socket.send_fds(self._socket, [_HEADER.pack(len(data))], fds)
            self._socket.sendall(data)
        finally:
            for fd in fds:
                os.close(fd)

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other end is gone.
        """
        header, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
        try:
            header += self._read(_HEADER.size - len(header))
            (size,) = _HEADER.unpack(header)
            data = self._read(size)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        tensors = tensorfile.from_memory(fds[0]) if fds else {}
        return treespec.decode(json.loads(data), tensors)

    def close(self) -> None:
        """Close this end; wakes up a thread that receives, and the other end."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._socket.recv(min(size, 2**20))
            if not part:
                raise EOFError("the other process is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
