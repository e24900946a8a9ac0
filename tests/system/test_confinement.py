"""What a job's code can reach at real servers: no keys, homes, or data that was not granted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.process.sandbox.confinement import SCRATCH
from tests.support.lan import issue, serving
from tests.support.processes import (
    JobFolder,
    RunningHere,
    connect,
    poll_for,
    rpcmp,
    running_servers,
)
from tests.support.spying import seen, sha256, spying

HERE = "127.0.0.1"

ALONE = ("--set", "data.num_workers=0")
"""Without processes that load data: each imports torch, and the bits are the same."""

ONE = (5,)
"""All layers in one stage."""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of started processes, with a short path for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def leftover(temporary: Path) -> list[Path]:
    """Return temporary folders of confined processes."""
    return list(temporary.glob(f"{SCRATCH}*"))


def test_confined_code_opens_no_key_and_no_home_and_trains_the_same(
    job: JobFolder, tmp_path: Path, temporary: Path
) -> None:
    certs = issue(job.folder / "certs", HERE, HERE)  # beside the config, as the guide has it
    home = tmp_path / "home"
    home.write_text("private")
    keys = [certs / "ca.key", *(certs / f"{who}/tls.key" for who in ("stage0", "stage1", "driver"))]
    config = spying(job, [*keys, home], data="num_workers = 1")
    trace = tmp_path / "trace.json.gz"
    with serving(0, f"{HERE}:0", certs) as first, serving(1, f"{HERE}:0", certs) as second:
        at = ("--connect", connect([first, second]), "--certs", certs / "driver")
        confined = rpcmp("drive", config, "--json", *at, "--trace", trace)
    denied = {str(path): "PermissionError" for path in (*keys, home)}
    assert seen(confined, "stage") == seen(confined, "data") == denied
    assert trace.stat().st_size
    assert not leftover(temporary)
    free = rpcmp("drive", config, "--json", *ALONE)
    assert set(seen(free, "stage").values()) == {"open"}
    assert sha256(confined) == sha256(free)


def test_a_server_without_confinement_confines_nothing(job: JobFolder, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("private")
    config = spying(job, [home], balance=ONE)
    with running_servers(1, "--no-confine") as servers:
        at = ("--connect", connect(servers), "--set", "security.confine=false")
        result = rpcmp("drive", config, "--json", *at)
    assert seen(result, "stage") == seen(result, "data") == {str(home): "open"}


def test_a_local_job_is_confined_on_request(
    job: JobFolder, tmp_path: Path, temporary: Path
) -> None:
    home, given = tmp_path / "home", tmp_path / "given"
    for path in (home, given):
        path.write_text("private")
    config = spying(job, [home, given], data='num_workers = 1\npaths = ["../given"]')
    confined = rpcmp("drive", config, "--json", "--set", "security.confine=true")
    expected = {str(home): "PermissionError", str(given): "open"}
    assert seen(confined, "stage") == seen(confined, "data") == expected
    assert not leftover(temporary)
    assert sha256(confined) == sha256(rpcmp("drive", config, "--json", *ALONE))


def test_data_not_granted_by_a_server_is_refused_before_anything_starts(
    job: JobFolder, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    (data / "set").mkdir(parents=True)
    file = data / "set/file"
    file.write_text("samples")
    config = spying(job, [file], data=f'at = "stage"\npaths = ["{data}/set"]', balance=ONE)
    with running_servers(1) as servers:
        result = rpcmp("drive", config, "--json", "--connect", connect(servers))
    assert result.code == 2
    assert f"does not let jobs read {data}/set" in result.err
    assert f"--data {data}/set" in result.err
    assert "'stage" in result.err
    assert not [event for event in result.events if event["event"] == "generation"]
    with running_servers(1, "--data", str(data)) as servers:
        result = rpcmp("drive", config, "--json", "--connect", connect(servers))
    assert seen(result, "stage") == seen(result, "data") == {str(file): "open"}
    assert result.code == 0


def test_code_that_needs_undeclared_access_fails_with_the_remedy(
    job: JobFolder, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("samples")
    config = spying(job, [], balance=ONE)
    train = f'data.train={{ callable = "spying:data", kwargs = {{ file = "{file}" }} }}'
    with running_servers(1) as servers:
        at = ("--connect", connect(servers), "--set", train)
        for place in ("driver", "stage"):
            result = rpcmp("drive", config, "--json", *at, "--set", f'data.at="{place}"')
            assert result.code != 0
            assert "PermissionError" in result.err
            assert "`[data] paths`" in result.err
            assert "`--data DIR`" in result.err


def test_a_killed_confined_worker_is_replaced_with_the_same_bits(
    job: JobFolder, temporary: Path
) -> None:
    config = spying(job, [])
    many = ("--set", "steps=60", "--set", "num_microbatches=1")

    def kill(run: RunningHere) -> None:
        run.wait_for_line('"step": 2,')
        pid = run.result().event("generation")["workers"]["stage0"]["pid"]
        os.kill(pid, signal.SIGKILL)

    with running_servers(2) as servers:
        at = ("--connect", connect(servers))
        result = rpcmp("drive", config, "--json", *many, *at, during=kill)
        poll_for(lambda: not leftover(temporary), "temporary folders to go")
    assert [event["stage"] for event in result.events if event["event"] == "fault"] == ["stage0"]
    assert sha256(result) == sha256(rpcmp("drive", config, "--json", *many))


def test_doctor_reports_the_confinement_of_a_jobs_code(job: JobFolder) -> None:
    config = spying(job, [], balance=ONE)
    with running_servers(1) as servers:
        result = rpcmp("doctor", config, "--json", "--connect", connect(servers))
    found = [line for line in result.out.splitlines() if "confinement" in line]
    assert "Landlock ABI" in "".join(found)
    assert "seccomp" in "".join(found)


WRITING = """
import os, subprocess, zoo
from torch import nn

class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = [os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (0, 1, 2)]
        print("KINDS", *kinds, flush=True)
        os.write(1, b"by descriptor \\x1b]0;title\\x07\\n")
        subprocess.run(["echo", "by a program"])
        os.write(2, b"the last")
        for number in range(10_000):
            os.write(2, b"again %d\\n" % number)

    def forward(self, x):
        return x

def layers():
    return [*zoo.mlp(), ("writing", Writing)]
"""


def test_a_confined_child_writes_to_no_terminal(job: JobFolder) -> None:
    (job.folder / "writing.py").write_text(WRITING)
    config = job.config(
        """
        steps = 2
        [model]
        layers = "writing:layers"
        balance = [2, 3]
        """
    )
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "rpcmp", "drive", str(config)]
    command += ["--set", "security.confine=true"]
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            while part := _read(ours):
                shown += part
        finally:
            process.kill()
            os.close(ours)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "KINDS /dev/null pipe pipe" in text
    for line in ("by descriptor", "by a program", "the last"):
        assert line in text
    assert "\x1b]0;title" not in text
    assert text.count("again") < 100  # counted, and not shown


def _read(terminal: int) -> bytes:
    """Return a terminal's next output; empty once it is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
