"""The one module that touches torch.distributed.rpc, its autograd and their private parts.

A process joins one group, once. The agent is built directly instead of by `init_rpc`, which would
open a TCPStore and a Gloo group beside it: like this a worker has one listening socket. It is built
in a thread that is in the private network of `process/sandbox/namespace.py`, and with it its own.
What we rely on in torch is pinned down by tests/unit/test_torch_contract.py:

- `TensorPipeAgent` needs a store with `set`, `get` and `compare_set`; the Python store must stay
  referenced as long as the agent lives.
- TensorPipe's "shm" transport busy-polls (20 to 30 % of a stage's compute on two cores): "uv" only.
- Its "cma" channel copies tensors from one process's memory to another's, without the kernel's TCP,
  where both may: one host, one user, the same namespaces, as both sides find out when they connect.
  Where Yama restricts ptrace it lets other processes of the same user attach to a worker. "basic"
  sends them over the socket: elsewhere, and if a process is confined.
- Messages are unpickled by `torch.distributed.rpc.internal._unpickler`, which we replace.
- A handler's exception comes back garbled and `Future.set_exception` as a successful value, so
  nothing ever raises into torch: a `Raised` value carries the error, and every callback catches.
- A response is recorded under its request's autograd context, whichever thread fulfils it.

Calls name a function, not a string: `call(member, Stage.forward, bundle, port)` runs
`Stage.forward` on the object that the other process serves. A method may return a Future and answer
later; no handler blocks, so a few RPC threads are enough for any number of micro-batches.

How many bytes of tensors other members have answered to this one, and it has sent them back.

The kernel counts what goes over connections, see `rpcmp.process.sockets`. What goes from process
to process through one machine's memory nobody counts, so this does, where answers arrive.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._distributed_autograd import _init as _init_autograd
from torch._C._distributed_autograd import backward as _backward
from torch._C._distributed_rpc import TensorPipeAgent
from torch.distributed import Store, rpc  # type: ignore[attr-defined]
from torch.distributed import autograd as dist_autograd
from torch.distributed.rpc import api as rpc_api
from torch.distributed.rpc import internal as rpc_internal
from torch.futures import Future

from rpcmp.errors import (
    JobError,
    RpcmpError,
    SecurityError,
    WorkerDiedError,
    from_wire,
    one_line,
    to_wire,
)
from rpcmp.pipelining import pytree
from rpcmp.process.sandbox import namespace
from rpcmp.process.sandbox.confinement import is_confined
from rpcmp.process.sandbox.namespace import address_of
from rpcmp.process.sockets import PeerTraffic, listeners
from rpcmp.rpc import unpickler
from rpcmp.rpc.unpickler import Method


class Payload:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: dict[str, PeerTraffic] = {}

    def note(self, peer: str, answer: Any) -> None:
        """Count what a member has answered.

        And the gradients of those of its tensors that require grad: each goes back, unless the
        round is aborted, with the shape and the dtype in which its tensor came.
        """
        sent = received = 0
        for tensor in pytree.tensors(answer):
            size = tensor.numel() * tensor.element_size()  # `nbytes` raises for sparse ones
            received += size
            sent += size if tensor.requires_grad else 0
        if received:
            with self._lock:
                way = self._ways.get(peer, PeerTraffic(peer, 0, 0, 0.0))
                self._ways[peer] = way._replace(
                    sent=way.sent + sent, received=way.received + received
                )

    def read(self) -> list[PeerTraffic]:
        """What was counted since the process began, by the members' names."""
        with self._lock:
            return list(self._ways.values())


NUM_RPC_THREADS = 4
"""Threads that receive requests and run callbacks; handlers never block one."""

ACKNOWLEDGED_SECONDS = 1.0
"""How long the acknowledgement of a reference may be under way."""

RRef = rpc.RRef

NOBODY = ""
"""In the place of a member's name: the answer is this process's own."""

answered = Payload()
"""What the other members have answered to this process."""

rpc_internal._unpickler = unpickler.Unpickler  # what messages may name, see there


class Raised(NamedTuple):
    """An error as the value of a call."""

    error: str


@dataclass
class _Served:
    """What this process serves to the group, and where its members meet; empty before it joins."""

    service: Any = None
    store: Any = None
    num_members: int = 0


_served = _Served()


