"""References to all workers of a group, calls to them, and checks that replicas are one model.

Replicas and tied parameters are synchronized when a group forms, and compared when parameters are
hashed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.futures import Future

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import ConfigError, MismatchError
from rpcmp.pipelining import optimizers
from rpcmp.pipelining.parameter_names import require_distinct, require_equal_ties
from rpcmp.pipelining.simulation import SharedCores
from rpcmp.rpc.transport import RRef, Transport, result, results
from rpcmp.worker.model import HOST
from rpcmp.worker.stage import Stage


class WorkerRefs:
    """All workers' stages, or parts of them; `rrefs` are in the order of the config."""

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

    def rpc_async(self, worker: Member, method: Callable[..., Any], *args: Any) -> Future[Any]:
        """Return a future of `method(object, *args)` at one worker."""
        return self._peers.call_rref(self._rrefs[worker], method, *args)

    def rpc_sync(self, worker: Member, method: Callable[..., Any], *args: Any) -> Any:
        return result(self.rpc_async(worker, method, *args), worker.label)

    def call(self, name: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        """Return a future of `method(stage, *args)` at the worker of that name."""
        return self._peers.call(name, method, *args)

    def everywhere(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Call `method(object, *args)` at all workers; return the results by label."""
        return self.start(method, lambda worker: args)()

    def shared_cores(self) -> list[SharedCores]:
        """Return the hosts that compute more stages than they have cores; none with replicas."""
        if any(worker.label != worker.stage for worker in self):
            return []
        stages: defaultdict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
        for stage, (host, cores) in self.everywhere(Stage.cores).items():
            stages[host, tuple(cores)].append(stage)
        return [
            SharedCores(len(cores), dict.fromkeys(names, 0.0))
            for (_, cores), names in stages.items()
            if len(names) > len(cores)
        ]

    def start(
        self, method: Callable[..., Any], args_of: Callable[[Member], Sequence[Any]]
    ) -> Callable[[], dict[str, Any]]:
        """Call all workers with their own arguments; return a function that waits for the results.

        All are called at once: if one fails, another may wait for it in vain.
        """
        calls = [(w.label, self.rpc_async(w, method, *args_of(w))) for w in self._rrefs]
        return lambda: dict(zip((label for label, _ in calls), results(calls), strict=True))

    def on_firsts(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Call the first replica of each stage; return the results by the stage's name."""
        firsts = [worker for worker in self._rrefs if worker.replica == 0]
        calls = [(worker.stage, self.rpc_async(worker, method, *args)) for worker in firsts]
        return dict(zip((stage for stage, _ in calls), results(calls), strict=True))

    def merge(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Call the first replica of each stage and return the union of the results.

        For example, the parameters and buffers of the unsplit model, with tied ones once, are
        `merge(Stage.state_dict)`.
        """
        parts = self.on_firsts(method, *args).values()
        return {name: value for part in parts for name, value in part.items()}

    def release(self) -> None:
        """Drop the references; no other method may be called afterwards."""
        self._rrefs.clear()


def require_same_model(workers: WorkerRefs, config: Config) -> None:
    """Check that replicas are the same model, and that everything the config names exists.

    Raises:
        ConfigError: replicas differ in code, or in names or shapes of tensors; two stages use the
            same name; a tied parameter does not exist, or differs from the one that it is tied to;
            a pattern of a parameter group matches nothing.
    """
    signatures = workers.everywhere(Stage.signature)
    hosts = {label: signature.pop(HOST) for label, signature in signatures.items()}
    for first, other, difference in _differences(workers, signatures):
        raise ConfigError(
            f"{_both(first, other)} are not the same model: {difference}; replica {first.replica} "
            f"is on {hosts[first.label]}, replica {other.replica} on {hosts[other.label]}: install "
            "the same on their hosts; your own code may lie beside the config (ship_code = true)"
        )
    kinds: dict[str, dict[str, str]] = {}
    trained: dict[str, dict[str, bool]] = {}
    for worker in workers:
        parameters = {
            name: kind
            for name, kind in signatures[worker.label].items()
            if kind.endswith(("trained", "frozen"))
        }
        kinds[worker.stage] = parameters
        trained[worker.stage] = {n: kind.endswith("trained") for n, kind in parameters.items()}
    require_distinct(kinds)
    optimizers.require_matches(config, trained)
    by_name = {name: kind for of_stage in kinds.values() for name, kind in of_stage.items()}
    require_equal_ties(config.tied, by_name)


def sync_initial_state(workers: WorkerRefs) -> None:
    """Copy replica 0 to all replicas, and tied parameters from their owners."""
    hosts = workers.everywhere(Stage.host)
    unequal = {f.stage for f, other in _pairs(workers) if hosts[f.label] != hosts[other.label]}
    workers.start(Stage.sync_initial_state, lambda worker: [worker.stage in unequal])()


def require_equal_parameters(workers: WorkerRefs) -> None:
    """Raise MismatchError unless the replicas of a stage have the same trained parameters."""
    digests = workers.everywhere(Stage.parameter_digests)
    for first, other, difference in _differences(workers, digests):
        raise MismatchError(f"{_both(first, other)} have become different models: {difference}")


def _pairs(workers: WorkerRefs) -> Iterator[tuple[Member, Member]]:
    firsts = {worker.stage: worker for worker in workers if worker.replica == 0}
    return ((firsts[worker.stage], worker) for worker in workers if worker.replica)


def _differences(
    workers: WorkerRefs, answers: Mapping[str, dict[str, str]]
) -> Iterator[tuple[Member, Member, str]]:
    """Yield pairs of replicas whose answers differ, and their first difference."""
    for first, other in _pairs(workers):
        ours, theirs = answers[first.label], answers[other.label]
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                one, another = (each.get(name, "missing").strip() for each in (ours, theirs))
                difference = (
                    f"{name} is {one} in replica {first.replica} and {another} in replica "
                    f"{other.replica}"
                )
                yield first, other, difference
                break


def _both(first: Member, other: Member) -> str:
    return f"replicas {first.replica} and {other.replica} of stage {first.stage!r}"
