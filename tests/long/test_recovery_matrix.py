"""Every fault in every phase at every stage: the run recovers and ends with the same bits.

Cables are cut in a network namespace of the test's, which takes root.
"""

from __future__ import annotations

import itertools

import pytest

from tests.support.faults import (
    HOWS,
    PHASES,
    Cell,
    Committed,
    assert_cell,
    committed_without_fault,
    name_of,
)
from tests.support.processes import JobFolder

STAGES = (0, 1, 2)

ALIVE = [how for how in HOWS if how != "cut"]
"""Faults of a process that need no network."""


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Losses and parameters of the same job without a fault."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@pytest.mark.parametrize("cell", [*itertools.product(ALIVE, PHASES, STAGES)], ids=name_of)
def test_the_run_recovers_from_every_fault_in_every_phase(
    job: JobFolder, fault_free: Committed, cell: Cell
) -> None:
    assert_cell(job, fault_free, cell)


@pytest.mark.parametrize("cell", [*itertools.product(["cut"], PHASES, STAGES)], ids=name_of)
def test_the_run_recovers_from_a_cut_link_in_every_phase(
    job: JobFolder, fault_free: Committed, namespace: tuple[str, ...], cell: Cell
) -> None:
    assert_cell(job, fault_free, cell, under=namespace)