def reserve_threads(in_flight: int) -> None:
    """Make room for backwards that wait their turn; before any other use of torch.

    Args:
        in_flight: how many may wait in this process at once. Each holds a thread of torch's
            inter-op pool, whose default of one thread a core would deadlock.
    """
    torch.set_num_interop_threads(in_flight + 2)


def join(members: Sequence[str], rank: int, store: Store, service: object) -> str:
    """Join the group; where this process listens, once all members have announced themselves.

    Whoever is called must have returned from this: the driver waits until its supervisor has heard
    so from all of them.

    Args:
        members: names of the group's processes, by rank.
        rank: this process's place in `members`.
        store: where the members exchange addresses.
        service: the object whose methods the others may call.

    Raises:
        SecurityError: the agent listens where it should not.
    """
    _served.service, _served.store, _served.num_members = service, store, len(members)
    os.environ["TP_SOCKET_IFNAME"] = namespace.current.interface(rank)
    before = listeners()
    namespace.current.run(lambda: _start_agent(members, rank, store))
    opened = [address for socket, address in listeners().items() if socket not in before]
    expected = address_of(rank) if namespace.current.is_private else "127.0.0.1"
    if [address.rpartition(":")[0] for address in opened] != [expected]:
        raise SecurityError(
            f"{members[rank]!r} should listen on {expected} and nowhere else, but it listens on "
            f"{', '.join(opened) or 'nothing'}: whoever reaches that runs code on this host"
        )
    return opened[0]


def _start_agent(members: Sequence[str], rank: int, store: Store) -> None:
    """In the thread whose network its threads are to be in."""
    # No timeout: a slow step is not a fault. Whether a peer lives is the supervisors' business.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=NUM_RPC_THREADS,
        rpc_timeout=0,
        _transports=["uv"],
        # What is confined may not read another process's memory, nor let its own be read.
        _channels=["basic"] if is_confined() else ["cma", "basic"],
    )
    _init_autograd(rank)  # before the agent: a peer may call at once
    agent = TensorPipeAgent(store, members[rank], rank, len(members), options, {}, [])
    rpc_api._init_rpc_states(agent)


def leave(timeout: float) -> None:
    """Wait until no member of the group asks another for anything more, at most `timeout` seconds.

    The process has to end right after, by `os._exit`. To have torch shut its agent down would take
    0.7 s, and changes nothing for anybody: what is still under way then says that a context or a
    reference is needed no more.
    """
    meeting = threading.Thread(target=_meet, name="rpcmp-leave", daemon=True)
    meeting.start()
    meeting.join(timeout)


def _meet() -> None:
    """Return when all members of the group have come here."""
    with contextlib.suppress(Exception):  # a store that is gone cannot be asked
        if _served.store.add("left", 1) == _served.num_members:
            _served.store.set("all have left", "")
        _served.store.get("all have left")


