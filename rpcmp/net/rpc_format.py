"""Forms that TensorPipe's frames and torch RPC's messages from another host may have.

torch RPC accepts more than this protocol needs. A `SCRIPT_CALL` runs any of some 4,000 operators,
`aten::from_file` among them, and never passes the unpickler of `rpcmp.rpc.unpickler`; C++ parses
pickles of its own; a tensor's strides may point outside of its memory. So the supervisor reads each
message before its worker does, and passes only messages that match, byte for byte, one of the few
forms that torch gives to rpcmp's own:

    type     4 bytes   PYTHON_CALL, PYTHON_RET, ...: the tables below
    id       8 bytes
    payload            Python's pickle, guarded by `rpcmp.rpc.unpickler`; torch's ids around it
    tensors            a pickle of the tensors' shapes; their bytes travel by another connection

Forms as in torch 2.13: tensorpipe_utils.cpp and message.h of torch/csrc/distributed/rpc,
torch/csrc/jit/serialization/pickler.cpp. tests/unit/net/test_rpc_inspection.py compares them with
messages of torch. Nothing here imports torch: this runs in supervisors.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache


class FormatError(ValueError):
    """A message has another form than torch gives to what rpcmp sends."""


Check = Callable[[bytes, int], bytes | None]
"""Takes a payload and its number of tensors; returns the Python pickle in it, empty if there is
none. Returns None if the payload does not have the form of its type.
"""

NAMES = {
    0x100: "SCRIPT_CALL",
    0x102: "PYTHON_CALL",
    0x104: "SCRIPT_REMOTE_CALL",
    0x105: "PYTHON_REMOTE_CALL",
    0x107: "SCRIPT_RREF_FETCH_CALL",
    0x108: "PYTHON_RREF_FETCH_CALL",
    0x10B: "RREF_USER_DELETE",
    0x10C: "RREF_FORK_REQUEST",
    0x10D: "RREF_CHILD_ACCEPT",
    0x10F: "FORWARD_AUTOGRAD_REQ",
    0x111: "BACKWARD_AUTOGRAD_REQ",
    0x113: "CLEANUP_AUTOGRAD_CONTEXT_REQ",
    0x115: "RUN_WITH_PROFILING_REQ",
    0x117: "RREF_BACKWARD_REQ",
    0x201: "SCRIPT_RET",
    0x203: "PYTHON_RET",
    0x206: "REMOTE_RET",
    0x209: "SCRIPT_RREF_FETCH_RET",
    0x20A: "PYTHON_RREF_FETCH_RET",
    0x20E: "RREF_ACK",
    0x210: "FORWARD_AUTOGRAD_RESP",
    0x212: "BACKWARD_AUTOGRAD_RESP",
    0x214: "CLEANUP_AUTOGRAD_CONTEXT_RESP",
    0x216: "RUN_WITH_PROFILING_RESP",
    0x218: "RREF_BACKWARD_RESP",
    0x237: "EXCEPTION",
}
"""All of torch's types of messages, for errors and tests."""

MAX_EXCEPTION = 2**20
"""Bytes of an error's text."""

# Integers in a pickle of torch's, and pairs of them: the ids of references.
_INT = rb"(?:K.|M..|J.{4}|\x8a\x08.{8})"
_PAIR = _INT + _INT + rb"\x86q"
_TYPE_TAG = re.escape(
    b"ctorch.jit._pickle\nrestore_type_tag\nq\x00}(u"
    b"X\x0e\x00\x00\x00Dict[str, str]q\x01\x86Rq\x02t."
)
_TENSOR_ID = re.escape(b"ctorch.jit._pickle\nbuild_tensor_from_id\nq\x00")


def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


_TWO_IDS = _compiled(rb"\x80\x02" + _PAIR + rb"\x00" + _PAIR + rb"\x01\x86\.")
_ONE_ID = _compiled(rb"\x80\x02" + _PAIR + rb"\x00\x85\.")
_CONTEXT = _compiled(rb"\x80\x02" + _INT + rb"\.")
_REMOTE = _compiled(rb"q\x00" + _PAIR + rb"\x01" + _PAIR + rb"\x02[\x88\x89]t\.")
_AUTOGRAD = _compiled(rb"\x80\x02\((" + _INT + rb")" + _INT + _INT + _INT + _TYPE_TAG)
_GRADIENTS = _compiled(
    rb"\x80\x02\(((?:(?:" + _TENSOR_ID + rb"|h\x00)\(" + _INT + rb"tR(?:q.|r.{4}))*)"
    rb"" + _INT + _INT + rb"[\x88\x89]t\."
)
_GRADIENT = _compiled(rb"(" + _TENSOR_ID + rb"|h\x00)\((" + _INT + rb")tR(q.|r.{4})")

