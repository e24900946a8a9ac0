"""Replicas of a stage on real workers, including lost replicas and replicas that do not match.

tests/group/test_replicas.py compares more jobs with the bits of one process.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcmp import parameters_sha256
from rpcmp.config import loader
from tests.support.faults import STEP, Faults, committed, drive
from tests.support.localgroup import unsplit
from tests.support.pool import lend_servers
from tests.support.processes import JobFolder, connect, rpcmp, running, running_server
from tests.support.replicated import ALONE, MIDDLE, PIPELINES, committed_without_fault, replicated
from tests.support.runs import checkpoints_in

# Recovery


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, str]], str]:
    """Return losses and parameters of the job without a fault."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("backward", "SIGKILL"),
        pytest.param("saving", "host", marks=pytest.mark.cluster),
    ],
)
def test_losing_a_replica_changes_no_bit(
    job: JobFolder,
    fault_free: tuple[list[tuple[int, str]], str],
    phase: str,
    how: str,
) -> None:
    faults = Faults(job).fail_at(MIDDLE, STEP, how, phase)
    result = drive(replicated(faults))
    assert committed(result) == fault_free
    assert len([event for event in result.events if event["event"] == "recovered"]) == 1
    assert not [
        event for event in result.events if event["event"] == "resumed"
    ]  # no checkpoint was read
    if how == "host":  # the other replica has the whole state
        assert "'stage1:" in result.event("fault")["error"]


@pytest.mark.cluster
def test_replicas_give_the_bits_of_one_process_and_resume_with_them(
    job: JobFolder,
) -> None:
    config = job.config(
        PIPELINES.replace("[model]", 'checkpoint = { dir = "saved", every_steps = 2 }\n[model]')
    )
    bundled = ("--set", "microbatches_per_message=2")
    first = rpcmp("drive", config, "--json", "--set", "steps=4", *bundled)
    assert first.code == 0, first.err
    manifest = checkpoints_in(job.folder / "saved").valid()[0]
    assert [part.name for part in manifest.stages] == ["stage0", "stage1"]
    resumed = rpcmp("drive", config, "--json", "--resume", "--set", "steps=6", *bundled)
    assert resumed.event("resumed")["step"] == 4
    whole = unsplit(loader.load_config(config, ["steps=6", bundled[-1]]))
    assert [*first.losses, *resumed.losses] == whole.losses
    assert resumed.event("summary")["parameters_sha256"] == parameters_sha256(whole.state)


# Shares by speed


@pytest.mark.cluster
def test_a_slow_replica_gets_a_smaller_share_that_survives_resuming(job: JobFolder) -> None:
    config = job.config(
        f"""
        steps = 2
        num_microbatches = 8
        balance_replicas = true
        checkpoint = {{ dir = "saved" }}
        [model]
        layers = "zoo:sleepy"
        kwargs = {{ member = "stage0:1", marker = "{job.folder / "sleeps"}" }}
        [data]
        train = "zoo:regression"
        batch_size = 25
        [[stages]]
        replicas = 2
        """
    )
    result = rpcmp("drive", config, "--json")
    assert result.code == 0, result.err
    fast, slow = shares = result.event("shares")["shares"]["stage0"]
    assert fast > slow
    kept: Any = checkpoints_in(job.folder / "saved").valid()[0].config["stages"]
    assert kept[0]["shares"] == shares
    resumed = rpcmp("drive", config, "--json", "--resume", "--set", "steps=4")  # no stage sleeps
    assert resumed.code == 0, resumed.err
    assert resumed.event("shares")["shares"] == {"stage0": shares}
    shared = ["balance_replicas=false", f"stages.0.shares={shares}"]
    whole = unsplit(loader.load_config(config, ["steps=4", *shared]))
    assert resumed.event("summary")["parameters_sha256"] == parameters_sha256(whole.state)


