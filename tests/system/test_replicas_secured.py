"""Replicas and shared weights across hosts with mutual TLS: the bits of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.support.lan import Host, cli, issue, lan
from tests.support.processes import JobFolder, rpcmp, running, running_server
from tests.support.tiedjobs import BODY

STAGES = """
    [[stages]]
    [[stages]]
    replicas = 2
"""


@contextlib.contextmanager
def serving(host: Host, stage: int, replica: int, certs: Path) -> Iterator[None]:
    """Start a stage server at its default port."""
    who = ("--stage", str(stage), "--replica", str(replica))
    owner = f"stage {stage + replica}"  # each is in a network of its own
    with running_server(*who, "--certs", certs, owner=owner, under=host.inside):
        yield


def test_tied_replicas_under_tls_give_the_bits_of_one_process(
    job: JobFolder, tmp_path: Path
) -> None:
    config = job.config(BODY.replace("[1, 2, 1]", "[2, 2]") + STAGES)
    plain = rpcmp("drive", config, "--json")
    assert plain.code == 0, plain.err
    with lan(2, tmp_path) as (one, other), contextlib.ExitStack() as started:
        certs = issue(tmp_path / "certs", one.name, one.name)
        cli(certs, "issue", "--stage", "1", "--name", "replica1", "--host", other.name)
        started.enter_context(serving(one, 0, 0, certs / "stage0"))
        started.enter_context(serving(one, 1, 0, certs / "stage1"))
        started.enter_context(serving(other, 1, 1, certs / "replica1"))
        names = f"{one.name},{one.name},{other.name}"
        options = ("--steps", "6", "--certs", str(certs / "driver"), "--connect", names)
        with running("verify", config, *options, under=other.inside) as run:
            verified = run.wait()
    assert "identical: 6 losses" in verified.out, verified.err
    assert verified.out.split()[-1] == plain.event("summary")["parameters_sha256"]
