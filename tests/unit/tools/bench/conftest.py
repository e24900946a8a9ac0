"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import pytest

from rpcmp.tools.bench import benchmark, cpu_usage


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the machine for a quiet one, whatever else runs on it, and read no process of it."""
    monkeypatch.setattr(benchmark, "disturbance", lambda before, after: "")
    monkeypatch.setattr(cpu_usage, "_all_kin", dict)
