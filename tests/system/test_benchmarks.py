"""`rpcmp bench` with real peers. Each imports torch and half of its compiler, so the tests are few
and not among those of every change."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from rpcmp.tools.bench import contestants
from tests.benchmarks import replicas
from tests.support.docs import PAGES, blocks, commands
from tests.support.processes import JobFolder, rpcmp


def test_bench_prints_ours_beside_a_peer() -> None:
    small = ("--stages", "2", "--microbatches", "4", "--pairs", "1", "--steps", "2")
    result = rpcmp("bench", "sleep", *small, "--peers", "torch-1f1b", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["case"], list(found["peers"])) == ("sleep", ["torch-1f1b"])


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
    assert len(lines) == 4
    for line in lines:
        monkeypatch.setattr(sys, "argv", shlex.split(line.removeprefix("python -m ")))
        replicas._options()
