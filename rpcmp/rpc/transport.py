"""The one module that touches torch.distributed.rpc, its autograd and their private parts.

A process joins one group, once. The agent is built directly instead of by `init_rpc`, which would
open a TCPStore and a Gloo group beside it: this way a worker has one listening socket. It is built
in a thread that is in the private network of `process/sandbox/namespace.py`, so its threads are as
well. tests/unit/test_torch_contract.py pins down what this module relies on in torch:

- `TensorPipeAgent` needs a store with `set`, `get` and `compare_set`; the Python store must stay
  referenced as long as the agent lives. It gets the names, then the addresses of all members.
- TensorPipe's "shm" transport busy-polls (20 to 30 % of a stage's compute on two cores): "uv" only.
- Its channel "basic" sends tensors over the socket, "cma" reads the other process's memory: that
  takes a right to trace it, and messages that cost more than a small tensor does. "basic" only: on
  one host, tensors are in `rpcmp.rpc.shared_memory`, and empty ones take no channel.
- Messages are unpickled by `torch.distributed.rpc.internal._unpickler`, which we replace.
- A handler's exception comes back garbled and `Future.set_exception` as a successful value, so
  nothing ever raises into torch: a `Raised` value carries the error, and every callback catches.
- A response is recorded under its request's autograd context, in whichever thread it is set.

Calls name a function, not a string: `call(member, Stage.forward, bundle, port)` runs
`Stage.forward` on the object that the other process serves. A method may return a Future and answer
later. No handler blocks, but for the first call of a member, whose memory has to be found. So a few
RPC threads are enough for any number of micro-batches.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
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
from rpcmp.process.memory_access import ANNOUNCED, open_memory
from rpcmp.process.sandbox import namespace
from rpcmp.process.sandbox.namespace import address_of
from rpcmp.process.sockets import listeners
from rpcmp.rpc import unpickler
from rpcmp.rpc.channel_store import ChannelStore
from rpcmp.rpc.group_memory import FindMemory, GroupMemory
from rpcmp.rpc.payload import Payload
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor, Sharing
from rpcmp.rpc.unpickler import Method

NUM_RPC_THREADS = 4
"""Threads that receive requests and run callbacks; handlers never block one."""

ACKNOWLEDGED_SECONDS = 1.0
"""How long to wait for the acknowledgement of a reference."""

RRef = rpc.RRef

MEMORY = ANNOUNCED + "{}"
"""Key of a member's memory in the group's store: its address, and a trial of its device's."""

NOBODY = ""
"""In place of a member's name: the answer comes from this process."""

answered = Payload()
"""Counts the answers of other members to this process."""

rpc_internal._unpickler = unpickler.Unpickler  # finds only allowed names


class Raised(NamedTuple):
    """An error as the value of a call."""

    error: str


@dataclass
class _Served:
    """The object that this process serves to its group, the group's store, and shared memory."""

    service: Any = None
    store: Any = None
    num_members: int = 0
    memory: GroupMemory | None = None


_served = _Served()


def reserve_threads(in_flight: int) -> None:
    """Make room for backwards that wait for their turn; before any other use of torch.

    Args:
        in_flight: how many may wait in this process at once. Each holds a thread of torch's
            inter-op pool, whose default of one thread per core would deadlock.
    """
    torch.set_num_interop_threads(in_flight + 2)


def join(
    members: Sequence[str],
    rank: int,
    store: Store,
    service: object,
    find_memory: FindMemory = open_memory,
    device: torch.device | None = None,
) -> str:
    """Join the group; return the address that this process listens on.

    A member must not be called before this has returned there: the driver waits until its
    supervisor knows that all of them have joined.

    Args:
        members: names of the group's processes, by rank.
        rank: of this process.
        store: through which the members exchange addresses.
        service: the object whose methods the others may call.
        find_memory: returns a descriptor of another member's memory, by its address; None if it is
            on another host.
        device: on which this process computes, if tensors may go from there to another device.
    """
    _served.service, _served.store, _served.num_members = service, store, len(members)
    _served.memory = GroupMemory(
        members[rank], lambda member: store.get(MEMORY.format(member)), find_memory, device
    )
    store.set(MEMORY.format(members[rank]), _served.memory.announced)
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
    # No timeout: a slow step is not a fault. Whether a peer lives is the supervisors' business.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=NUM_RPC_THREADS,
        rpc_timeout=0,
        _transports=["uv"],
        _channels=["basic"],
    )
    if isinstance(store, ChannelStore):
        store.get_together(f"names/{number}" for number in range(len(members)))
        store.get_together(f"addrs/{name}" for name in members)
        store.get_together(map(MEMORY.format, members))
    _init_autograd(rank)  # before the agent: a peer may call at once
    agent = TensorPipeAgent(store, members[rank], rank, len(members), options, {}, [])
    rpc_api._init_rpc_states(agent)


def leave(timeout: float) -> None:
    """Wait until all members are done with their calls, at most `timeout` seconds.

    The process has to end right after, by `os._exit`. Shutting torch's agent down would take 0.7 s
    and change nothing: the only messages left then release a context or a reference.
    """
    meeting = threading.Thread(target=_meet, name="rpcmp-leave", daemon=True)
    meeting.start()
    meeting.join(timeout)


