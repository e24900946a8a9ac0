"""The files of continuous integration and commit hooks name only existing things."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from typing import Any

import yaml

from tests.support.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

EVENTS: Any = True
"""The key `on`, as YAML reads it."""


def test_pushes_and_pull_requests_run_the_checks() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert set(workflow[EVENTS]) == {"push", "pull_request"}
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] == "ubuntu-latest"
    assert 0 < job["timeout-minutes"] <= 120
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    assert scripts == [".ci/run"]
    assert os.access(ROOT / scripts[0], os.X_OK)


def test_the_checks_install_what_a_user_gets() -> None:
    """Without an index or a constraint pip takes a torch with CUDA, on a machine without a GPU too.

    The first release of the range has a short pass of its own.
    """
    checks = (ROOT / ".ci/run").read_text()
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert set(workflow["jobs"]["check"]["env"]) == {"PIP_NO_CACHE_DIR"}
    assert not re.search(r"PIP_(CONSTRAINT|\w*INDEX)|--(extra-)?index|--constraint", checks)
    (torch,) = (one for one in PROJECT["dependencies"] if one.startswith("torch>="))
    pattern = re.search(r"sed -n '(.*)' pyproject.toml", checks)
    assert pattern is not None
    first = subprocess.check_output(
        ["sed", "-n", pattern[1], "pyproject.toml"], cwd=ROOT, text=True
    ).strip()
    assert torch.startswith(f"torch>={first},<")


def test_the_checks_run_each_tier_and_end_with_the_last_line_of_pytest() -> None:
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    runs = [line for line in lines if line.startswith(("pytest", "rpcmp", "mypy"))]
    assert [line.split(" > ")[0] for line in runs] == [
        "mypy --strict",
        "pytest tests/unit/test_torch_contract.py tests/group",
        'rpcmp verify "rpcmp/examples/$example.toml" --steps 3',
        "pytest -m cluster",
        "pytest -m system",
    ]
    assert 'PYTEST_ADDOPTS="--max-units 500" eval "$tests"' in lines
    assert lines[-1] == "pytest -m system"


def test_the_checks_run_with_the_oldest_python_that_is_supported() -> None:
    """The Python of Debian, from whose packages `.ci/run` installs."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    image = workflow["jobs"]["check"]["container"]["image"]
    version, debian = re.fullmatch(r"python:([\d.]+)-(\w+)", image).groups()  # type: ignore[union-attr]
    assert PROJECT["requires-python"] == f">={version}"
    assert debian in {"bookworm", "trixie"}


def test_hooks_before_a_commit_run_programs_of_the_test_extra() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    extra = {re.split(r"[<>=\[]", one)[0] for one in PROJECT["optional-dependencies"]["test"]}
    programs = {hook["entry"].split()[0] for hook in hooks.values()}
    assert programs == {"ruff", "mypy"} <= extra
    checks = (ROOT / ".ci/run").read_text()
    for hook in hooks.values():
        assert hook["language"] == "system"
        assert hook["name"] in checks  # the same checks, by the same names
    assert hooks["mypy"]["pass_filenames"] is False


def test_commits_that_blame_passes_over_are_written_in_full() -> None:
    lines = (ROOT / ".git-blame-ignore-revs").read_text().splitlines()
    commits = [line for line in lines if not line.startswith("#")]
    assert commits
    assert [one for one in commits if not re.fullmatch("[0-9a-f]{40}", one)] == []
