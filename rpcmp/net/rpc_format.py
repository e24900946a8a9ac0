"""Forms that a message of torch RPC from another host may have.

torch RPC accepts more than this protocol needs. A `SCRIPT_CALL` runs any of some 4,000 operators,
`aten::from_file` among them, and never passes the unpickler of `rpcmp.rpc.unpickler`; C++ parses
pickles of its own; a tensor's strides may point outside of its memory. So the supervisor reads each
message before its worker does, and passes only messages that match, byte for byte, one of the few
forms that torch gives to rpcmp's own:

    type     4 bytes   PYTHON_CALL, PYTHON_RET, ...: the tables below
    id       8 bytes
    payload            Python's pickle, guarded by `rpcmp.rpc.unpickler`; torch's ids around it
    tensors            a pickle of the tensors' shapes; their bytes travel by another connection

The forms are those of torch 2.13: tensorpipe_utils.cpp and message.h of torch/csrc/distributed/rpc,
torch/csrc/jit/serialization/pickler.cpp. tests/unit/net/test_rpc_inspection.py compares them with
messages of torch. Nothing here imports torch: this runs in supervisors.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
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

CACHED = 16 * 1024
"""Bytes of a tensor list up to which its check is cached: each micro-batch has the same."""

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

_LENGTH = struct.Struct("<I")
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
    (length,) = _LENGTH.unpack_from(payload, 4)
    call, rest = payload[8 : 8 + length], payload[8 + length :]
    return _python(call, num_tensors) if _REMOTE.fullmatch(rest) else None


def _matching(pattern: re.Pattern[bytes]) -> Check:
    return lambda payload, num_tensors: (
        b"" if not num_tensors and pattern.fullmatch(payload) else None
    )


def _with_autograd(wrapped: int, check: Check) -> Check:
    """Return the check of a message that wraps another: its bytes, torch's ids, their length."""

    def inner(payload: bytes, num_tensors: int) -> bytes | None:
        if len(payload) < _TAIL.size:
            return None
        (length,) = _TAIL.unpack_from(payload, len(payload) - _TAIL.size)
        begin = len(payload) - _TAIL.size - length
        if length <= 0 or begin < 0:
            return None
        found = _AUTOGRAD.fullmatch(payload, begin, len(payload) - _TAIL.size)
        if found is None or _int(found[1]) != wrapped:
            return None
        return check(payload[:begin], num_tensors)

    return inner


def _gradients(payload: bytes, num_tensors: int) -> bytes | None:
    found = _GRADIENTS.fullmatch(payload)
    if found is None:
        return None
    for number, each in enumerate(_GRADIENT.finditer(found[1]), 1):
        # The global stands before the first, and the others refer to it; what is remembered is
        # numbered without gaps, which C++ would fill.
        remembered = int.from_bytes(each[3][1:], "little")
        if (each[1][:1] == b"c") != (number == 1) or remembered != number:
            return None
        if not 0 <= _int(each[2]) < num_tensors:
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
    """Return torch's name of a message type."""
    return NAMES.get(kind, f"unknown type {kind:#x}")


def require(kinds: dict[int, Check], kind: int, payload: bytes, num_tensors: int) -> bytes:
    """Refuse a message that is not one of `kinds`; return the Python pickle in it, or empty bytes.

    Args:
        kinds: FROM_STAGES, REQUESTS or RESPONSES.
        kind: the message's type.
        payload: torch's payload.
        num_tensors: how many tensors come with it.

    Raises:
        FormatError: it has another type, or its payload another form.
    """
    if (check := kinds.get(kind)) is None:
        raise FormatError(f"a message of type {name_of(kind)}")
    if (pickle := check(payload, num_tensors)) is None:
        raise FormatError(f"{name_of(kind)} with a payload of another form than torch gives it")
    return pickle


ITEM_BYTES = {
    "FloatStorage": 4,
    "DoubleStorage": 8,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "LongStorage": 8,
    "IntStorage": 4,
    "ShortStorage": 2,
    "CharStorage": 1,
    "ByteStorage": 1,
    "BoolStorage": 1,
    "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
    "ComplexHalfStorage": 4,
    "UInt16Storage": 2,
    "UInt32Storage": 4,
    "UInt64Storage": 8,
    "Float8_e5m2Storage": 1,
    "Float8_e4m3fnStorage": 1,
    "Float8_e5m2fnuzStorage": 1,
    "Float8_e4m3fnuzStorage": 1,
    "Float8_e8m0fnuStorage": 1,
}
"""By the names that torch's pickler has for dtypes."""

_WHOLE = {"Long", "Int", "Short", "Char", "Byte", "Bool", "UInt16", "UInt32", "UInt64"}
"""Types that have no gradients."""

MAX_DIMENSIONS = 64

MAX_ITEMS = 2**40
"""Of a tensor, not counting empty dimensions: torch fails, and ends the process, on overflow."""


def count_tensors(pickle: bytes, lengths: Sequence[int]) -> int:
    """Return how many tensors a message has; several may share a storage.

    Args:
        pickle: torch's pickle of the list.
        lengths: bytes of each storage that comes with it.

    Raises:
        FormatError: torch writes no such list, or a tensor does not lie within its storage.
    """
    count = _remembered if len(pickle) <= CACHED else _count_tensors
    return count(pickle, tuple(lengths))


def _count_tensors(pickle: bytes, lengths: tuple[int, ...]) -> int:
    try:
        return _TensorList(pickle, lengths).read()
    except (IndexError, UnicodeDecodeError) as error:
        raise FormatError(f"a list of tensors that makes no sense: {error}") from error


