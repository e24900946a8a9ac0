"""`rpcmp trace`, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rpcmp.cli import cli
from rpcmp.errors import ConfigError
from rpcmp.observability.trace import chrome
from tests.support.traces import SLOW_LINKS, drawn


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A trace of two steps."""
    path = tmp_path / "run.json"
    chrome.write(drawn(SLOW_LINKS), path)
    return path


def trace(*arguments: str | Path) -> Result:
    """Run the command."""
    return CliRunner().invoke(cli, ["trace", *map(str, arguments)])


def test_a_table_shows_every_stage_and_a_line_the_bottleneck(file: Path) -> None:
    lines = trace(file).output.splitlines()
    assert [" ".join(line.split()) for line in lines[:-1]] == [
        "step 2, 12.0 ms each",
        "stage host F % B % W % optimizer % bubble % network % overhead %",
        "stage0 host-stage0 16.7 16.7 0.0 8.3 25.0 25.0 8.3",
        "stage1 host-stage1 16.7 16.7 0.0 8.3 25.0 16.7 16.7",
    ]
    assert lines[-1].startswith("bottleneck: stage0 computes 5.0 ms of each step's 12.0 ms; ")


def test_json_has_the_same_for_programs(file: Path) -> None:
    found = json.loads(trace(file, "--json", "--steps", "1:2").output)
    assert (found["steps"], found["step_s"]) == ([1, 2], 0.0125)
    first = found["stages"][0]
    assert list(first)[:2] == ["stage", "host"]
    shares = {key: value for key, value in first.items() if key not in ("stage", "host")}
    assert list(shares) == [
        *("forward", "backward", "weight", "optimizer"),
        *("bubble", "network", "overhead"),
    ]
    assert sum(shares.values()) == pytest.approx(1)
    assert found["bottleneck"]["stage"] == "stage0"


def test_png_draws_the_last_two_complete_steps(file: Path) -> None:
    picture = file.with_suffix(".png")
    assert trace(file, "--png", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", ["2", "2:", "2:2"])
def test_steps_may_be_open_or_one(file: Path, steps: str) -> None:
    assert json.loads(trace(file, "--json", "--steps", steps).output)["steps"] == [2, 2]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        *[(steps, "write A:B") for steps in ("", ":", "a:b", "1:2:3", "-1:2", "1-2")],
        ("2:1", "the first is after the last"),
        ("1:3", "no steps 1 to 3 in the trace; it has 1 to 2"),
    ],
)
def test_wrong_steps_are_refused_and_nothing_is_written(
    file: Path, steps: str, message: str
) -> None:
    result = trace(file, "--png", file.with_suffix(".png"), f"--steps={steps}")
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert list(file.parent.iterdir()) == [file]


def test_a_picture_that_cannot_be_written_fails_before_the_trace_is_read(tmp_path: Path) -> None:
    result = trace(tmp_path / "missing.json", "--png", tmp_path / "missing" / "a.png")
    assert isinstance(result.exception, ConfigError)
    assert "cannot write" in str(result.exception)
    assert result.output == ""


def test_an_existing_picture_survives_a_failure(file: Path) -> None:
    picture = file.with_suffix(".png")
    picture.write_text("old")
    assert isinstance(trace(file.parent / "no.json", "--png", picture).exception, ConfigError)
    assert picture.read_text() == "old"
