"""Keep replicas and tied parameters identical.

They are synchronized when a group forms, and compared when parameters are hashed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.driver.worker_refs import WorkerRefs
from rpcmp.errors import ConfigError, MismatchError
from rpcmp.pipelining import optimizers
from rpcmp.pipelining.parameter_names import require_distinct
from rpcmp.pipelining.parameter_names import require_equal_ties as require_equal_kinds
from rpcmp.rpc import transport
from rpcmp.worker.model import HOST
from rpcmp.worker.stage import Stage


def require_fit(workers: WorkerRefs, config: Config) -> None:
    """Check that replicas are the same model, and that everything the config names exists.

    Raises:
        ConfigError: replicas differ in code, or in names or shapes of tensors; two stages use the
            same name; a tied parameter does not exist, or differs from the one that it is tied to;
            a pattern of a parameter group matches nothing.
    """
    signatures = workers.everywhere(Stage.signature)
    hosts = {label: signature.pop(HOST) for label, signature in signatures.items()}
    for first, other, what in _differences(workers, signatures):
        raise ConfigError(
            f"{_both(first, other)} are not the same model: {what}; replica {first.replica} is on "
            f"{hosts[first.label]}, replica {other.replica} on {hosts[other.label]}: install "
            "the same on their hosts; your own code may lie beside the config (ship_code = true)"
        )
    kinds = {
        worker.stage: {
            name: kind
            for name, kind in signatures[worker.label].items()
            if kind.endswith(("trained", "frozen"))
        }
        for worker in workers
    }
    require_distinct(kinds)
    trained = {
        stage: {name: kind.endswith("trained") for name, kind in of_stage.items()}
        for stage, of_stage in kinds.items()
    }
    optimizers.require_matches(config, trained)
    every = {name: kind for of_stage in kinds.values() for name, kind in of_stage.items()}
    require_equal_kinds(config.tied, every)


def sync_initial_state(workers: WorkerRefs) -> None:
    """Copy replica 0 to all replicas, and tied parameters from their owners."""
    hosts = workers.everywhere(Stage.host)
    unequal = {f.stage for f, other in _pairs(workers) if hosts[f.label] != hosts[other.label]}
    calls = [
        (worker.label, workers.on(worker, Stage.sync_initial_state, worker.stage in unequal))
        for worker in workers
    ]
    transport.results(calls)


def require_equal(workers: WorkerRefs) -> None:
    """Check that the replicas of every stage have the same trained parameters.

    Raises:
        MismatchError: they do not.
    """
    digests = workers.everywhere(Stage.parameter_digests)
    for first, other, what in _differences(workers, digests):
        raise MismatchError(f"{_both(first, other)} have become different models: {what}")


def _pairs(workers: WorkerRefs) -> Iterator[tuple[Member, Member]]:
    firsts = {worker.stage: worker for worker in workers if worker.replica == 0}
    return ((firsts[worker.stage], worker) for worker in workers if worker.replica)


def _differences(
    workers: WorkerRefs, answers: Mapping[str, dict[str, str]]
) -> Iterator[tuple[Member, Member, str]]:
    """Yield pairs of replicas whose answers differ, and their first difference."""
    for first, other in _pairs(workers):
        name = _first_difference(answers[first.label], answers[other.label])
        if name is not None:
            one, another = (answers[w.label].get(name, "missing").strip() for w in (first, other))
            yield (
                first,
                other,
                f"{name} is {one} in replica {first.replica} and {another} in replica "
                f"{other.replica}",
            )


def _both(first: Member, other: Member) -> str:
    return f"replicas {first.replica} and {other.replica} of stage {first.stage!r}"


def _first_difference(first: dict[str, str], other: dict[str, str]) -> str | None:
    names = [*first, *(name for name in other if name not in first)]
    return next((name for name in names if first.get(name) != other.get(name)), None)
