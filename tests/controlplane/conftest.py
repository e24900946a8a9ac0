"""Fixtures of jobs in one event loop."""

from __future__ import annotations

import pytest

from tests.support.controlplane.cluster import Committed, reference


@pytest.fixture(scope="session")
def undisturbed() -> Committed:
    """What a job of six layers and 40 steps commits, whatever its balance and its faults."""
    return reference(steps=40, layers=6)
