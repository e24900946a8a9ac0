"""The environment variables of processes that compute, and interrupts that are not lost."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Iterator

import pytest

from rpcmp.process.interpreter import compute_environment, no_lost_interrupt

THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def test_the_allocator_keeps_freed_memory_unless_the_environment_has_a_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(THRESHOLD, raising=False)
    assert compute_environment(1)[THRESHOLD] == str(32 * 2**20)
    monkeypatch.setenv(THRESHOLD, "4096")
    assert compute_environment(1)[THRESHOLD] == "4096"


def test_threads_override_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = compute_environment(2)
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("2", "2")


class Thing:
    """An object that weak references may watch."""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have Python's own handler of SIGINT, which a process in a shell's background has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_callback_that_python_forgets_is_raised_after_the_block() -> None:
    def interrupt(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    reached = False
    with pytest.raises(KeyboardInterrupt), no_lost_interrupt():  # noqa: PT012
        thing = Thing()
        watch = weakref.ref(thing, interrupt)
        del thing
        reached = watch() is None
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_elsewhere_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), no_lost_interrupt():
        signal.raise_signal(signal.SIGINT)
    with no_lost_interrupt():
        pass


def test_a_handler_of_the_program_stays_in_place() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _: received.append(signum))
    try:
        with no_lost_interrupt():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]
