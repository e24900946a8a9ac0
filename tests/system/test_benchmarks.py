"""`rpcmp bench` with real peers. Each imports torch and half of its compiler, so the tests are few
and not among those of every change."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rpcmp.tools.bench import contestants
from tests.benchmarks import replicas, scale
from tests.support.docs import PAGES, blocks, commands
from tests.support.processes import JobFolder, rpcmp, rpcmp_process


def test_bench_prints_ours_beside_a_peer() -> None:
    small = ("--stages", "2", "--microbatches", "4", "--pairs", "1", "--steps", "4", "--json")
    # In a process of its own, so that what this one starts is none of the benchmark's.
    with busy_loops(len(os.sched_getaffinity(0)) // 8 + 1):
        result = rpcmp_process("bench", "sleep", *small, "--peers", "torch-1f1b")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["case"], list(found["peers"])) == ("sleep", ["torch-1f1b"])
    assert found["cpu_s"] > found["driver_cpu_s"] > 0
    assert found["peers_cpu_s"]["torch-1f1b"] > 0
    assert found["cpu_ratios"]["torch-1f1b"]["median"] > 0
    assert any(note.startswith("the machine was not quiet") for note in found["notes"])


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep CPUs busy with processes."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield


def test_bench_compares_the_users_job(job: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.folder)
    monkeypatch.setattr(contestants, "TRIAL_SECONDS", 0.0)
    job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 2', "config.toml")
    small = ("--microbatches", "2", "--pairs", "1", "--steps", "1")
    result = rpcmp("bench", "config.toml", "--peers", "torch-best", "--json", *small)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["case"], list(found["peers"])) == ("config.toml", ["torch-best"])
    assert found["settings"]["torch-best"]["schedule"]


def test_benchmarks_of_replicas_take_the_options_of_their_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "python -m tests.benchmarks.replicas"
    typed = commands(blocks("sh", PAGES["tests/benchmarks/README.md"]))
    lines = [line for line in typed if line.startswith(module)]
    assert len(lines) == 5
    for line in lines:
        monkeypatch.setattr(sys, "argv", shlex.split(line.removeprefix("python -m ")))
        replicas._options()


def test_scale_prints_a_table_of_real_runs(tmp_path: Path) -> None:
    plot = tmp_path / "growth.svg"
    small = ("2", "--steps", "2", "--kills", "1", "--plot", str(plot))
    out = CliRunner().invoke(scale.main, small, catch_exceptions=False).output
    rows = [row for row in out.splitlines() if row.startswith("|")]  # and a note, if it is busy
    head, line, figures = (row.strip("| ").split(" | ") for row in rows)
    assert len(head) == len(line) == len(figures)
    assert figures[0] == "2"
    assert all(float(figure) > 0 for figure in figures)
    assert "<svg" in plot.read_text()


def test_scale_writes_the_guides_table_and_nothing_else(tmp_path: Path) -> None:
    page, table = tmp_path / "page.md", "\n".join([scale.row(scale.HEADS.values()), "| 4 |", ""])
    page.write_text(PAGES["rpcmp/guide/benchmarks.md"])
    before, after = page.read_text().split(table.partition("\n")[0])
    scale.write(table, page)
    written = page.read_text()
    assert written.startswith(before + table + "\n![")
    assert written.endswith(after.partition("\n![")[2])
    with pytest.raises(click.ClickException, match="0 tables"):
        scale.write("| no | such |\n", page)
