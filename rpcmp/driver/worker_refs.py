"""References to all workers of a group, and calls to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.futures import Future

from rpcmp.config.topology import Member
from rpcmp.rpc.transport import RRef, Transport, results


class WorkerRefs:
    """All workers' stages, or parts of them.

    Args:
        rrefs: by worker, in the order of the config.
    """

    def __init__(self, peers: Transport, rrefs: dict[Member, RRef[Any]]) -> None:
        self._peers = peers
        self._rrefs = rrefs

    @classmethod
    def join(cls, members: Sequence[Member], peers: Transport) -> WorkerRefs:
        return cls(peers, {worker: peers.remote_service(worker.name) for worker in members})

    def parts(self, getter: Callable[[Any], Any]) -> WorkerRefs:
        """Refer to the part that `getter` returns of each object, where the object lives."""
        parts = {w: self._peers.remote_part(rref, getter) for w, rref in self._rrefs.items()}
        return WorkerRefs(self._peers, parts)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._rrefs)

    def everywhere(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Call `method(object, *args)` at all workers; return the results by label."""
        return self._on(list(self._rrefs), lambda worker: worker.label, method, *args)

    def on_firsts(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Call the first replica of each stage; return the results by the stage's name."""
        firsts = [worker for worker in self._rrefs if worker.replica == 0]
        return self._on(firsts, lambda worker: worker.stage, method, *args)

    def on(self, worker: Member, method: Callable[..., Any], *args: Any) -> Any:
        """Return a future of one worker's result."""
        return self._peers.call_rref(self._rrefs[worker], method, *args)

    def call(self, name: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        """Return a future of `method(stage, *args)` at the worker of that name."""
        return self._peers.call(name, method, *args)

    def _on(
        self,
        asked: Sequence[Member],
        name: Callable[[Member], str],
        method: Callable[..., Any],
        *args: Any,
    ) -> dict[str, Any]:
        """Call all at once: if one fails, another may wait for it in vain."""
        calls = [(name(worker), self.on(worker, method, *args)) for worker in asked]
        return dict(zip(map(name, asked), results(calls), strict=True))

    def release(self) -> None:
        """Drop the references; no other method may be called afterwards."""
        self._rrefs.clear()
