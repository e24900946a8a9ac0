"""Pickles in a message from another host: the functions that it may name, and its tensors.

torch's messages carry Python's pickle, and torch does not check the caller. So a server reads the
pickle before its worker does, with inert stand-ins for everything that it names, and refuses what
the sender has no business with: a stage asks others for outputs, sums and missing gradients, and
the driver for samples. Only the driver does the rest.

The worker's own unpickler, `rpcmp.rpc.unpickler`, decides about everything else that is named.

Both allocate memory as a pickle tells them to: ten bytes that memoize something under a large
number make Python reserve gigabytes, and a megabyte of empty lists takes a hundred. So a pickle has
to consist of what Python's pickler writes today (protocol 4), which numbers its memo by itself, and
must not have too many operations. Nothing is hashed while a server reads: keys that collide would
take it hours, and a tuple a hundred thousand levels deep overflows the stack of the interpreter.

A second pickle, of torch's own, lists the tensors. It has to have the one form that torch writes,
and each tensor has to lie within its memory.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from rpcmp.config.topology import DRIVER
from rpcmp.net.rpc_format import INT_BYTES, LENGTH, FormatError, pickled_int

_FUNCTIONS = {
    "rpcmp.rpc.transport",
    "rpcmp.worker.stage",
    "rpcmp.worker.optimizer",
    "rpcmp.data.batch_server",
}
"""Modules whose functions and methods messages name."""

STAGES_CALL = {
    ("rpcmp.rpc.transport", "_dispatch"),
    ("rpcmp.worker.stage", "Stage.forward"),
    ("rpcmp.worker.stage", "Stage.mark_none_gradients"),
    ("rpcmp.worker.stage", "Stage.gradient_part"),
    ("rpcmp.worker.stage", "Stage.get_tensors"),
    ("rpcmp.worker.stage", "Stage.gradient_total"),
    ("rpcmp.data.batch_server", "BatchServer.slices"),
}
"""Functions that a stage may call, on other stages and on the driver."""

MAX_OPERATIONS = 2**20
"""Per pickle. The largest are samples of a data set that gives no tensors, and traces."""

_RUN_LENGTH = 64

_PLAIN = rb"[N\x88\x89\]ae)\x85-\x87tsu\x90(01\x94\x93Rb\x81]"
_FIXED = rb"[Kh].|M..|[Jj].{4}|G.{8}|\x80[\x02-\x05]"
_SHORT = b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(256))
_RUN = re.compile(
    rb"(?:%b|%b|[\x8cC\x8a](?:%b)){1,%d}+" % (_PLAIN, _FIXED, _SHORT, _RUN_LENGTH), re.DOTALL
)
"""Operations without arguments, with arguments of fixed length, and with a length of one byte."""

_UNHASHED = {b"}": b"NQ", b"\x8f": b"NQ", b"\x91": b"t"}
"""Operations that make dicts and sets, and what stands in for them: an object that ignores what it
gets (`persistent_load` of None), and a tuple."""

FRAME = b"\x95"
"""Tells how many bytes to read at once; 8 bytes with their number follow."""

_LONG = {b"X": 4, b"B": 4, b"\x8b": 4, b"\x8d": 8, b"\x8e": 8, b"\x96": 8}
"""Operations with long arguments, and the number of bytes of their lengths."""


def require(data: bytes, peer: str, is_call: bool) -> None:
    """Refuse a pickle that names a function which `peer` may not call; an answer may name none."""
    reader = _Reader(io.BytesIO(_bounded(data)))
    try:
        reader.load()
    except FormatError:
        raise
    except Exception as error:  # unpickling raises whatever it stumbles over
        raise FormatError(f"a pickle that cannot be read ({type(error).__name__})") from error
    for module, name in reader.functions:
        if not is_call:
            raise FormatError(f"an answer that names the function {module}.{name}")
        if peer != DRIVER and (module, name) not in STAGES_CALL:
            raise FormatError(f"a call of {module}.{name}, which only the driver may make")


def _bounded(data: bytes) -> bytes:
    """Return a pickle without what is hashed.

    Raises:
        FormatError: it would make its reader take far more memory than it has bytes.
    """
    at = operations = 0
    changes: list[tuple[int, int, bytes]] = []
    while (code := data[at : at + 1]) != b".":
        begin = at
        if (size := _LONG.get(code)) is not None:
            at += 1 + size + int.from_bytes(data[at + 1 : at + 1 + size], "little")
            if at > len(data):  # by up to 2^64, more than a position in bytes can be
                raise FormatError("a pickle with an argument that goes on behind its end")
        elif (run := _RUN.match(data, at)) is not None:
            at = run.end()
        elif (instead := _UNHASHED.get(code)) is not None:
            at += 1
            changes.append((begin, at, instead))
        elif code == FRAME:
            at += 9
            changes.append((begin, at, b""))
        else:
            raise FormatError("a pickle with what Python's pickler does not write")
        operations += min(at - begin, _RUN_LENGTH)  # or less: some have arguments
        if operations > MAX_OPERATIONS:
            raise FormatError(f"a pickle of more than {MAX_OPERATIONS:,} operations")
    if at + 1 != len(data):
        raise FormatError("a pickle that goes on behind its end")
    return _changed(data, changes) if any(instead for _, _, instead in changes) else data


def _changed(data: bytes, changes: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Return data with some parts replaced; without frames, whose lengths would be others."""
    parts, copied = [], 0
    for begin, end, instead in changes:
        parts += [data[copied:begin], instead]
        copied = end
    return b"".join((*parts, data[copied:]))


