"""References to all workers of a group, and calls to them, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.futures import Future

from rpcmp.config.topology import Member
from rpcmp.rpc.transport import RRef, Transport, results


class WorkerRefs:
    """All workers, or their parts, as the driver reaches them.

    Args:
        peers: the group that they are members of.
        rrefs: by worker, in the order of the config.
    """

    def __init__(self, peers: Transport, rrefs: dict[Member, RRef[Any]]) -> None:
        self._peers = peers
        self._rrefs = rrefs

    @classmethod
    def join(cls, members: Sequence[Member], peers: Transport) -> WorkerRefs:
        """What they serve to the group."""
        return cls(peers, {worker: peers.remote_service(worker.name) for worker in members})

    def parts(self, getter: Callable[[Any], Any]) -> WorkerRefs:
        """Of each object the part that `getter` returns where it lives."""
        parts = {w: self._peers.remote_part(rref, getter) for w, rref in self._rrefs.items()}
        return WorkerRefs(self._peers, parts)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._rrefs)

    def everywhere(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """What `method(object, *args)` returns, by the workers' labels.

        Raises:
            RpcmpError: what the first of them raised.
        """
        return self._on(list(self._rrefs), lambda worker: worker.label, method, *args)

    def on_firsts(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """The same, asked of the first replica of each stage alone; by the stages' names."""
        firsts = [worker for worker in self._rrefs if worker.replica == 0]
        return self._on(firsts, lambda worker: worker.stage, method, *args)

    def on(self, worker: Member, method: Callable[..., Any], *args: Any) -> Any:
        """A future of what one of them returns."""
        return self._peers.call_rref(self._rrefs[worker], method, *args)

    def call(self, name: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        """A future of what `method` returns for what the worker of that name serves."""
        return self._peers.call(name, method, *args)

    def _on(
        self,
        asked: Sequence[Member],
        name: Callable[[Member], str],
        method: Callable[..., Any],
        *args: Any,
    ) -> dict[str, Any]:
        """Not one after the other: where one fails, another may wait for it in vain."""
        calls = [(name(worker), self.on(worker, method, *args)) for worker in asked]
        return dict(zip(map(name, asked), results(calls), strict=True))

    def release(self) -> None:
        """Let go of the references; nothing else may be called afterwards."""
        self._rrefs.clear()
