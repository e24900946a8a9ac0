"""A group's transport without torch RPC: all members in this process, with plain autograd.

A message arrives as a copy, made by the real unpickler. Gradients are copied in the same way. Every
second member answers with tensors in shared memory, as all do on one host, and the others as they
do on another host: so most groups have both. However few numbers they are, they are worth it here.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.futures import Future

from rpcmp.rpc import shared_memory, transport, unpickler
from rpcmp.rpc.group_memory import GroupMemory
from rpcmp.rpc.memory_blocks import PeerMemory
from rpcmp.rpc.shared_memory import Sharing
from rpcmp.rpc.transport import Transport, attempt

NUM_THREADS = 4
"""Threads of the pool; as in a worker, no handler blocks a thread."""


class LocalTransport(Transport):
    """A transport between members in this process.

    Args:
        services: the service of each member, by its name; may be filled in later.

    Attributes:
        worth_sharing: bytes of tensors that go to shared memory.
    """

    worth_sharing = 0

    def __init__(self, services: dict[str, Any]) -> None:
        self._services = services
        self._pool = ThreadPoolExecutor(NUM_THREADS, "local-rpc")
        self._contexts = itertools.count(1)
        served = transport._served
        self._group_memory = served.memory = served.memory or GroupMemory("", str.encode)
        shared_memory.WORTH_SHARING = self.worth_sharing
        self._peer_memory = PeerMemory(self.memory.address.fd)

    def shares_memory(self, member: str) -> bool:
        return bool(self.sharing(member))

    def sharing(self, member: str) -> Sharing:
        if list(self._services).index(member) % 2 == 0:
            return Sharing.NONE
        self._group_memory.members[member] = self._peer_memory
        return Sharing.HOST

    def call(self, member: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._ask(lambda: self._services[member], method, args)

    def remote_service(self, member: str) -> Any:
        return self._services[member]

    def remote_part(self, owner_rref: Any, getter: Callable[[Any], Any]) -> Any:
        return getter(owner_rref)

    def call_rref(self, target_rref: Any, method: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._ask(lambda: target_rref, method, args)

    @contextlib.contextmanager
    def autograd_context(self) -> Iterator[int]:
        yield next(self._contexts)

    def backward(self, context_id: int, roots: Sequence[Tensor]) -> None:
        try:
            torch.autograd.backward(list(roots))
        except Exception as error:
            raise RuntimeError(f"Error on a node: {error}") from error

    def live_state(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Stop its threads."""
        self._pool.shutdown()

    def _ask(
        self, target: Callable[[], Any], method: Callable[..., Any], args: tuple[Any, ...]
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        arrived = copied(args)

        def answered(done: Future[Any]) -> None:
            answer.set_result(attempt(lambda: copied(done.value())))

        def serve() -> None:
            value = attempt(lambda: method(target(), *arrived))
            if isinstance(value, Future):
                value.add_done_callback(answered)
            else:
                answer.set_result(attempt(lambda: copied(value)))

        self._pool.submit(serve)
        return answer


class _Journey(torch.autograd.Function):
    """A function that copies a tensor to another member, and its gradient back."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def copied(message: Any) -> Any:
    """Return a message as received: pickled and unpickled, with copies of its tensors."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, Tensor):
                return None
            tensors.append(value)
            return len(tensors) - 1

    class Unpickler(unpickler.Unpickler):
        def persistent_load(self, number: Any) -> Tensor:
            sent = tensors[number]
            with torch.enable_grad():
                apply: Callable[[Tensor], Tensor] = _Journey.apply
                return apply(sent) if sent.requires_grad else sent.detach().clone()

    stream = io.BytesIO()
    Pickler(stream).dump(message)
    return Unpickler(io.BytesIO(stream.getvalue())).load()