# Of TensorPipe, encoded by libnop.
_NOP_INT = rb"([\x00-\x7f]|\x80.|\x81..|\x82.{4}|\x83.{8})"
_CPU = rb"\xb9\x02\xbd\x03cpu\x00"

SPONTANEOUS = _compiled(rb"\xb8\x00\xb9\x01\xbd" + _NOP_INT + rb"(.*)")
REQUESTED = _compiled(rb"\xb8\x01\xb9\x01" + _NOP_INT)
ANSWER = _compiled(
    rb"\xb9\x07\xbd\x02uv\xbd([\x00-\x7f])(.*)\xbb\x01\x01" + _NOP_INT + rb"\xbd\x04uv:\*"
    rb"\xbb\x01\xbd\x05basic\xbc\x08(.{8})"
    rb"\xbb\x01\xbd\x05basic\xbb\x01" + _CPU + rb"\xbd\x03any"
    rb"\xbb\x01\xba\x02" + _CPU + _CPU + rb"\xbd\x05basic"
)
_DESCRIPTOR = _compiled(
    rb"\xb9\x03\xbd\x00\xba\x04\xb9\x02\x04\xbd\x00\xb9\x02\x08\xbd\x00"
    rb"\xb9\x02" + _NOP_INT + rb"\xbd\x00\xb9\x02" + _NOP_INT + rb"\xbd\x00\xba" + _NOP_INT
)
_TENSOR = _compiled(rb"\xb9\x04" + _NOP_INT + _CPU + _CPU + rb"\xbd\x00")

BROCHURE_START = b"\xb9\x02\xbb\x01\xbd\x02uv\xbd\x04uv:*\xbb"
BROCHURE = BROCHURE_START + b"\x01\xbd\x05basic\xbb\x01\xb9\x02\xbd\x03cpu\x00\xbd\x03any"
"""Replaces each brochure: only the transport "uv" and the channel "basic"."""

LENGTH = struct.Struct("<I")
_TAIL = struct.Struct(">q")


def _empty(payload: bytes, num_tensors: int) -> bytes | None:
    return None if payload or num_tensors else b""


def _call(payload: bytes, num_tensors: int) -> bytes | None:
    """A flag, asynchronous or not, and Python's pickle of function and arguments."""
    return _python(payload[1:], num_tensors) if payload[:1] in (b"\0", b"\1") else None


def _python(payload: bytes, num_tensors: int) -> bytes | None:
    return payload if payload[:1] == b"\x80" and payload[-1:] == b"." else None


def _remote_call(payload: bytes, num_tensors: int) -> bytes | None:
    if payload[:4] != b"\x80\x02(X" or len(payload) < 8:
        return None
    (length,) = LENGTH.unpack_from(payload, 4)
    call, rest = payload[8 : 8 + length], payload[8 + length :]
    return _python(call, num_tensors) if _REMOTE.fullmatch(rest) else None


def _matching(pattern: re.Pattern[bytes]) -> Check:
    return lambda payload, num_tensors: (
        b"" if not num_tensors and pattern.fullmatch(payload) else None
    )


def _with_autograd(wrapped: int, check: Check) -> Check:
    """Return the check of a message that wraps another: its bytes, torch's ids, their length."""

    def inner(payload: bytes, num_tensors: int) -> bytes | None:
        end = len(payload) - _TAIL.size
        if end < 0:
            return None
        (length,) = _TAIL.unpack_from(payload, end)
        begin = end - length
        if length <= 0 or begin < 0:
            return None
        ids = _AUTOGRAD.fullmatch(payload, begin, end)
        if ids is None or pickled_int(ids[1]) != wrapped:
            return None
        return check(payload[:begin], num_tensors)

    return inner


def _gradients(payload: bytes, num_tensors: int) -> bytes | None:
    gradients = _GRADIENTS.fullmatch(payload)
    if gradients is None:
        return None
    for number, gradient in enumerate(_GRADIENT.finditer(gradients[1]), 1):
        # The global stands before the first, and the others refer to it. The memo is numbered
        # without gaps, which C++ would fill.
        remembered = int.from_bytes(gradient[3][1:], "little")
        if (gradient[1][:1] == b"c") != (number == 1) or remembered != number:
            return None
        if not 0 <= pickled_int(gradient[2]) < num_tensors:
            return None
    return b""


