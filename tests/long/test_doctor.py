"""`rpcmp doctor` with hosts that differ."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from tests.support.findings import failed
from tests.support.processes import (
    JobFolder,
    Server,
    connect,
    running,
)

MODEL = '[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]\n'


HOST = "127.0.0.1"


def test_doctor_names_code_that_differs_between_hosts(job: JobFolder, tmp_path: Path) -> None:
    """The config's files are not sent, so the code installed on each host applies."""
    with contextlib.ExitStack() as started:
        found = []
        for index in range(2):
            site = tmp_path / f"site{index}"
            shutil.copytree(job.folder, site / "installed")
            (site / "installed" / "__init__.py").write_text(f"version = {index}\n")
            command = (
                "serve",
                "--stage",
                str(index),
                "--listen",
                f"{HOST}:0",
                "--no-code",
                "--allow",
                "installed",
            )
            run = started.enter_context(running(*command, under=("env", f"PYTHONPATH={site}")))
            found.append(Server(run, run.wait_for_line(r"SERVING on (\S+)")[1]))
        config = job.config(
            'ship_code = false\n[model]\nlayers = "installed.zoo:mlp"\nbalance = [2, 2]\n'
            '[data]\ntrain = "installed.zoo:regression"\nbatch_size = 10'
        )
        with running(
            *("doctor", config, "--json", "--connect", connect(found)),
            under=("env", f"PYTHONPATH={tmp_path / 'site0'}"),
        ) as run:
            result = run.wait()
    findings = json.loads(result.out)["findings"]
    assert failed(findings) == [("stage1", "code")]
    assert "'installed' is other code than that of driver" in result.out
