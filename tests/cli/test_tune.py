"""`rpcmp tune` with real jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rpcmp.cli import cli
from rpcmp.errors import ConfigError
from tests.support.processes import JobFolder, rpcmp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--microbatches", "2,x"], "--microbatches: 'x' is not a positive whole number"),
        (["--microbatches", "0"], "--microbatches: '0' is not a positive whole number"),
        (["--max-in-flight", "-3"], "--max-in-flight: '-3' is not a positive whole number"),
        (["--schedules", "zbv"], "no schedule 'zbv'"),
        (["--schedules", ","], "--schedules ',': give at least one value"),
        (["--png", "/nowhere/at/all.png"], "cannot write /nowhere/at/all.png"),
    ],
)
def test_bad_input_fails_before_anything_starts(
    job: JobFolder, options: list[str], message: str
) -> None:
    path = job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 2')
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(cli, ["tune", str(path), *options], catch_exceptions=False)


def test_tune_measures_a_real_job(job: JobFolder, tmp_path: Path) -> None:
    path = job.config('schedule = "zero-bubble"\n[model]\nlayers = "zoo:mlp"\nnum_stages = 2')
    picture = tmp_path / "curve.png"
    sweep = ["--microbatches", "2", "--schedules", "gpipe", "--rounds", "1", "--steps", "1"]
    sweep += ["--microbatches-per-message", "1,2"]
    result = rpcmp("tune", path, *sweep, "--png", picture, "--json")
    assert result.code == 0, result.err
    assert result.err.splitlines()[0].endswith("about 60 s left")  # the default budget
    found = json.loads(result.out)
    keys = ("schedule", "num_microbatches", "microbatches_per_message")
    measured = [tuple(one[key] for key in keys) for one in found["settings"]]
    assert measured == [("gpipe", 2, 1), ("gpipe", 2, 2), ("zero-bubble", 4, 1)]
    assert all(0 < one["busiest_stage_s"] < one["step_s"] for one in found["settings"])
    assert found["recommended"] == found["own"]  # one round tells nothing
    assert picture.read_bytes().startswith(b"\x89PNG")
