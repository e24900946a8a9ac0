"""`rpcmp report` of recorded runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from rpcmp.cli import cli
from rpcmp.errors import ConfigError
from rpcmp.observability import run_report
from tests.support import runs

LOSSES = [2.0, 1.0, 0.1 + 0.2]


def test_the_command_prints_tables(tmp_path: Path) -> None:
    of = runs.config(tmp_path)
    other = runs.config(tmp_path, seed=3)
    first = runs.write_run_folder(of, runs.events(of, LOSSES))
    second = runs.write_run_folder(other, runs.events(other, [2.0, 1.0, 0.3]))
    one = CliRunner().invoke(cli, ["report", "--text", str(first)])
    assert one.exit_code == 0, one.output
    assert "outcome" in one.output
    assert "settings" not in one.output
    both = CliRunner().invoke(cli, ["report", "--text", str(first), str(second)])
    assert both.exit_code == 0, both.output
    assert "the losses differ from step 3 on" in both.output
    assert "0.30000000000000004" in both.output
    assert ["seed", "0", "3"] in [line.split() for line in both.output.splitlines()]


def test_the_command_writes_one_file_and_prints_its_path(tmp_path: Path) -> None:
    of = runs.config(tmp_path)
    first = runs.write_run_folder(of, runs.events(of, LOSSES))
    second = runs.write_run_folder(of, runs.events(of, LOSSES))
    cases = {
        (first,): first / "report.html",
        (first, second): first / "comparison.html",
        (first, "-o", tmp_path / "mine.html"): tmp_path / "mine.html",
    }
    for arguments, path in cases.items():
        result = CliRunner().invoke(cli, ["report", *map(str, arguments)])
        assert (result.exit_code, result.output) == (0, f"{path}\n"), result.output
        assert first.name in path.read_text()
    assert second.name in (first / "comparison.html").read_text()
    run_report.read(first)  # what was written there does no harm


def test_a_file_that_cannot_be_written_and_options_that_do_not_go_together(tmp_path: Path) -> None:
    of = runs.config(tmp_path)
    path = str(runs.write_run_folder(of, runs.events(of, LOSSES)))
    result = CliRunner().invoke(cli, ["report", path, "-o", str(tmp_path / "no" / "r.html")])
    assert isinstance(result.exception, ConfigError)
    assert "cannot write" in str(result.exception)
    both = CliRunner().invoke(cli, ["report", path, "--text", "-o", "r.html"])
    assert (both.exit_code, "not both" in both.output) == (2, True)


def test_a_link_or_a_pipe_in_a_run_folder_is_replaced(tmp_path: Path) -> None:
    """A folder of somebody else's, where this user may write."""
    of = runs.config(tmp_path)
    folder = runs.write_run_folder(of, runs.events(of, LOSSES))
    target = tmp_path / "target"
    (folder / "report.html").symlink_to(target)
    assert CliRunner().invoke(cli, ["report", str(folder)]).exit_code == 0
    assert not target.exists()
    assert not (folder / "report.html").is_symlink()
    (folder / "report.html").unlink()
    os.mkfifo(folder / "report.html")
    assert CliRunner().invoke(cli, ["report", str(folder)]).exit_code == 0
    assert (folder / "report.html").is_file()


def test_a_run_with_more_lines_than_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = runs.config(tmp_path)
    folder = runs.write_run_folder(of, runs.events(of, LOSSES))
    monkeypatch.setattr(run_report, "MAX_EVENTS", 2)
    result = CliRunner().invoke(cli, ["report", str(folder)])
    assert "it has more than 2 lines" in str(result.exception)
