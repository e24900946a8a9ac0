"""Tensors outside of torch RPC: hashes, and trees of them as bytes, all without pickle.

**Hashes.** Each tensor's bytes are hashed where the tensor lives, and only the digests are
combined, so a model that is larger than any host never has to pass through one. The result is the
same for every balance, stage count and schedule, so two runs compare at a glance:

    sha256 of, for each tensor of the unsplit model's state_dict, sorted by name:
        name \0 dtype \0 shape \0 sha256(little-endian bytes) \n
    such as "conv.weight\0float32\032,1,3,3\0" + 64 hex digits + "\n"

**Trees.** A tree has two parts: JSON that describes it, and its tensors by name in the safetensors
format. Between processes of one machine (Handoff) JSON goes over a socket pair, and tensors through
shared memory whose file descriptor goes along: no limit on size, and nothing is left in /dev/shm
after a crash. Between machines `dump_message` and `load_message` make bytes of a small tree.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import socket
import struct
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor


def tensor_line(name: str, tensor: torch.Tensor) -> str:
    """Return the part of the hash's input for one tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = ",".join(map(str, tensor.shape))
    content = hashlib.sha256(_little_endian_bytes(tensor)).hexdigest()
    return f"{name}\0{dtype}\0{shape}\0{content}\n"


def renamed_line(line: str, name: str) -> str:
    """Return a `tensor_line` for the same tensor under another name."""
    return name + line[line.index("\0") :]


def combine_digests(lines: Mapping[str, str]) -> str:
    """Return the hash of a model from its `tensor_line`s by name."""
    ordered = "".join(lines[name] for name in sorted(lines))
    return hashlib.sha256(ordered.encode()).hexdigest()


def parameters_sha256(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Return the hash of a state_dict of the unsplit model, as a run's summary shows it."""
    return combine_digests({name: tensor_line(name, tensor) for name, tensor in state_dict.items()})


SUMS = 64
"""Parts of a tensor that `checksum` adds up."""


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return what tells tensors from others of the same shapes, as fast as memory is read.

    That is the hash of sums, so it notices what training or another file changes, and not what
    somebody has chosen to have the same sums. A SHA-256 of the bytes takes ten times as long.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:  # else it cannot be viewed as wider numbers
            flat = flat.clone()
        whole = flat.numel() // 8 * 8
        # Sums of integers wrap around, so their order does not matter.
        sums = [int(part.sum()) for part in flat[:whole].view(torch.int64).chunk(SUMS)]
        text = f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0{sums}\0{flat[whole:].tolist()}\0"
        digest.update(text.encode())
    return digest.hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same dtype, shape and bits, on any devices.

    Minus zero is not zero, and not-a-number equals itself.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [
        tensor.detach().to(one.device).contiguous().reshape(-1).view(torch.uint8)
        for tensor in (one, other)
    ]
    return torch.equal(*bits)


def _little_endian_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    data = flat.view(torch.uint8).numpy()
    if sys.byteorder == "big":
        data = data.reshape(-1, tensor.element_size())[:, ::-1]
    return data.tobytes()


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    safetensors.torch.save_file(_independent(tensors), path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path)


def _tensors_to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    data: bytes = safetensors.torch.save(_independent(tensors))
    return data


def _tensors_to_memory(tensors: Mapping[str, Tensor]) -> int:
    """Copy `tensors` to anonymous shared memory; return its file descriptor, to be closed.

    A memfd counts towards the processes' memory and needs no room in /dev/shm.
    """
    data = _tensors_to_bytes(tensors)
    fd = os.memfd_create("rpcmp-tensors")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def _tensors_from_memory(fd: int) -> dict[str, Tensor]:
    """Return copies of the tensors in shared memory; closes `fd`."""
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            return safetensors.torch.load(memory[:])
    finally:
        os.close(fd)


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous host copies: safetensors refuses tensors that share memory, as tied weights do."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


Spec = dict[str, Any]


def encode_tree(value: Any, tensors: MutableMapping[str, Tensor], name: str = "") -> Spec:
    """Describe `value` as JSON, and add its tensors to `tensors`.

    Args:
        value: tensors, dtypes, numbers, strings and None, in tuples, lists and dicts of these.
        tensors: gets each tensor, named by the keys that lead to it, joined with dots.
        name: prefix of these names.

    Raises:
        TypeError: a leaf is neither a tensor nor plain.
    """
    if isinstance(value, Tensor):
        name = name or "tensor"
        while name in tensors:  # the keys 1 and "1", or "a.b" and "b" in "a"
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = value.items()
        return {"dict": [[_plain(k), encode_tree(v, tensors, _join(name, k))] for k, v in items]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode_tree(v, tensors, _join(name, i)) for i, v in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"value": _plain(value)}


def decode_tree(spec: Spec, tensors: Mapping[str, Tensor]) -> Any:
    ((kind, content),) = spec.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: decode_tree(item, tensors) for key, item in content}
        case "tuple":
            return tuple(decode_tree(item, tensors) for item in content)
        case "list":
            return [decode_tree(item, tensors) for item in content]
        case "dtype":
            dtype = vars(torch).get(content)  # without torch's lazy imports
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{content!r} is no dtype of torch")
            return dtype
    return content


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is neither a tensor nor a plain value")


_HEADER = struct.Struct("!Q")


def dump_message(message: Any) -> bytes:
    """Return the bytes of a tree of tensors, numbers, strings and None."""
    tensors: dict[str, Tensor] = {}
    data = json.dumps(encode_tree(message, tensors)).encode()
    return _HEADER.pack(len(data)) + data + _tensors_to_bytes(tensors)


def load_message(message: bytes) -> Any:
    (size,) = _HEADER.unpack_from(message)
    end = _HEADER.size + size
    return decode_tree(
        json.loads(message[_HEADER.size : end]), safetensors.torch.load(message[end:])
    )


class Handoff:
    """One end of a Unix stream socket, which it closes.

    Messages are trees of tensors, numbers, strings and None.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Any) -> None:
        """Send one message; raises OSError if the other end is closed."""
        tensors: dict[str, Tensor] = {}
        data = json.dumps(encode_tree(message, tensors)).encode()
        fds = [_tensors_to_memory(tensors)] if tensors else []
        try:
            socket.send_fds(self._socket, [_HEADER.pack(len(data))], fds)
            self._socket.sendall(data)
        finally:
            for fd in fds:
                os.close(fd)

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            EOFError: the other end is closed.
            OSError: this process may open no more files; the message is lost.
        """
        header, fds, flags, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
        if flags & socket.MSG_CTRUNC:  # the kernel has dropped the descriptor, and says no more
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            header += self._read(_HEADER.size - len(header))
            (size,) = _HEADER.unpack(header)
            data = self._read(size)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        tensors = _tensors_from_memory(fds[0]) if fds else {}
        return decode_tree(json.loads(data), tensors)

    def close(self) -> None:
        """Close this end; wakes up threads that receive at either end."""
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
