"""Jobs whose certificates are revoked before they start or while they run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rpcmp.net.identity import CRL
from tests.support.lan import cli, issue, serving
from tests.support.processes import JobFolder, rpcmp, running

HERE = "127.0.0.1"


CONFIG = '[model]\nlayers = "zoo:mlp"\nbalance = [4]\n'


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    return issue(tmp_path / "certs", HERE, "host-b")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stage0", "is not trusted: certificate revoked"),
        ("driver", "says that our certificate is revoked"),
    ],
)
def test_a_job_with_a_revoked_certificate_does_not_start(
    certs: Path, job: JobFolder, name: str, why: str
) -> None:
    with serving(0, f"{HERE}:0", certs) as server:
        cli(certs, "revoke", name)
        if name == "driver":  # the driver itself does not know about it
            (certs / "driver" / CRL).unlink()
        config = job.config(CONFIG)
        result = rpcmp("drive", config, "--connect", server.address, "--certs", certs / "driver")
    assert result.code == 2
    assert why in result.err
    assert server.address in result.err


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stage0", "is not trusted: certificate revoked"),
        pytest.param("driver", "says that our certificate is revoked", marks=pytest.mark.cluster),
    ],
)
def test_a_running_job_ends_when_a_certificate_is_revoked(
    certs: Path, job: JobFolder, name: str, why: str
) -> None:
    with serving(0, f"{HERE}:0", certs) as server:
        copied = certs.parent / "copied"
        shutil.copytree(certs / "driver", copied)
        config = job.config(CONFIG)
        where = ("--connect", server.address, "--certs", copied, "--steps", "1000000", "--json")
        with running("drive", config, *where) as run:
            run.wait_for_line(r'"event": "step"')
            cli(certs, "revoke", name)
            if name == "stage0":
                shutil.copy(certs / CRL, copied)
            ended = run.wait()
        assert server.run.process.poll() is None
    assert ended.code == 2
    assert why in ended.err
    assert server.address in ended.err
