"""The rendezvous store of a group, as a member's agent uses it."""

from __future__ import annotations

import base64
import itertools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from rpcmp.errors import from_wire
from rpcmp.process.channel import Message

MAX_ASKED = 16 * 1024
"""Characters of the keys in a question, and KEY_EXTRA for each; see rpcmp.server.rendezvous and
MAX_PEERS_MESSAGE for what a server takes."""

KEY_EXTRA = 16


class ChannelStore(Store):
    """The rendezvous store of one generation, which asks the process's own supervisor. Thread-safe.

    With no TCPStore and no Gloo group there is no further listening socket, and this process
    connects to no other host.

    Args:
        send: sends {"event": "store", "id", "call", "keys", ...} to the supervisor, whose answer
            {"op": "stored", "id", "values" or "error"} has to be passed to `set_answer`.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = send
        self._ids = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._together: dict[str, list[str]] = {}
        self._kept: dict[str, bytes] = {}

    def set_answer(self, answer: Message) -> None:
        self._answers.pop(answer["id"]).put(answer)

    def get_together(self, keys: Iterable[str]) -> None:
        """Ask for all these keys when `get` is first called for one of them, and keep the values.

        Each is to be set once, by whichever member, which needs none of the others for it. An agent
        gets what every member sets one by one: the group would ask members^2 questions.
        """
        for part in _questions(keys):
            self._together |= dict.fromkeys(part, part)

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], value=_text(value))

    def get(self, key: str) -> bytes:
        if key not in self._together:
            return self._ask("get", [key])[0]
        if key not in self._kept:
            group = self._together[key]
            self._kept |= zip(group, self._ask("get", group), strict=True)
        return self._kept[key]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        more = {"expected": _text(expected), "value": _text(desired)}
        return self._ask("compare_set", [key], **more)[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", [key], amount=value)[0])

    def _ask(self, call: str, keys: Sequence[str], **more: str | int) -> list[bytes]:
        number = next(self._ids)
        arriving = self._answers[number] = queue.SimpleQueue[Message]()
        self._send({"event": "store", "id": number, "call": call, "keys": keys, **more})
        answer = arriving.get()
        if "error" in answer:
            raise from_wire(answer["error"])
        return [base64.b64decode(value) for value in answer["values"]]


def _questions(keys: Iterable[str]) -> Iterator[list[str]]:
    """Split keys into as few questions as a rendezvous takes."""
    part: list[str] = []
    left = MAX_ASKED
    for key in keys:
        size = len(key) + KEY_EXTRA
        if part and size > left:
            yield part
            part, left = [], MAX_ASKED
        part.append(key)
        left -= size
    yield part


def _text(value: bytes | str) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode()
