"""Every fault in every phase at every stage: the run goes on and ends with the same bits.

Cables are cut in a network namespace of the test's, which takes root.
"""

from __future__ import annotations

import itertools

import pytest

from tests.support.faults import HOWS, PHASES, Cell, Committed, assert_cell, name_of, undisturbed_in
from tests.support.processes import JobFolder

STAGES = (0, 1, 2)

ALIVE = [how for how in HOWS if how != "cut"]
"""What can be done to a process without its network."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Losses and parameters of the same job without a fault."""
    return undisturbed_in(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("cell", [*itertools.product(ALIVE, PHASES, STAGES)], ids=name_of)
def test_the_run_recovers_from_every_fault_in_every_phase(
    job: JobFolder, undisturbed: Committed, cell: Cell
) -> None:
    assert_cell(job, undisturbed, cell)


@pytest.mark.parametrize("cell", [*itertools.product(["cut"], PHASES, STAGES)], ids=name_of)
def test_the_run_recovers_from_a_cut_link_in_every_phase(
    job: JobFolder, undisturbed: Committed, namespace: tuple[str, ...], cell: Cell
) -> None:
    assert_cell(job, undisturbed, cell, under=namespace)
