"""Work on a thread of its own, and on one that waits for it."""

from __future__ import annotations

import threading
from concurrent.futures import Future as Waiting

from rpcmp.worker.work_queue import WorkQueue


class Noted:
    """Work that notes on which thread it ran."""

    def __init__(self) -> None:
        self.done: Waiting[threading.Thread] = Waiting()

    def __call__(self) -> None:
        self.done.set_result(threading.current_thread())

    def ran_here(self) -> bool:
        return self.done.result(30) is threading.current_thread()


def test_work_runs_on_its_own_thread_and_then_on_the_one_that_waits() -> None:
    work, before, meanwhile, after = WorkQueue("work"), Noted(), Noted(), Noted()
    work.submit(before)
    assert not before.ran_here()
    with work.helped():
        work.submit(meanwhile)
        work.work_until(meanwhile.done)
        assert meanwhile.ran_here()
    work.submit(after)
    assert not after.ran_here()


def test_the_waiting_thread_does_what_has_not_begun() -> None:
    work, begun, may_end, second = WorkQueue("work"), threading.Event(), threading.Event(), Noted()

    def occupy() -> None:
        begun.set()
        may_end.wait(30)

    work.submit(occupy)
    assert begun.wait(30)
    work.submit(second)
    with work.helped():
        work.work_until(second.done)
    assert second.ran_here()
    may_end.set()


def test_work_that_comes_while_the_helper_does_not_wait_is_not_lost() -> None:
    work, left = WorkQueue("work"), Noted()
    with work.helped():
        work.submit(left)
    assert not left.ran_here()


def test_a_wait_ends_by_another_thread_that_submits_nothing() -> None:
    work, waiting, looks = WorkQueue("work"), Waiting[None](), threading.Event()

    def end() -> None:
        looks.wait(30)
        waiting.set_result(None)

    other = threading.Thread(target=end)
    other.start()
    with work.helped():
        work.submit(looks.set)
        work.work_until(waiting)
    other.join()
