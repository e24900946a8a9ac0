"""When evaluations are due, their rehearsal, and the whole dataset; stages that are not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcmp.config.schema import Config
from rpcmp.driver.evaluation import Evaluation, Metrics
from rpcmp.driver.evaluator import Evaluator
from rpcmp.errors import ConfigError, JobError, WorkerDiedError
from rpcmp.process.activity import Activity

EPOCH = [Evaluation(4, 1.0), Evaluation(4, 3.0), Evaluation(2, 5.0)]
"""The results of a dataset's mini-batches."""


class Data:
    """A dataset whose mini-batches are what the stages would answer."""

    fewest = 2

    def __len__(self) -> int:
        return len(EPOCH)

    def first(self) -> Evaluation:
        return EPOCH[0]

    def epoch(self, number: int, start: int = 0) -> Iterator[Evaluation]:
        yield from EPOCH[start:]


class Group:
    """Stages that answer with the mini-batch itself, and note them."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.seen: list[Evaluation] = []
        self._then = then

    def evaluate(self, batch: Evaluation, step: int, own: Metrics) -> Evaluation:
        self.seen.append(batch)
        self._then()
        return batch


def evaluator(
    group: Group,
    stop: threading.Event | None = None,
    metrics: Metrics | None = None,
    **keys: Any,
) -> Evaluator:
    config = SimpleNamespace(**{"decisive_metrics": {}, **keys})
    return Evaluator(
        cast(Config, config),
        cast(Any, Data()),
        cast(Any, group),
        metrics or Metrics({}),
        stop or threading.Event(),
        cast(Activity, SimpleNamespace(start=lambda *_: None)),
    )


@pytest.mark.parametrize(
    ("steps", "epochs", "due"),
    [(2, 0, [2, 4, 6, 8]), (None, 1, [3, 6, 9]), (None, 2, [6]), (4, 3, [4, 8, 9]), (None, 0, [])],
)
def test_evaluations_follow_from_the_number_of_the_step(
    steps: int | None, epochs: int, due: list[int]
) -> None:
    of = evaluator(Group(), evaluate_every_steps=steps, evaluate_every_epochs=epochs)
    each = ((step, (step + 2) // 3, step % 3 == 0) for step in range(1, 10))  # 3 steps an epoch
    assert [step for step, epoch, ends in each if of.is_due(step, epoch, ends)] == due


def test_a_run_weighs_all_mini_batches() -> None:
    assert evaluator(Group()).run(1, 1) == pytest.approx({"loss": 2.6})


def test_a_stop_ends_an_evaluation_without_a_result() -> None:
    stop = threading.Event()
    group = Group(then=stop.set)
    assert evaluator(group, stop).run(1, 1) is None
    assert group.seen == EPOCH[:1]


def test_the_rehearsal_tries_the_first_and_the_smaller_last_mini_batch() -> None:
    group = Group()
    assert evaluator(group).rehearse() == ""
    assert group.seen == [EPOCH[0], EPOCH[-1]]


def test_a_rehearsal_that_fails_names_the_mini_batch() -> None:
    def fail() -> None:
        raise JobError("no such index")

    with pytest.raises(ConfigError, match=r"the first mini-batch of data.test .* no such index"):
        evaluator(Group(then=fail)).rehearse()


def giving(compute: Callable[[], object]) -> Metrics:
    """Return a metric of the driver with a state, whose `compute` is given."""
    nothing = dict.fromkeys(("reset", "update"), lambda *_: None)
    return Metrics({"own": cast(Any, SimpleNamespace(compute=compute, **nothing))})


def test_a_rehearsal_warns_if_a_metric_fails_and_refuses_what_is_no_number() -> None:
    assert evaluator(Group(), metrics=giving(lambda: {"f1": 0.5})).rehearse() == ""
    warning = evaluator(Group(), metrics=giving(lambda: 1 / 0)).rehearse()
    assert warning.startswith("metrics.own failed in compute(): ZeroDivisionError: division by")
    assert "tried on one mini-batch" in warning
    with pytest.raises(ConfigError, match=r"compute\(\) gave str; it has to give one number"):
        evaluator(Group(), metrics=giving(lambda: "much")).rehearse()


def test_a_rehearsal_leaves_a_lost_worker_to_the_recovery() -> None:
    def die() -> None:
        raise WorkerDiedError("killed")

    with pytest.raises(WorkerDiedError):
        evaluator(Group(then=die)).rehearse()


def test_a_key_that_names_no_result_lists_those_that_there_are() -> None:
    of = evaluator(Group(), decisive_metrics={"checkpoint.best": "f1"})
    with pytest.raises(ConfigError, match=r"checkpoint.best = 'f1': an evaluation gives loss"):
        of.run(1, 1)
