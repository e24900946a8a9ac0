"""The Slurm script passes shellcheck, and runs with a fake Slurm on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.places import DEPLOY, EXAMPLES, ROOT
from tests.support.processes import poll_for, runs

SCRIPT = DEPLOY / "slurm.sh"

SHELL_SCRIPTS = (SCRIPT, ROOT / ".ci" / "run")

JOB = "4711"

PATIENCE = 120.0
"""Seconds in which a job must have reached the expected state."""

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""

SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") tr , '\\n' <<< "$3" ;;
    "show job") echo "JobId=$4 JobState=${SLURM_TEST_STATE:-RUNNING} Reason=None" ;;
    requeue*) echo "$2" >> "$SLURM_TEST_REQUEUED" ;;
esac
"""


ENDS_WITH = """#!/usr/bin/env bash
case $1 in
    serve) echo "stage $3 is SERVING on 0.0.0.0:1" && exec sleep 100 ;;
    drive) exit CODE ;;
esac
"""
"""An rpcmp whose runs end in a certain way."""


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_clean(path: Path) -> None:
    """By all checks for what users start, except braces around every variable."""
    program = Path(sys.executable).with_name("shellcheck")
    strict = ["--enable=all", "--exclude=SC2250"] if path == SCRIPT else []
    found = subprocess.run([program, *strict, path], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_slurm_script_asks_for_a_warning_signal_and_requeue() -> None:
    asked = re.findall(r"(?m)^#SBATCH (--.*)$", SCRIPT.read_text())
    assert "--requeue" in asked
    assert "--open-mode=append" in asked
    assert any(re.fullmatch(r"--signal=B:TERM@\d+", option) for option in asked)


class Slurm:
    """A job of a fake cluster, both of whose nodes are this machine.

    Attributes:
        folder: that it is submitted from.
        requeued: a file with a line per request to requeue the job.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.requeued = folder / "requeued"
        self.install("srun", SRUN)
        self.install("scontrol", SCONTROL)
        self.install("rpcmp", f'#!/usr/bin/env bash\nexec {sys.executable} -m rpcmp "$@"\n')
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("SLURM_JOB_ID", JOB)
        monkeypatch.setenv("SLURM_JOB_NODELIST", "127.0.0.1,127.0.0.2")
        monkeypatch.setenv("SLURM_TEST_REQUEUED", str(self.requeued))
        monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)

    def install(self, name: str, text: str) -> None:
        """Write a program into the folder that the script searches."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    @property
    def output(self) -> str:
        """Return the output of all runs of the job."""
        path = self.folder / "output"
        return path.read_text() if path.exists() else ""

    @property
    def saved(self) -> list[str]:
        """Return the steps with a checkpoint, the oldest first."""
        return sorted(path.parent.name for path in self.folder.glob("saved/*/*/manifest.json"))

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start the script."""
        where = ["--set", f"checkpoint.dir={self.folder / 'saved'}", "--set", "log.folder="]
        shown = ["--set", "checkpoint.shared=true", "-v"]
        config = EXAMPLES / "digits.toml"
        command: list[str | Path] = ["bash", SCRIPT, config, *where, *shown, *options]
        with (self.folder / "output").open("ab") as output:
            process = subprocess.Popen(command, cwd=self.folder, stdout=output, stderr=output)
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()

    def is_tidy(self) -> bool:
        """Whether no certificates are left."""
        return not [*self.folder.glob("**/tls.key"), *self.folder.glob(".rpcmp-*")]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path, monkeypatch)


@pytest.mark.long
def test_a_job_cut_short_saves_and_resumes_when_requeued(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm.running() as job:
        poll_for(lambda: "step 2/" in slurm.output, "a step", PATIENCE)
        assert not slurm.is_tidy()
        job.send_signal(signal.SIGTERM)  # time is up
        job.wait(PATIENCE)
    assert job.returncode == 128 + signal.SIGTERM, slurm.output
    (saved,) = slurm.saved
    step = int(saved.removeprefix("step-"))
    assert slurm.requeued.read_text().split() == [JOB]
    assert slurm.is_tidy()

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with slurm.running() as job:
        poll_for(lambda: f"\nstep {step + 2}/" in slurm.output, "a step after it", PATIENCE)
        servers = [one for one in psutil.Process(job.pid).children() if runs(one, "serve")]
        assert len(servers) == 2
        for server in servers:
            server.terminate()  # preempted
        job.wait(PATIENCE)
    assert len(re.findall(f"(?m)^step {step + 1}/", slurm.output)) == 1, slurm.output
    assert slurm.saved[-1] > saved
    assert slurm.requeued.read_text().split() == [JOB, JOB]
    assert slurm.is_tidy()


@pytest.mark.parametrize(
    ("code", "restarts", "state", "is_requeued"),
    [
        (0, 0, "RUNNING", False),
        (1, 0, "RUNNING", False),
        (2, 0, "RUNNING", False),
        (75, 2, "RUNNING", True),
        (75, 2, "CANCELLED", False),
        (75, 3, "RUNNING", False),
        (143, 0, "RUNNING", True),
    ],
)
def test_only_failures_worth_a_retry_are_requeued(
    slurm: Slurm,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    restarts: int,
    state: str,
    is_requeued: bool,
) -> None:
    slurm.install("rpcmp", ENDS_WITH.replace("CODE", str(code)))
    monkeypatch.setenv("SLURM_TEST_STATE", state)
    monkeypatch.setenv("RPCMP_MAX_REQUEUES", "3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    with slurm.running() as job:
        job.wait(PATIENCE)
    assert job.returncode == code, slurm.output
    assert slurm.requeued.exists() is is_requeued
    assert slurm.is_tidy()


def test_a_driver_that_is_killed_is_started_again_and_goes_on(slurm: Slurm) -> None:
    with slurm.running("--steps", "60") as job:
        poll_for(lambda: "step 20/" in slurm.output, "a step", PATIENCE)
        driver = next(one for one in psutil.Process(job.pid).children() if runs(one, "drive"))
        driver.kill()
        poll_for(lambda: "step 60/" in slurm.output, "the last step", PATIENCE)
        job.wait(PATIENCE)
    assert job.returncode == 0, slurm.output
    assert "the driver was ended by signal 9; it is started again" in slurm.output
    steps = [int(step) for step in re.findall(r"(?m)^step (\d+)/", slurm.output)]
    assert steps == sorted(steps), slurm.output
    assert len(steps) - len(set(steps)) <= 1
    assert not slurm.requeued.exists()
    assert slurm.is_tidy()


@pytest.mark.parametrize(("code", "ends_with"), [(1, 75), (2, 2), (127, 127)])
def test_a_stage_that_does_not_start_is_named(slurm: Slurm, code: int, ends_with: int) -> None:
    slurm.install("srun", f"#!/usr/bin/env bash\nexit {code}\n")
    with slurm.running() as job:
        job.wait(PATIENCE)
    assert job.returncode == ends_with
    assert f"stage 0 has not started on 127.0.0.1 (exit code {code})" in slurm.output
    assert slurm.requeued.exists() is (ends_with == 75)
    assert slurm.is_tidy()