class Transport(Protocol):
    """How a process reaches the other members of its group, and differentiates across them.

    Neither stages nor the driver know any other way.
    """

    def call(self, member: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `method(service, *args)` in the process called `member`."""
        ...

    def remote_service(self, member: str) -> RRef[Any]:
        """A reference that keeps what `member` serves alive and names its owner."""
        ...

    def remote_part(self, owner_rref: RRef[Any], getter: Callable[[Any], Any]) -> RRef[Any]:
        """A reference to `getter(object)`, with the object of `owner_rref` where it lives."""
        ...

    def call_rref(
        self, target_rref: RRef[Any], method: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        """Run `method(object, *args)` where the object of `target_rref` lives."""
        ...

    def autograd_context(self) -> AbstractContextManager[int]:
        """A distributed autograd context; gone on all members soon after the block."""
        ...

    def backward(self, context_id: int, roots: Sequence[torch.Tensor]) -> None:
        """Differentiate the scalars `roots` across all members; blocks until every stage is done.

        Raises:
            RuntimeError: a stage's backward raised; the stage knows why.
        """
        ...

    def live_state(self) -> dict[str, int]:
        """Counts of what a step must not leave behind in this process: contexts and references."""
        ...


class TorchRpc:
    """The members of the group that this process has joined, by torch RPC; see Transport."""

    def call(self, member: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = rpc.rpc_async(member, _dispatch, args=(method, args))
        return future

    def remote_service(self, member: str) -> RRef[Any]:
        service_rref: RRef[Any] = rpc.remote(member, _get_service)
        return service_rref

    def remote_part(self, owner_rref: RRef[Any], getter: Callable[[Any], Any]) -> RRef[Any]:
        part_rref: RRef[Any] = rpc.remote(owner_rref.owner(), _get_part, args=(owner_rref, getter))
        return part_rref

    def call_rref(
        self, target_rref: RRef[Any], method: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        arguments = (target_rref, method, args)
        future: Future[Any] = rpc.rpc_async(target_rref.owner(), _dispatch_rref, args=arguments)
        return future

    @contextlib.contextmanager
    def autograd_context(self) -> Iterator[int]:
        with dist_autograd.context() as context_id:
            yield context_id

    def backward(self, context_id: int, roots: Sequence[torch.Tensor]) -> None:
        _backward(context_id, list(roots))

    def live_state(self) -> dict[str, int]:
        gc.collect()
        # The call that asks for this came with a reference, which is acknowledged some time later.
        ends = time.monotonic() + ACKNOWLEDGED_SECONDS
        while (info := {**rpc._get_debug_info()}).get("num_pending_futures") != "0":
            if time.monotonic() > ends:
                break
            time.sleep(0.001)
        keys = ("num_autograd_contexts", "num_current_backward_passes", "num_pending_futures")
        return {key: int(info.get(key, 0)) for key in (*keys, "num_forks", "num_owner_rrefs")}


def result(future: Future[Any], member: str) -> Any:
    """The value of a call to `member`; blocks.

    Raises:
        RpcmpError: what the call raised.
        WorkerDiedError: the connection broke.
    """
    value = outcome(future, member)
    if isinstance(value, Raised):
        raise from_wire(value.error)
    return value


def results(calls: Sequence[tuple[str, Future[Any]]]) -> list[Any]:
    """The values of calls to members, in order; blocks until all have ended, or the first failed.

    Raises:
        RpcmpError: what that one raised; the others may still be under way.
    """
    ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for number, (name, future) in enumerate(calls):

        def note(done: Future[Any], number: int = number, name: str = name) -> None:
            ended.put((number, outcome(done, name)))

        future.add_done_callback(note)
    found = [None] * len(calls)
    for _ in calls:
        number, value = ended.get()
        if isinstance(value, Raised):
            raise from_wire(value.error)
        found[number] = value
    return found


def outcome(future: Future[Any], member: str) -> Any:
    """The value of a call to `member`, or a Raised; blocks and does not raise.

    Args:
        member: whose answer it is, which is counted in `answered`.
    """
    try:
        value = future.wait()
    except RuntimeError as error:
        lost = WorkerDiedError(f"lost the connection to {member!r}: {one_line(error)}")
        return Raised(to_wire(lost))
    if member != NOBODY:
        answered.note(member, value)
    return value


def when_all(
    calls: Sequence[tuple[str, Future[Any]]], callback: Callable[[list[Any]], None]
) -> None:
    """Call `callback` with the outcomes of calls to members, in order, once all have ended.

    Each with the member's name, see `outcome`. Not `collect_all`, which ends with the first
    failure. A callback that raises is a bug: torch would swallow it and leave everybody waiting, so
    it ends the process.
    """
    lock = threading.Lock()
    left = len(calls)

    def one_ended(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            callback([outcome(future, name) for name, future in calls])
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    for _, future in calls:
        future.add_done_callback(one_ended)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _dispatch(method: Method, args: tuple[Any, ...]) -> Future[Any]:
    return _answer(_served.service, method, args)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _dispatch_rref(target_rref: RRef[Any], method: Method, args: tuple[Any, ...]) -> Future[Any]:
    return _answer(target_rref.local_value(), method, args)


def attempt(function: Callable[[], Any]) -> Any:
    """What `function` returns, or a Raised with what it raised."""
    try:
        return function()
    except RpcmpError as error:
        return Raised(to_wire(error))
    except BaseException as error:  # also sys.exit() in the user's optimizer
        text = "".join(traceback.format_exception(error))
        return Raised(to_wire(JobError(f"{one_line(error)}\n{text}")))


def _answer(target: Any, method: Method, args: tuple[Any, ...]) -> Future[Any]:
    value = attempt(lambda: method.function(target, *args))
    if isinstance(value, Future):
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _get_service() -> Any:
    return _served.service


def _get_part(owner_rref: RRef[Any], getter: Method) -> Any:
    return getter.function(owner_rref.local_value())
