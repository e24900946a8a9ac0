"""The report of a run, and the comparison of several runs, by their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpcmp.observability.run_report import Comparison, compare, read
from tests.support import runs


def compared(folder: Path, *each: tuple[dict[str, Any], list[float]]) -> Comparison:
    """Return the comparison of runs with these settings and losses."""
    found = []
    for more, losses in each:
        of = runs.config(folder, **more)
        found.append(read(runs.write_run_folder(of, runs.events(of, losses))))
    return compare(found)


def test_figures_describe_one_run(tmp_path: Path) -> None:
    found = compared(tmp_path, ({}, [2.0, 1.0, 0.5, 0.25]))
    assert {name: value for name, (value,) in found.figures} == {
        "outcome": "done",
        "steps": 4,
        "whole time": 5.0,
        "first loss": 2.0,
        "last loss": 0.25,
        "test loss": 0.5,
        "test accuracy": 0.9,
        "step time": 0.5,  # without the first step, which warms up
        "samples/s": 103.0,
        "data share": 0.25,
        "busy lift": 0.75,
        "busy head": 0.75,
        "bubble lift": 0.2,
        "bubble head": 0.2,
        "peak memory lift": 3 * 2**20,
        "peak memory head": 3 * 2**20,
        "faults": 1,
        "warnings": 0,
        "checkpoints": 0,
        "parameters sha256": "0" * 64,
        "version of rpcmp": "0.1.0",
        "version of torch": "2.13.0",
        "version of python": "3.11.2",
    }
    assert found.settings == []


def test_comparison_names_only_the_settings_that_differ(tmp_path: Path) -> None:
    other = {"seed": 3, "optimizer": {"callable": "torch.optim:Adam", "kwargs": {"lr": 0.1}}}
    found = compared(tmp_path, ({}, [1.0]), (other, [1.0]))
    settings = dict(found.settings)
    assert settings["seed"] == [0, 3]
    assert settings["optimizer.callable"] == ["torch.optim:SGD", "torch.optim:Adam"]
    assert settings["optimizer.kwargs.note"][1] is None
    assert set(settings) == {"seed", "optimizer.callable", "optimizer.kwargs.note"}


@pytest.mark.parametrize(
    ("losses", "shared", "difference"),
    [
        ([[1.0, 0.3, 0.2], [1.0, 0.3]], 2, None),
        ([[1.0, 0.1 + 0.2, 0.2], [1.0, 0.3, 0.2]], 3, 2),
        ([[1.0, 0.3], [1.0, 0.3], [2.0, 0.3]], 2, 1),
        ([[float("nan"), 0.3], [float("nan"), 0.3]], 2, None),
    ],
)
def test_comparison_names_the_first_step_whose_bits_differ(
    tmp_path: Path, losses: list[list[float]], shared: int, difference: int | None
) -> None:
    found = compared(tmp_path, *(({}, each) for each in losses))
    assert (found.shared, found.first_difference) == (shared, difference)
    assert str(difference or "bit for bit") in found.verdict


def test_comparison_shows_losses_at_few_steps_with_both_ends(tmp_path: Path) -> None:
    losses = [1.0 / step for step in range(1, 501)]
    found = compared(tmp_path, ({}, losses), ({}, losses[:400]))
    steps = [step for step, _ in found.losses]
    assert (steps[0], steps[-1], len(steps)) == (1, 400, 8)
    assert all(values == [losses[step - 1]] * 2 for step, values in found.losses)
