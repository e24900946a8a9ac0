"""What a worker does together with others between its backwards and its optimizer's step.

(1) the replicas of a stage sum their gradients      rpcmp.worker.replication
(2) stages that share a parameter add theirs         rpcmp.worker.ties
(3) the optimizer steps
(4) all take over what somebody else decides

A worker without replicas and without shared parameters does nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.futures import Future

from rpcmp.errors import JobError, RpcmpError, StageError, WorkerDiedError, one_line
from rpcmp.plan import Assignment
from rpcmp.transport import Transport, result
from rpcmp.worker.board import Board, Key
from rpcmp.worker.following import Following
from rpcmp.worker.model import StageModel
from rpcmp.worker.replication import Replication
from rpcmp.worker.ties import Ties

Method = Callable[..., Future[Any]]


class Together:
    """One worker's side of it; all but the answers to others on the compute thread.

    Args:
        assignment: which worker of which job.
        model: its layers.
        peers: the other members of the group.
        part, total, posted: the methods by which another worker's are asked for.
    """

    def __init__(
        self,
        assignment: Assignment,
        model: StageModel,
        peers: Transport,
        part: Method,
        total: Method,
        posted: Method,
    ) -> None:
        self._own = own = assignment.member
        config = assignment.config

        def ask(worker: str, key: Key) -> Callable[[], list[Any]]:
            asked = peers.call(worker, posted, key)
            return lambda: result(asked, worker)

        def fetch(worker: str, key: Key) -> list[Tensor]:
            return ask(worker, key)()

        def replicas(stage: str) -> int:
            return config.turns_of(stage).num_replicas

        self._board = Board()
        self._replication = (
            Replication(own, model, peers, part, total, Following(own, model, self._board, ask))
            if own.num_replicas > 1
            else None
        )
        self._ties = Ties(own, model, assignment.tied, replicas, self._board, fetch)
        self._round = 0

    def begin(self, round_number: int, num_microbatches: int, is_early: bool) -> None:
        """A training round's first action comes; see Replication."""
        if self._replication is not None:
            self._replication.begin(round_number, num_microbatches, is_early)

    def sum(self, round_number: int, step: int) -> None:
        """Have all gradients that this worker's optimizer needs; waits for the others.

        Args:
            round_number: the round after which.
            step: the optimizer step that it is for.

        Raises:
            StageError: another worker has failed, or a gradient cannot be summed.
            WorkerDiedError: another worker is gone.
        """
        self._round = round_number
        with self._named(step):
            if self._replication is not None:
                self._replication.sum(round_number)
            self._ties.sum(round_number)

    def stepped(self, step: int) -> None:
        """The optimizer has stepped.

        Raises:
            StageError: another worker has failed.
            WorkerDiedError: another worker is gone.
        """
        with self._named(step):
            if self._replication is not None:
                self._replication.stepped(self._round, step)
            self._ties.stepped(self._round, step)

    def unite(self, follows: bool) -> None:
        """Begin as what replica 0, and the owners of shared parameters, are.

        Args:
            follows: whether replica 0's parameters are taken over after each step as well.

        Raises:
            RpcmpError: another worker is gone.
        """
        self._ties.unite()
        if self._replication is not None:
            self._replication.unite()
            self._replication.follow(follows)

    def abort(self, first: int, last: int, cause: RpcmpError | None = None) -> None:
        """Let no worker wait for what belongs to the rounds from `first` to `last`.

        Args:
            cause: why, where that is known.
        """
        error = cause or JobError(f"stage {self._own.label!r}: the step was aborted")
        if self._replication is not None:
            self._replication.abort(first, last, error)
        self._board.abort(first, last, error)

    @contextlib.contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """Errors say where they are from.

        What another worker has failed with says so already; of a lost one its supervisor knows
        better.
        """
        try:
            yield
        except (WorkerDiedError, StageError):
            raise
        except Exception as error:
            raise StageError(self._own.label, "sum", one_line(error), step=step) from error

    # What other workers ask.

    def part(self, asking: int, key: int, bucket: int) -> Future[Any]:
        """See Summing."""
        return self._replicas.part(asking, key, bucket)

    def total(self, key: int, bucket: int) -> Future[Any]:
        """See Summing."""
        return self._replicas.total(key, bucket)

    def posted(self, key: Key) -> Future[Any]:
        """See Board."""
        return self._board.get(key)

    @property
    def _replicas(self) -> Replication:
        if self._replication is None:
            raise JobError(f"stage {self._own.label!r} has no replicas")
        return self._replication