def _meet() -> None:
    with contextlib.suppress(Exception):  # a store that is gone cannot be asked
        if _served.store.add("left", 1) == _served.num_members:
            _served.store.set("all have left", "")
        _served.store.get("all have left")


class Transport:
    """Calls to the other members of the group, and distributed autograd across them.

    Stages and the driver use nothing else to reach each other.
    """

    @property
    def memory(self) -> OwnMemory:
        """Where this process places tensors for members that share memory with it."""
        return _memory().own

    def memory_for(self, sharing: Sharing) -> OwnMemory | None:
        return _memory().for_reader(sharing)

    def sharing(self, member: str) -> Sharing:
        """Return where `member` may place its answers; finds it out the first time."""
        return _memory().sharing(member)

    def shares_memory(self, member: str) -> bool:
        """Whether `member` may answer with a SharedTensor in memory of this host."""
        return _memory().shares_host(member)

    def call(self, member: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `method(service, *args)` in the process called `member`."""
        future: Future[Any] = rpc.rpc_async(member, _dispatch, args=(method, args))
        return future

    def remote_service(self, member: str) -> RRef[Any]:
        """Return a reference to the object that `member` serves, which keeps it alive."""
        service_rref: RRef[Any] = rpc.remote(member, _get_service)
        return service_rref

    def remote_part(self, owner_rref: RRef[Any], getter: Callable[[Any], Any]) -> RRef[Any]:
        """Return a reference to `getter(object)`, called where the object of `owner_rref` is."""
        part_rref: RRef[Any] = rpc.remote(owner_rref.owner(), _get_part, args=(owner_rref, getter))
        return part_rref

    def call_rref(
        self, target_rref: RRef[Any], method: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        """Run `method(object, *args)` in the process that owns the object of `target_rref`."""
        arguments = (target_rref, method, args)
        future: Future[Any] = rpc.rpc_async(target_rref.owner(), _dispatch_rref, args=arguments)
        return future

    def autograd_context(self) -> AbstractContextManager[int]:
        """Enter a distributed autograd context; all members drop it soon after the block."""
        context: AbstractContextManager[int] = dist_autograd.context()
        return context

    def backward(self, context_id: int, roots: Sequence[torch.Tensor]) -> None:
        """Differentiate the scalars `roots` across all members; blocks until every stage is done.

        Raises:
            RuntimeError: a stage's backward raised; that stage has recorded the cause.
        """
        _backward(context_id, list(roots))

    def live_state(self) -> dict[str, int]:
        """Return counts of contexts and references, which a step must not leave behind."""
        gc.collect()
        # The call that asks for this came with a reference, which is acknowledged some time later.
        ends = time.monotonic() + ACKNOWLEDGED_SECONDS
        while (info := {**rpc._get_debug_info()}).get("num_pending_futures") != "0":
            if time.monotonic() > ends:
                break
            time.sleep(0.001)
        keys = ("num_autograd_contexts", "num_current_backward_passes", "num_pending_futures")
        return {key: int(info.get(key, 0)) for key in (*keys, "num_forks", "num_owner_rrefs")}


def _memory() -> GroupMemory:
    assert _served.memory is not None, "this process has not joined a group"
    return _served.memory


def result(future: Future[Any], member: str = NOBODY) -> Any:
    """Wait for the value of a call to `member`."""
    value = outcome(future, member)
    if isinstance(value, Raised):
        raise from_wire(value.error)
    return value


def results(calls: Sequence[tuple[str, Future[Any]]]) -> list[Any]:
    """Wait for the values of calls to members, in order, or for the first failure."""
    ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for number, (name, future) in enumerate(calls):

        def done(call: Future[Any], number: int = number, name: str = name) -> None:
            ended.put((number, outcome(call, name)))

        future.add_done_callback(done)
    values = [None] * len(calls)
    for _ in calls:
        number, value = ended.get()
        if isinstance(value, Raised):
            raise from_wire(value.error)
        values[number] = value
    return values


def outcome(future: Future[Any], member: str) -> Any:
    """Wait for the value of a call to `member`, or a Raised, and count it in `answered`."""
    try:
        value = future.wait()
    except RuntimeError as error:
        lost = WorkerDiedError(f"lost the connection to {member!r}: {one_line(error)}")
        return Raised(to_wire(lost))
    if member == NOBODY:
        return value
    try:
        return _received(value, member)
    except (OSError, RuntimeError) as error:  # too many open files; a device that refuses
        failed = JobError(f"cannot map the memory of {member!r}: {one_line(error)}")
        return Raised(to_wire(failed))
    except RpcmpError as error:
        return Raised(to_wire(error))


def _received(answer: Any, member: str) -> Any:
    """Attach the tensors that lie in the memory of `member`, and count all."""
    kinds = (Tensor, SharedTensor)
    tensors = [leaf for leaf in pytree.leaves(answer) if isinstance(leaf, kinds)]
    for tensor in tensors:
        if isinstance(tensor, SharedTensor):
            _memory().attach(tensor, member)
    answered.count(member, tensors)
    return answer


def when_all(
    calls: Sequence[tuple[str, Future[Any]]], callback: Callable[[list[Any]], None]
) -> None:
    """Call `callback` with the outcomes of calls to members, in order, once all have ended.

    torch's `collect_all` would end with the first failure. A callback that raises is a bug, which
    torch would swallow while all wait, so it ends the process.
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
    """Return the result of `function`, or a Raised."""
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
