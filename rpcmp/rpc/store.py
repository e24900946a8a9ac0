"""The rendezvous store of a group, for torch's RPC agent.

A torch.distributed.Store in Python that asks the process's own supervisor. With no TCPStore and no
Gloo group there is no further listening socket, and this process connects to no other host.
"""

from __future__ import annotations

import base64
import itertools
import queue
import threading
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from rpcmp.errors import from_wire
from rpcmp.process.channel import Message


class ChannelStore(Store):
    """Key-value store of one generation. Thread-safe.

    Args:
        send: sends {"event": "store", "id", "call", "keys", ...} to the supervisor, whose answer
            {"op": "stored", "id", "value" or "error"} has to be passed to `set_answer`.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = send
        self._ids = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[Message]] = {}
        self._lock = threading.Lock()

    def set_answer(self, answer: Message) -> None:
        with self._lock:
            self._waiting.pop(answer["id"]).put(answer)

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], value=_text(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", [key])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask("compare_set", [key], expected=_text(expected), value=_text(desired))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", [key], amount=value))

    def _ask(self, call: str, keys: list[str], **more: str | int) -> bytes:
        number, answers = next(self._ids), queue.SimpleQueue[Message]()
        with self._lock:
            self._waiting[number] = answers
        self._send({"event": "store", "id": number, "call": call, "keys": keys, **more})
        answer = answers.get()
        if "error" in answer:
            raise from_wire(answer["error"])
        return base64.b64decode(answer["value"])


def _text(value: bytes | str) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode()