_remembered = lru_cache(maxsize=256)(_count_tensors)


class _TensorList:
    """Reads the one form that torch's pickler has for a list of dense CPU tensors."""

    def __init__(self, pickle: bytes, lengths: tuple[int, ...]) -> None:
        self._data, self._at = pickle, 0
        self._lengths = lengths
        self._memo: list[object] = []
        self._storages = 0

    def read(self) -> int:
        count = 0
        self._expect(b"\x80\x02")
        self._require(self._shared() == "torch.jit._pickle.build_tensorlist", "no tensor list")
        self._expect(b"(](")
        while self._data[self._at : self._at + 1] != b"e":
            self._tensor()
            count += 1
        self._expect(b"etR.")
        self._require(self._at == len(self._data), "more after its end")
        self._require(self._storages == len(self._lengths), "storages that no tensor has")
        return count

    def _tensor(self) -> None:
        self._require(self._shared() == "torch._utils._rebuild_tensor_v2", "no dense tensor")
        self._expect(b"(")
        num_items, has_gradients = self._storage()
        offset = self._int()
        sizes, strides = self._ints(), self._ints()
        self._require(not self._flag() or has_gradients, "a gradient of integers")
        self._require(self._shared() == "collections.OrderedDict", "hooks")
        self._expect(b")RtR")
        self._remember(None)
        self._require(len(sizes) == len(strides) <= MAX_DIMENSIONS, "sizes without strides")
        self._require(min(offset, *sizes, *strides, 0) == 0, "a negative size or stride")
        all_items = math.prod(max(size, 1) for size in sizes)
        self._require(all_items <= MAX_ITEMS, "a tensor of too many items")
        if all(sizes):
            pairs = zip(sizes, strides, strict=True)
            last = offset + sum((size - 1) * stride for size, stride in pairs)
            self._require(last < num_items, "a tensor that reaches beyond its memory")

    def _storage(self) -> tuple[int, bool]:
        """Return a storage's number of items, and whether these may have gradients."""
        if self._data[self._at : self._at + 1] in (b"h", b"j"):
            shared = self._shared()
            self._require(isinstance(shared, tuple), "no storage")
            assert isinstance(shared, tuple)
            return shared
        self._expect(b"(")
        self._require(self._shared() == "storage", "no storage")
        kind = str(self._shared()).removeprefix("torch.")
        self._require(kind in ITEM_BYTES, f"a storage of type {kind}")
        self._require(self._shared() == str(self._storages), "storages out of order")
        self._require(self._storages < len(self._lengths), "more storages than there are")
        self._require(self._shared() == "cpu", "a storage on another device")
        num_items = self._int()
        whole = self._lengths[self._storages] == num_items * ITEM_BYTES[kind]
        self._require(whole, "a storage of another size")
        self._expect(b"tQ")
        found = num_items, kind.removesuffix("Storage") not in _WHOLE
        self._remember(found)
        self._storages += 1
        return found

    def _shared(self) -> object:
        """Read a string or global, which is written once and referred to afterwards."""
        code = self._take(1)
        if code == b"h":
            return self._memo[self._take(1)[0]]
        if code == b"j":
            return self._memo[_LENGTH.unpack(self._take(4))[0]]
        if code == b"X":
            value = self._take(_LENGTH.unpack(self._take(4))[0]).decode()
        else:
            self._require(code == b"c", "something else than a name")
            value = f"{self._line()}.{self._line()}"
        self._remember(value)
        return value

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        self._require(end >= 0, "a name without an end")
        line, self._at = self._data[self._at : end], end + 1
        return line.decode()

    def _remember(self, value: object) -> None:
        """Check that the pickler numbers its memo without gaps: C++ would fill a gap."""
        code = self._take(1)
        self._require(code in (b"q", b"r"), "something that is not remembered")
        number = self._take(1)[0] if code == b"q" else _LENGTH.unpack(self._take(4))[0]
        self._require(number == len(self._memo), "something remembered out of order")
        self._memo.append(value)

    def _ints(self) -> list[int]:
        self._expect(b"(")
        found = []
        while self._data[self._at : self._at + 1] != b"t":
            found.append(self._int())
        self._expect(b"t")
        return found

    def _int(self) -> int:
        size = _INT_BYTES.get(self._data[self._at : self._at + 1], 0)
        self._require(size > 0, "no integer")
        return _int(self._take(size))

    def _flag(self) -> bool:
        code = self._take(1)
        self._require(code in (b"\x88", b"\x89"), "no flag")
        return code == b"\x88"

    def _expect(self, literal: bytes) -> None:
        self._require(self._take(len(literal)) == literal, f"no {literal!r}")

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        self._require(len(taken) == count, "it is cut off")
        self._at += count
        return taken

    def _require(self, condition: bool, why: str) -> None:
        if not condition:
            raise FormatError(f"a list of tensors of another form: {why}, at byte {self._at}")


_INT_BYTES = {b"K": 2, b"M": 3, b"J": 5, b"\x8a": 10}


def _int(token: bytes) -> int:
    """Return an integer of a pickle, given with its code."""
    if token[:1] == b"\x8a":
        if token[1] != 8:
            raise FormatError("an integer of another length")
        return int.from_bytes(token[2:], "little", signed=True)
    return int.from_bytes(token[1:], "little", signed=token[:1] == b"J")
