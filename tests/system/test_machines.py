"""Losses of machines that share neither memory nor disks, and the copies of their snapshots."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_model

from tests.support.faults import Committed, committed
from tests.support.hosts import LOSING, assert_went_on, committed_without_fault, slow_config
from tests.support.lan import BOOT_ID, mounted
from tests.support.processes import (
    JobFolder,
    Server,
    connect,
    describe,
    rpcmp,
    running,
    running_server,
)
from tests.support.runs import checkpoints_in
from tests.zoo import architectures, unsplit


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """The commits of a run without a loss."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@contextlib.contextmanager
def server(
    stage: int,
    address: str = "127.0.0.1:0",
    under: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> Iterator[Server]:
    """Start a stage server; only the server accesses files, so its workers may run anywhere."""
    which = ("--stage", str(stage), "--listen", address, *options)
    with running_server(*which, owner=f"stage {stage}", under=under) as started:
        yield started


@pytest.fixture
def another_machine(tmp_path: Path) -> tuple[str, ...]:
    """Return a command that runs another one as if on a machine with its own boot."""
    boot = tmp_path / "boot_id"
    boot.write_text("another-machine\n")
    return mounted(f"--bind {boot} {BOOT_ID}")


@pytest.fixture
def elsewhere(another_machine: tuple[str, ...], job: JobFolder) -> tuple[str, ...]:
    """Return a command that runs another one on a machine with its own disk for checkpoints."""
    disk = job.folder / "saved"
    disk.mkdir()
    return (*another_machine, *mounted(f"-t tmpfs rpcmp {disk}"))


def test_a_lost_machine_costs_one_step_at_most(
    job: JobFolder, fault_free: Committed, elsewhere: tuple[str, ...]
) -> None:
    """The machines share no memory, so snapshots travel between them."""
    with (
        server(0) as here,
        server(1, under=elsewhere) as there,
        running("drive", slow_config(job), "--json", "--connect", connect([here, there])) as run,
    ):
        run.wait_for_line(LOSING)
        psutil.Process(there.pid).kill()
        run.wait_for_line('"waiting"')
        with server(1, there.address, under=elsewhere):
            assert_went_on(run.wait(), fault_free)


def test_a_machine_with_an_empty_disk_fetches_its_checkpoint_files(
    job: JobFolder, fault_free: Committed, elsewhere: tuple[str, ...]
) -> None:
    config = slow_config(job)
    saves = ("--set", "checkpoint.dir=saved", "--set", "checkpoint.every_steps=10")
    with server(0) as here:
        with server(1, under=elsewhere) as there:
            where = ("--connect", connect([here, there]))
            first = rpcmp("drive", config, "--json", "--steps", "10", *saves, *where)
            assert first.event("checkpoint")["step"] == 10
        with server(1, under=elsewhere) as fresh:
            where = ("--connect", connect([here, fresh]))
            result = rpcmp("drive", config, "--resume", "--json", *saves, *where)
    assert committed(result) == (fault_free[0][10:], fault_free[1])


def test_machines_with_empty_disks_get_the_drivers_files(
    job: JobFolder, fault_free: Committed, elsewhere: tuple[str, ...]
) -> None:
    config = slow_config(job)
    saves = ("--set", "checkpoint.dir=saved", "--set", "checkpoint.every_steps=10")
    assert rpcmp("drive", config, "--json", "--steps", "10", *saves).code == 0
    with server(0, under=elsewhere) as first, server(1, under=elsewhere) as second:
        where = ("--connect", connect([first, second]))
        result = rpcmp("drive", config, "--resume", "--json", *saves, *where)
    assert committed(result) == (fault_free[0][10:], fault_free[1])


CONFIGURED = """
import json
from pathlib import Path
import rpcmp
from tests.zoo import architectures

def net():
    return architectures.module(**json.loads((Path(rpcmp.init_path()) / "config.json").read_text()))
"""


@pytest.fixture
def only_here(job: JobFolder) -> tuple[Path, Path, tuple[str, ...]]:
    """Weights of "adapted", their path as a driver sees them, and a command to run that under."""
    hidden, place = job.folder / "hidden", job.folder / "place"
    (hidden / "base").mkdir(parents=True)
    place.mkdir()
    torch.manual_seed(5)
    save_model(unsplit.Language(), str(hidden / "base" / "model.safetensors"))
    (hidden / "base" / "config.json").write_text('{"name": "adapted"}')
    (job.folder / "net.py").write_text(CONFIGURED)
    return hidden / "base", place / "base", mounted(f"--bind {hidden} {place}")


def adapted(job: JobFolder) -> Path:
    text = architectures.job("adapted", 2, "1f1b")
    own = ('module = "tests.zoo.architectures:module"\nkwargs = { name = "adapted" }\n', "")
    return job.config(text.replace(*own).replace("[model]", '[model]\nmodule = "net:net"'))


@pytest.mark.parametrize("options", [(), ("--confine",)], ids=["", "confined"])
def test_machines_without_the_weights_get_those_of_their_layers_from_the_driver(
    job: JobFolder, only_here: tuple[Path, Path, tuple[str, ...]], options: tuple[str, ...]
) -> None:
    """Frozen ones: a worker that is started again reads them again, a new server is sent them."""
    config, long = adapted(job), ("--json", "--steps", "60")
    weights, seen, drives = only_here
    whole = rpcmp("drive", config, *long, "--set", f'init="{weights}"')
    with server(0, options=options) as here, server(1, options=options) as there:
        init = ("--set", f'init="{seen}"', "--connect", connect([here, there]))
        with running("drive", config, *long, *init, under=drives) as run:
            run.wait_for_line('"event": "step", "step": 3,')
            worker = describe(there).worker_pid
            os.kill(worker, signal.SIGKILL)
            run.wait_for_line('"recovered"')
            psutil.Process(there.pid).kill()
            run.wait_for_line('"waiting"')
            with server(1, there.address, options=options):
                result = run.wait()
    assert committed(result) == committed(whole)
    sent = [
        event["stage"]
        for event in result.events
        if event["event"] == "log" and "it is sent" in event["text"]
    ]
    assert sorted(sent) == ["stage0", "stage1", "stage1"]


def test_layers_are_measured_without_the_weights(
    job: JobFolder, only_here: tuple[Path, Path, tuple[str, ...]]
) -> None:
    """Unless what builds them reads them; the error says then that they are not sent for this."""
    weights, seen, drives = only_here
    options = ("--json", "--set", "model.balance=auto", "--set", f'init="{seen}"')
    plain = job.config(architectures.job("adapted", 2, "1f1b"), "plain.toml")
    whole = rpcmp("drive", plain, "--json", "--set", f'init="{weights}"')
    with server(0) as here, server(1) as there:
        where = ("--connect", connect([here, there]))
        with running("drive", plain, *options, *where, under=drives) as run:
            assert committed(run.wait()) == committed(whole)
        with running("drive", adapted(job), *options, *where, under=drives) as run:
            refused = run.wait()
    assert refused.code == 2
    assert "and it is not sent for measurements: if that is why" in refused.err


def test_weights_that_no_machine_has_are_an_error(
    job: JobFolder, another_machine: tuple[str, ...]
) -> None:
    config = job.config(architectures.job("language", 2, "1f1b"))
    with server(0, under=another_machine) as here, server(1, under=another_machine) as there:
        where = ("--connect", connect([here, there]))
        result = rpcmp("drive", config, "--set", 'init="nowhere"', *where)
    assert result.code == 2
    assert "there is no init = " in result.err
    assert "nor on the driver's host" in result.err


def test_machines_may_share_a_disk(
    job: JobFolder, fault_free: Committed, another_machine: tuple[str, ...]
) -> None:
    config = slow_config(job)
    section = {"dir": '"saved"', "every_steps": 4, "keep": 2, "shared": "true"}
    saves = [part for key in section for part in ("--set", f"checkpoint.{key}={section[key]}")]
    with server(0) as here, server(1, under=another_machine) as there:
        where = ("--connect", connect([here, there]))
        first = rpcmp("drive", config, "--json", "--steps", "12", *saves, *where)
        folder = checkpoints_in(job.folder / "saved")
        assert [manifest.step for manifest in folder.valid()] == [12, 8]
        names = ["manifest.json", "stage0.safetensors", "stage1.safetensors"]
        assert sorted(file.name for file in folder.path_of(12).iterdir()) == names
        assert not folder.path_of(4).exists()
        assert not [event for event in first.events if event["event"] == "warning"]
        result = rpcmp("drive", config, "--resume", "--json", *saves, *where)
    assert committed(result) == (fault_free[0][12:], fault_free[1])


def test_leftovers_of_a_failed_run_are_removed_on_every_machine(
    job: JobFolder, elsewhere: tuple[str, ...]
) -> None:
    config = job.config("""
        steps = 10
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        [checkpoint]
        dir = "saved"
        every_steps = 1000
        [data]
        train = { callable = "zoo:Unreadable", kwargs = { at = 37 } }
        batch_size = 10
        shuffle = false
    """)
    disk = job.folder / "saved"
    with server(0) as here, server(1, under=elsewhere) as there:
        of_there = Path(f"/proc/{there.pid}/root{disk}")
        where = ("--connect", connect([here, there]), "--json")
        assert rpcmp("drive", config, *where).code == 1
        left = {path.name for path in disk.iterdir()}
        assert len(left) == 1
        assert {path.name for path in of_there.iterdir()} == left
        mended = rpcmp("drive", config, *where, "--set", "data.train.kwargs.at=-1")
        assert mended.code == 0, mended.err
        for one in (disk, of_there):
            (kept,) = one.iterdir()
            assert kept.name not in left
            assert [path.name for path in kept.iterdir()] == ["step-00000010"]