class _Reader(pickle.Unpickler):
    """Reads a pickle without importing or running anything."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.functions: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> type:
        """Return the stand-in for a name; functions start with "_", methods contain a dot."""
        if module in _FUNCTIONS and ("." in name or name.startswith("_")):
            self.functions.append((module, name))
            return _Function
        return _Data

    def persistent_load(self, pid: object) -> _Data:
        """Return what stands in for a dict or set; a message itself has no such operation."""
        return _Data()


class _Unchanged(type):
    """Base of stand-ins: a pickle may change what it names, and this process reads many."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise FormatError(f"a pickle that changes {name!r} of what it names")


class _Function(metaclass=_Unchanged):
    """Stand-in for a function: an argument, never called or changed while the message is read."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Function:
        raise FormatError("a function that is called by the pickle itself")


class _Data(metaclass=_Unchanged):
    """Stand-in for a class and its instances: accepts everything, and keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Data:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Data:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def _ignore(self, item: object) -> None:
        pass

    # With one argument: if the pickle builds or extends the class itself, the call fails.
    __setstate__ = append = extend = add = _ignore


CACHED = 16 * 1024
"""Bytes of a tensor list up to which its check is cached: each micro-batch has the same."""

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
    """Return how many tensors are in torch's pickle of a list of them.

    `lengths` are the bytes of the storages that come with it; several tensors may share one. Raises
    FormatError if torch writes no such list, or a tensor does not lie within its storage.
    """
    count = _cached_count if len(pickle) <= CACHED else _count_tensors
    return count(pickle, tuple(lengths))


def _count_tensors(pickle: bytes, lengths: tuple[int, ...]) -> int:
    try:
        return _TensorList(pickle, lengths).read()
    except (IndexError, UnicodeDecodeError) as error:
        raise FormatError(f"a list of tensors that makes no sense: {error}") from error


_cached_count = lru_cache(maxsize=256)(_count_tensors)


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
        num_bytes = num_items * ITEM_BYTES[kind]
        self._require(self._lengths[self._storages] == num_bytes, "a storage of another size")
        self._expect(b"tQ")
        storage = num_items, kind.removesuffix("Storage") not in _WHOLE
        self._remember(storage)
        self._storages += 1
        return storage

    def _shared(self) -> object:
        """Read a string or global, which is written once and referred to afterwards."""
        code = self._take(1)
        if code == b"h":
            return self._memo[self._take(1)[0]]
        if code == b"j":
            return self._memo[LENGTH.unpack(self._take(4))[0]]
        if code == b"X":
            value = self._take(LENGTH.unpack(self._take(4))[0]).decode()
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
        number = self._take(1)[0] if code == b"q" else LENGTH.unpack(self._take(4))[0]
        self._require(number == len(self._memo), "something remembered out of order")
        self._memo.append(value)

    def _ints(self) -> list[int]:
        self._expect(b"(")
        numbers = []
        while self._data[self._at : self._at + 1] != b"t":
            numbers.append(self._int())
        self._expect(b"t")
        return numbers

    def _int(self) -> int:
        size = INT_BYTES.get(self._data[self._at : self._at + 1], 0)
        self._require(size > 0, "no integer")
        return pickled_int(self._take(size))

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
