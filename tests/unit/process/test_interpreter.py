"""The environment variables of processes that compute."""

from __future__ import annotations

import pytest

from rpcmp.process.interpreter import compute_environment

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