@contextlib.contextmanager
def servers_of_replicas(*environments: dict[str, str]) -> Iterator[str]:
    """Start servers of the replicas of stage 0 with these environments; yield their addresses."""
    with contextlib.ExitStack() as stack:
        runs = []
        for replica, environment in enumerate(environments):
            command = ("serve", "--stage", "0", "--replica", str(replica))
            with pytest.MonkeyPatch.context() as patch:
                for key, value in environment.items():
                    patch.setenv(key, value)
                runs.append(stack.enter_context(running(*command, "--listen", "127.0.0.1:0")))
        yield ",".join(run.wait_for_line(r"SERVING on (\S+)")[1] for run in runs)


def on_path(*folders: Path) -> dict[str, str]:
    """Return an environment in which a process searches these folders for modules first."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, before)])}


# Replicas that do not match


def test_a_server_of_another_replica_is_refused(job: JobFolder) -> None:
    config = job.config(ALONE.replace("replicas = 3", "replicas = 2"))
    third = ("--stage", "0", "--replica", "2", "--listen", "127.0.0.1:0")
    with lend_servers(1) as (first,), running_server(*third) as second:
        result = rpcmp("drive", config, "--connect", connect([first, second]))
    assert result.code == 2
    assert "serves stage 0 replica 2, not stage 0 replica 1; check `addresses`" in result.err


FILES = {
    "my_model.py": "import pathlib, sys\n"
    "sys.path.insert(0, str(pathlib.Path(__file__).parent / 'site-packages'))\n"
    "import blocks\nimport installed\n"
    "def layers():\n    return [('only', lambda: blocks.Block(8, 1))]\n",
    "blocks.py": "from torch import nn\nclass Block(nn.Linear):\n    pass\n",
    "losses.py": "def mse(outputs, targets):\n    return (outputs - targets).square().mean()\n",
    "site-packages/installed.py": "__version__ = '1.0'\n",
}


@pytest.mark.cluster
def test_replicas_with_another_loss_or_package_are_refused_before_the_first_step(
    job: JobFolder, tmp_path: Path
) -> None:
    """Both code that the config names and installed packages are compared."""
    for name, text in FILES.items():
        (job.folder / name).parent.mkdir(exist_ok=True)
        (job.folder / name).write_text(text)
    config = job.config(
        'loss = "losses:mse"\n' + ALONE.replace("zoo:mlp", "my_model:layers").replace("= 3", "= 2")
    )
    other = shutil.copytree(job.folder, tmp_path / "other")
    paths = [on_path(folder) for folder in (job.folder, other)]
    changes = {
        "losses.py": ("# mean\n", "the code of 'losses' is"),
        "site-packages/installed.py": (
            "__version__ = '1.1'\n",
            "the version of 'installed' is 1.0 in replica 0 and 1.1 in replica 1",
        ),
    }
    options = ("--set", "ship_code=false", "--set", "steps=1")
    with servers_of_replicas(*paths) as addresses:
        for name, (more, message) in changes.items():
            (other / name).write_text(FILES[name] + more)
            result = rpcmp("drive", config, "--json", "--connect", addresses, *options)
            assert result.code == 2, result.out
            assert not result.losses
            assert f"replicas 0 and 1 of stage 'stage0' are not the same model: {message}" in (
                result.err
            )
            assert f"replica 1 on {platform.node()}: install the same on" in result.err
            (other / name).write_text(FILES[name])
        (other / "unused.py").write_text("# nobody imports it\n")
        same = rpcmp("drive", config, "--json", "--connect", addresses, *options)
    assert len(same.losses) == 1, same.err


def test_fewer_micro_batches_than_replicas_is_a_warning(job: JobFolder) -> None:
    result = rpcmp("drive", job.config(ALONE), "--json", "--set", "num_microbatches=2")
    assert result.code == 0, result.err
    assert result.event("warning")["text"] == (
        "stage 'stage0': replica 2 will have nothing to do, since a step has only 2 micro-batches; "
        "raise num_microbatches"
    )
