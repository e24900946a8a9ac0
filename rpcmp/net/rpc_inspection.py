"""Inspection of data from another host for our worker's torch RPC agent.

TensorPipe trusts its peers. It copies the bytes of a frame into a buffer of the size that was
announced before, whatever the frame's length; it reads other processes' memory if a peer asks for
that ("cma"); and it hands every type of message to torch. So the supervisor's relay reads along,
and ends a connection before anything outside of the protocol reaches the worker.

An agent opens a pipe to each peer, of several connections. Every write on them is a frame: its
length in eight bytes, then its content.

    descriptor   ──hello──brochure──> <──answer──     then, requests one way, responses the other:
                 message = descriptor, type, id, payload, tensor list
    channel      ──hello, with a number from the answer──>     then the tensors' bytes, both ways
    reply        ──hello, likewise──>                          never used: devices are all CPU

Brochures are replaced by one that offers the channel "basic" over sockets and nothing else. An
answer's address, where the next connections are to be opened, is replaced by the one that the
worker has dialled: that of its relay. The tensors' frames have to be as long as the message has
announced. The formats come from tensorpipe/core/pipe_impl.cc and nop_types.h, encoded by libnop;
for the contents of messages see `rpcmp.net.rpc_format`.
"""

from __future__ import annotations

import platform
import re
import struct
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator

from rpcmp.config.topology import DRIVER
from rpcmp.errors import SecurityError
from rpcmp.net import rpc_format, rpc_pickle
from rpcmp.process.resources import free_memory

MAX_NAME = 4096
"""Bytes of a frame before a pipe is established."""

MAX_DESCRIPTOR = 2**19
"""Bytes of a message's descriptor, which has some 25 per tensor."""

MAX_LIST = 2**20
"""Bytes of a list of tensors, which has some 70 per tensor."""

MAX_PAYLOAD = 64 * 2**20
"""Bytes of a message without its tensors, such as the spans of a whole trace."""

MAX_HELD = 96 * 2**20
"""Bytes of unfinished messages of one peer, on all of its connections."""

LARGE = 64 * 2**20
"""Bytes of a message's tensors from which on there has to be memory for them."""

MAX_AHEAD = 2**20
"""Tensors that were announced and have not arrived."""

MAX_ENDED = 4096
"""Connections of pipes that have ended, and that may still be under way."""

_LENGTH = struct.Struct("<Q")

Steps = Generator[None, None, None]

Key = tuple[bool, str, int]
"""Of a further connection: whether we opened its pipe, its peer, and the number in the answer."""