def _exception(payload: bytes, num_tensors: int) -> bytes | None:
    return b"" if len(payload) <= MAX_EXCEPTION and not num_tensors else None


FROM_STAGES: dict[int, Check] = {
    0x102: _call,
    0x10D: _matching(_ONE_ID),
    0x10F: _with_autograd(0x102, _call),
    0x111: _gradients,
    0x113: _matching(_CONTEXT),
}
"""Requests that a stage may make."""

REQUESTS: dict[int, Check] = {**FROM_STAGES, 0x105: _remote_call, 0x10B: _matching(_TWO_IDS)}
"""Requests that the driver may make: only the driver has references."""

RESPONSES: dict[int, Check] = {
    0x203: _python,
    0x206: _matching(_TWO_IDS),
    0x20E: _empty,
    0x210: _with_autograd(0x203, _python),
    0x212: _empty,
    0x214: _empty,
    0x237: _exception,
}
"""Responses of any peer."""

EXCEPTION = 0x237

ANSWERS = {
    0x102: {0x203},
    0x105: {0x206},
    0x10B: {0x20E},
    0x10D: {0x20E},
    0x10F: {0x210, 0x203},  # the latter if it has nothing to differentiate, such as an error
    0x111: {0x212},
    0x113: {0x214},
}
"""Types of the responses to each request, besides an exception."""


def name_of(kind: int) -> str:
    return NAMES.get(kind, f"unknown type {kind:#x}")


def require(kinds: dict[int, Check], kind: int, payload: bytes, num_tensors: int) -> bytes:
    """Refuse a message that is not one of `kinds`; return the Python pickle in it, or empty bytes.

    `kinds` are FROM_STAGES, REQUESTS or RESPONSES.
    """
    if (check := kinds.get(kind)) is None:
        raise FormatError(f"a message of type {name_of(kind)}")
    if (pickle := check(payload, num_tensors)) is None:
        raise FormatError(f"{name_of(kind)} with a payload of another form than torch gives it")
    return pickle


INT_BYTES = {b"K": 2, b"M": 3, b"J": 5, b"\x8a": 10}


def pickled_int(token: bytes) -> int:
    """Return an integer of a pickle, given with its code."""
    if token[:1] == b"\x8a":
        if token[1] != 8:
            raise FormatError("an integer of another length")
        return int.from_bytes(token[2:], "little", signed=True)
    return int.from_bytes(token[1:], "little", signed=token[:1] == b"J")


CACHED_DESCRIPTOR = 4096
"""Bytes of a descriptor up to which its parse is cached: each micro-batch has the same."""


def answer_from(answer: re.Match[bytes], address: str) -> bytes:
    """Return a match of ANSWER with another address to dial, of at most 127 bytes."""
    frame, dialled = answer[0], address.encode()
    return frame[: answer.start(1)] + bytes([len(dialled)]) + dialled + frame[answer.end(2) :]


def parse_descriptor(frame: bytes) -> tuple[int, int, tuple[int, ...]] | None:
    """Return the bytes of a message's payload, tensor list, and tensors; None if malformed."""
    parse = _cached_descriptor if len(frame) <= CACHED_DESCRIPTOR else _parse_descriptor
    return parse(frame)


def _parse_descriptor(frame: bytes) -> tuple[int, int, tuple[int, ...]] | None:
    head = _DESCRIPTOR.match(frame)
    if head is None:
        return None
    payload_bytes, list_bytes, count = (nop_int(head[index]) for index in (1, 2, 3))
    lengths, at = [], head.end()
    while (tensor := _TENSOR.match(frame, at)) is not None:
        lengths.append(nop_int(tensor[1]))
        at = tensor.end()
    if at != len(frame) or count != len(lengths):
        return None
    return payload_bytes, list_bytes, tuple(lengths)


_cached_descriptor = lru_cache(maxsize=256)(_parse_descriptor)


def nop_int(encoded: bytes) -> int:
    """Return an unsigned integer of libnop's, of one byte or of a code and more bytes."""
    return encoded[0] if len(encoded) == 1 else int.from_bytes(encoded[1:], "little")
