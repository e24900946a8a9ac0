"""A hostile member of a job, whose host or certificate was taken over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lan import issue, serving
from tests.support.processes import JobFolder, connect, rpcmp

JOB = """
steps = 10
[model]
layers = "hostile:layers"
kwargs = {{ victim = "{victim}", secret = "{secret}", made = "{made}" }}
balance = [1, 1]
"""


@pytest.mark.parametrize("victim", ["stage0:0", "driver"])
def test_a_hostile_stage_reaches_no_file_of_another_host_and_is_named(
    victim: str, job: JobFolder, tmp_path: Path
) -> None:
    secret, made = tmp_path / "secret", tmp_path / "made"
    secret.write_text("xyzzy1")
    secret.chmod(0o600)
    config = job.config(JOB.format(victim=victim, secret=secret, made=made))
    certs = issue(tmp_path / "certs", "127.0.0.1", "127.0.0.1")
    with (
        serving(0, "127.0.0.1:0", certs) as first,
        serving(1, "127.0.0.1:0", certs) as second,
    ):
        where = ("--connect", connect([first, second]), "--certs", certs / "driver")
        result = rpcmp("drive", config, "--json", *where)
        everything = "\n".join((result.out, result.err, *first.run.err, *second.run.err))
    assert result.code == 2, result.err
    end = result.event("end")
    assert "a message of type SCRIPT_CALL" in end["error"]
    assert "stage1:0 at 127.0.0.1:" in end["error"]
    assert not [event for event in result.events if event["event"] == "fault"]
    assert "xyzzy1" not in everything
    assert not made.exists()