class Frames:
    """The short frames of a stream, and their numbers."""

    def __init__(self) -> None:
        self._unfinished = bytearray()
        self._skip = 0  # bytes of a frame that is too long to be of interest
        self._number = 0

    def read(self, data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
        """Yield the short frames that end in `data`, with their numbers."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        self._unfinished += data[skipped:]
        while len(self._unfinished) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unfinished)
            end = _LENGTH.size + length
            if length > MAX_NAME:
                self._skip = max(0, end - len(self._unfinished))
            elif len(self._unfinished) < end:
                return
            else:
                yield self._number, bytes(self._unfinished[_LENGTH.size : end])
            del self._unfinished[:end]
            self._number += 1


class Lengths:
    """Lengths of the tensors that one side of a pipe has announced, and that have not arrived.

    Attributes:
        size: their sum, in bytes.
    """

    def __init__(self) -> None:
        self._announced: deque[int] = deque()
        self.size = 0
        self.arrived: Callable[[], None] = lambda: None

    def announce(self, lengths: tuple[int, ...]) -> bool:
        """Add the tensors of a message; return False if there are too many."""
        self._announced.extend(length for length in lengths if length)  # no frame for an empty one
        self.size += sum(lengths)
        self.arrived()
        return len(self._announced) <= MAX_AHEAD

    def next(self) -> int | None:
        """Return the length of the next tensor; None if it is not announced yet."""
        if not self._announced:
            return None
        length = self._announced.popleft()
        self.size -= length
        return length


class Pipes:
    """The pipes between one worker and its peers in other networks.

    Args:
        on_refused: called with the error as soon as a peer sends what it must not.
    """

    def __init__(self, on_refused: Callable[[SecurityError], None]) -> None:
        self.on_refused = on_refused
        self.channels: dict[Key, Lengths | None] = {}  # None: the reply's
        self._ended: deque[Key] = deque(maxlen=MAX_ENDED)
        self._held: Counter[str] = Counter()

    def end(self, key: Key) -> None:
        """Forget a further connection of a pipe that has ended."""
        if key in self.channels:
            del self.channels[key]
            self._ended.append(key)

    def has_ended(self, key: Key) -> bool:
        """Return whether the pipe of a further connection was there, and has ended."""
        return key in self._ended

    def hold(self, peer: str, count: int) -> bool:
        """Count bytes of a peer that are held; return False if there are too many."""
        self._held[peer] += count
        return self._held[peer] <= MAX_HELD


class Inspection:
    """Inspects one connection.

    Args:
        pipes: of the worker.
        peer: RPC name of the member on the other side.
        label: its name in errors.
        listens: HOST:PORT of its agent, if our worker has opened the connection.
        dialled: HOST:PORT that our worker has connected to for that.

    Attributes:
        is_held: whether the data has to wait for another connection.
        resume: called when it does not have to wait any longer.
    """

    def __init__(
        self, pipes: Pipes, peer: str, label: str, listens: str = "", dialled: str = ""
    ) -> None:
        self._pipes, self._peer, self._label = pipes, peer, label
        self._listens, self._dialled = listens, dialled
        self._is_ours = bool(listens)
        self._buffer, self._at = bytearray(), 0
        self._passed = bytearray()
        self._body = 0  # bytes that are left of a tensor
        self._sent = Frames()  # by our worker
        self._asked: dict[bytes, int] = {}  # types of requests without an answer, by their ids
        self._kind = 0
        self._is_followed = True
        self._registered: list[Key] = []
        self._lengths: Lengths | None = None
        self.is_held = False
        self.resume: Callable[[], None] = lambda: None
        unasked = self._require_silence("an answer to nothing")
        self._steps = unasked if self._is_ours else self._hello()

    def sent(self, data: bytes | memoryview) -> bool:
        """Read data of our worker; return False once there is nothing more to learn from it."""
        if not self._is_followed:
            return False
        for number, frame in self._sent.read(data):
            if not number:
                self._first(frame)
            # After hello and brochure come messages of five frames; type and id are short.
            elif number % 5 == 3 and len(frame) == rpc_format.LENGTH.size:
                self._kind = rpc_format.LENGTH.unpack(frame)[0]
            elif number % 5 == 4 and len(frame) == _LENGTH.size:
                self._asked[frame] = self._kind
        return self._is_followed

    def received(self, data: bytes | memoryview) -> bytes | memoryview:
        """Take data of the peer; return the bytes that may pass to our worker now.

        Raises SecurityError if the data is not of the protocol; that has been reported.
        """
        if self._body and self._at == len(self._buffer):
            if len(data) <= self._body:
                self._body -= len(data)
                return data
            self._passed += data[: self._body]
            data, self._body = data[self._body :], 0
        before = len(self._buffer)
        self._buffer += data
        next(self._steps)
        del self._buffer[: self._at]
        self._at = 0
        if not self._pipes.hold(self._peer, len(self._buffer) - before):
            raise self._error(f"more than {MAX_HELD >> 20} MiB of unfinished messages")
        passed = bytes(self._passed)
        self._passed.clear()
        return passed

    def close(self) -> None:
        """Release everything of a connection that has ended."""
        for key in self._registered:
            self._pipes.end(key)
        if self._lengths is not None:
            self._lengths.arrived = lambda: None
        self._pipes.hold(self._peer, -len(self._buffer))
        self._buffer.clear()

    def _first(self, frame: bytes) -> None:
        self._is_followed = self._is_ours and rpc_format.SPONTANEOUS.fullmatch(frame) is not None
        if not self._is_ours:
            if (answer := rpc_format.ANSWER.fullmatch(frame)) is not None:
                self._register(answer)
        elif self._is_followed:
            self._steps = self._answer()
        elif (found := rpc_format.REQUESTED.fullmatch(frame)) is not None:
            self._steps = self._channel(rpc_format.nop_int(found[1]))

    # The peer's data, frame by frame.

    def _hello(self) -> Steps:
        frame = yield from self._frame(MAX_NAME)
        if (found := rpc_format.REQUESTED.fullmatch(frame)) is not None:
            self._pass(frame)
            yield from self._channel(rpc_format.nop_int(found[1]))
            return
        found = rpc_format.SPONTANEOUS.fullmatch(frame)
        name = self._peer.encode()
        if found is None or rpc_format.nop_int(found[1]) != len(name) or found[2] != name:
            raise self._error("a connection that says it is another's, or not what it is for")
        self._pass(frame)
        brochure = yield from self._frame(MAX_NAME)
        if not brochure.startswith(rpc_format.BROCHURE_START):
            raise self._error("a brochure of another transport")
        self._pass(rpc_format.BROCHURE)
        self._lengths = Lengths()
        kinds = rpc_format.REQUESTS if self._peer == DRIVER else rpc_format.FROM_STAGES
        yield from self._messages(kinds, self._lengths)

    def _answer(self) -> Steps:
        frame = yield from self._frame(MAX_NAME)
        answer = rpc_format.ANSWER.fullmatch(frame)
        listens = self._listens.encode()
        if answer is None or answer[2] != listens or rpc_format.nop_int(answer[1]) != len(listens):
            raise self._error("an answer that leads somewhere else")
        self._register(answer)
        self._pass(rpc_format.answer_from(answer, self._dialled))
        assert self._lengths is not None
        yield from self._messages(rpc_format.RESPONSES, self._lengths)

    def _register(self, answer: re.Match[bytes]) -> None:
        """Record the further connections of a pipe."""
        self._lengths = self._lengths or Lengths()
        for number, lengths in (
            (rpc_format.nop_int(answer[3]), None),
            (_LENGTH.unpack(answer[4])[0], self._lengths),
        ):
            key = (self._is_ours, self._peer, number)
            self._pipes.channels[key] = lengths
            self._registered.append(key)

    def _messages(self, kinds: dict[int, rpc_format.Check], announced: Lengths) -> Steps:
        while True:
            frame = yield from self._frame(MAX_DESCRIPTOR)
            described = rpc_format.parse_descriptor(frame)
            if described is None:
                raise self._error("a message with a descriptor of another form")
            payload_bytes, list_bytes, lengths = described
            too_long = payload_bytes > MAX_PAYLOAD or list_bytes > MAX_LIST
            # Larger tensors would end the worker that allocates them; few are so large.
            coming = announced.size + sum(lengths)
            if too_long or (coming > LARGE and coming > free_memory()):
                raise self._error("a message that is larger than the memory that is left")
            kind = yield from self._frame(rpc_format.LENGTH.size, exactly=rpc_format.LENGTH.size)
            number = yield from self._frame(_LENGTH.size, exactly=_LENGTH.size)
            payload = yield from self._frame(MAX_PAYLOAD, exactly=payload_bytes)
            tensors = yield from self._frame(MAX_LIST, exactly=list_bytes)
            try:
                num_tensors = rpc_pickle.count_tensors(tensors, lengths)
                self._require(
                    kinds, rpc_format.LENGTH.unpack(kind)[0], number, payload, num_tensors
                )
            except rpc_format.FormatError as error:
                raise self._error(str(error)) from error
            for part in (frame, kind, number, payload, tensors):
                self._pass(part)
            if not announced.announce(lengths):
                raise self._error("messages without their tensors")

    def _require(
        self,
        kinds: dict[int, rpc_format.Check],
        kind: int,
        number: bytes,
        payload: bytes,
        num_tensors: int,
    ) -> None:
        """Refuse a message that the peer may not send."""
        is_response = kinds is rpc_format.RESPONSES
        if pickle := rpc_format.require(kinds, kind, payload, num_tensors):
            rpc_pickle.require(pickle, self._peer, is_call=not is_response)
        if is_response:  # torch ends the process if it has not asked
            request = self._asked.pop(number, None)
            if request is None or kind not in (
                *rpc_format.ANSWERS.get(request, ()),
                rpc_format.EXCEPTION,
            ):
                raise rpc_format.FormatError(f"{rpc_format.name_of(kind)} that was not asked for")

    def _channel(self, number: int) -> Steps:
        key = self._is_ours, self._peer, number
        if key not in self._pipes.channels:
            # A pipe's connections travel apart: one may arrive after its pipe was closed, as when
            # a worker is killed while it connects.
            if not self._pipes.has_ended(key):
                raise self._error("a connection of a pipe that it does not have")
            yield from self._discard()
        lengths = self._pipes.channels[key]
        if lengths is None:
            yield from self._require_silence("data on a connection that carries none")
            return
        self._lengths = lengths
        lengths.arrived = self._resume
        while True:
            yield from self._wait_for(_LENGTH.size)
            (length,) = _LENGTH.unpack_from(self._buffer, self._at)
            while (expected := lengths.next()) is None:
                self.is_held = True
                yield
            if length != expected:
                raise self._error(f"{length} bytes for a tensor of {expected}")
            yield from self._tensor(length)

    def _discard(self) -> Steps:
        while True:
            self._passed.clear()
            self._at = len(self._buffer)
            yield

    def _tensor(self, length: int) -> Steps:
        here = min(length, len(self._buffer) - self._at - _LENGTH.size)
        end = self._at + _LENGTH.size + here
        self._passed += memoryview(self._buffer)[self._at : end]
        self._at = end
        self._body = length - here
        while self._body:  # `received` counts what goes by
            yield

    def _require_silence(self, reason: str) -> Steps:
        while self._at == len(self._buffer):
            yield
        raise self._error(reason)

    def _resume(self) -> None:
        if self.is_held:
            self.is_held = False
            self.resume()

    def _frame(self, most: int, exactly: int | None = None) -> Generator[None, None, bytes]:
        """Return the content of the next frame; its size is limited, or fixed by `exactly`."""
        yield from self._wait_for(_LENGTH.size)
        (length,) = _LENGTH.unpack_from(self._buffer, self._at)
        if length > most or length != (length if exactly is None else exactly):
            raise self._error(f"a frame of {length} bytes where it has announced another")
        yield from self._wait_for(_LENGTH.size + length)
        begin = self._at + _LENGTH.size
        self._at = begin + length
        return bytes(memoryview(self._buffer)[begin : self._at])

    def _wait_for(self, count: int) -> Steps:
        while len(self._buffer) - self._at < count:
            yield

    def _pass(self, frame: bytes) -> None:
        self._passed += _LENGTH.pack(len(frame))
        self._passed += frame

    def _error(self, reason: str) -> SecurityError:
        error = SecurityError(
            f"{self._label} has sent a worker on {platform.node()} what is no message of rpcmp's: "
            f"{reason}. That host, or its certificate, may be in other hands: look there, and "
            "revoke the certificate with `rpcmp certs revoke`"
        )
        self._pipes.on_refused(error)
        return error
