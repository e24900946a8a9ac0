"""Streams end to end: at the driver and at the stages, interrupted, and of well-known packages."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.faults import Committed, Faults, committed, drive
from tests.support.processes import JobFolder, Result, rpcmp

BY_STEP = 'scheduler_interval = "step"'


def data(
    train: str,
    at: str = "driver",
    num_workers: int = 0,
    more: str = "",
    test: str = '"streams:Plain"',
) -> str:
    return f"""
        [data]
        train = {train}
        test = {test}
        batch_size = 8
        at = "{at}"
        num_workers = {num_workers}
        {more}
    """


def job_of(job: JobFolder, section: str) -> Path:
    return job.config(f"""
        steps = 7
        num_microbatches = 3
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        {section}
    """)


def warnings(result: Result) -> str:
    return "\n".join(event["text"] for event in result.events if event["event"] == "warning")


@pytest.mark.parametrize("at", ["driver", "stage"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_have_the_bits_of_one_process(job: JobFolder, at: str, num_workers: int) -> None:
    section = data('"streams:Plain"', at, num_workers)
    proved = rpcmp("verify", job_of(job, section), "--steps", "7")
    assert "identical: 7 losses" in proved.out, proved.err


def test_both_places_evaluate_the_same_stream(job: JobFolder) -> None:
    found = []
    for at in ("driver", "stage"):
        result = rpcmp("drive", job_of(job, data('"streams:Kept"', at)), "--json")
        assert result.code == 0, result.err
        assert not warnings(result)
        found.append([result.event("eval")["loss"], *committed(result)])
    assert found[0] == found[1]


@pytest.mark.parametrize("at", ["driver", "stage"])
@pytest.mark.parametrize("name", ["Plain", "Kept"])
def test_a_killed_worker_changes_nothing(job: JobFolder, name: str, at: str) -> None:
    log = job.folder / "read"
    kwargs = f', kwargs = {{ samples = 21, log = "{log}" }}' if name == "Kept" else ""
    section = data(f'{{ callable = "streams:{name}"{kwargs} }}', at)
    expected = committed(drive(Faults(job).config(BY_STEP, stages=2, sections=section)))
    log.unlink(missing_ok=True)
    faults = Faults(job).fail_at(0, 4, "backward", "SIGKILL")
    result = drive(faults.config(BY_STEP, stages=2, sections=section))
    assert committed(result) == expected
    assert len(faults.triggered) == 1
    told = "data.train has no state_dict: its first 3 mini-batches are read again, which takes"
    assert (told in warnings(result)) == (name == "Plain")
    if name == "Kept" and at == "driver":  # the last mini-batches twice at most, in either place
        assert len(log.read_text().splitlines()) <= 8 * (6 + 3)


def test_a_run_goes_on_where_its_stream_was(job: JobFolder) -> None:
    log = job.folder / "read"
    section = data(f'{{ callable = "streams:Kept", kwargs = {{ log = "{log}" }} }}')
    expected = committed(drive(Faults(job).config(BY_STEP, stages=2, sections=section)))
    config = Faults(job).config(
        BY_STEP, stages=2, sections=f'{section}\n[checkpoint]\ndir = "saved"\nevery_steps = 1'
    )
    before = rpcmp("drive", config, "--json", "--steps", "4")
    assert before.code == 0, before.err
    log.unlink()
    after = rpcmp("drive", config, "--json", "--resume")
    assert committed(after) == (expected[0][4:], expected[1])
    assert len(log.read_text().splitlines()) == 8 * 2
    refused = rpcmp("drive", config, "--json", "--resume", "--set", "data.num_workers=2")
    assert refused.code == 2
    assert "leave data.num_workers as it was" in refused.err


def test_a_stream_that_is_another_after_a_fault_is_told(job: JobFolder) -> None:
    faults = Faults(job).fail_at(0, 4, "backward", "SIGKILL")
    result = drive(faults.config(BY_STEP, stages=2, sections=data('"streams:Unsteady"')))
    assert result.code == 0, result.err
    assert "data.train yields other samples than before the run was interrupted" in warnings(result)


def test_a_run_of_another_dataset_is_not_gone_on_with_on_a_stream(job: JobFolder) -> None:
    saved = '[checkpoint]\ndir = "saved"\nevery_steps = 1'
    sections = data('"zoo:regression"') + saved
    before = rpcmp("drive", Faults(job).config(BY_STEP, stages=2, sections=sections), "--json")
    assert before.code == 0, before.err
    config = Faults(job).config(BY_STEP, stages=2, sections=data('"streams:Plain"') + saved)
    refused = rpcmp("drive", config, "--json", "--resume", "--steps", "9")
    assert refused.code == 2
    assert "the run has 6 steps, of which 0 are known to be of the stream" in refused.err


def test_hosts_whose_streams_differ_are_named(job: JobFolder) -> None:
    result = rpcmp("drive", job_of(job, data('"streams:Unsteady"', "stage")), "--json")
    assert result.code == 2
    assert "data.train yields other samples in step 1 at stage 'stage0' than at stage 'stage1'" in (
        " ".join(result.err.split())
    )


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_what_is_measured_before_a_run_reads_a_stream_too(job: JobFolder, at: str) -> None:
    config = job_of(job, data('"streams:Plain"', at))
    whole = drive(config)
    auto = ("--set", "model.balance=auto", "--set", "model.num_stages=2")
    assert committed(drive(config, *auto)) == committed(whole)
    small = (
        "--set",
        "optimizer={ callable = 'torch.optim:SGD', kwargs = { lr = 1e-9 } }",
        "--microbatches",
        "2,3",
        "--schedules",
        "1f1b",
    )
    tuned = rpcmp("tune", config, *auto, *small, "--budget", "5", "--json")
    assert tuned.code == 0, tuned.err
    assert {each["num_microbatches"] for each in json.loads(tuned.out)["settings"]} == {2, 3}


def test_a_stream_needs_steps(job: JobFolder) -> None:
    for at in ("driver", "stage"):
        config = job_of(job, data('"streams:Plain"', at))
        config.write_text(config.read_text().replace("steps = 7", "epochs = 2"))
        result = rpcmp("drive", config, "--json")
        assert result.code == 2
        assert "data.train is a stream, which has no length: say with `steps`" in " ".join(
            result.err.split()
        )
        assert "step" not in {event["event"] for event in result.events}


def shards(folder: Path) -> str:
    """Write two tar files of 16 samples, as webdataset reads them; return a `data.train`."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for sample in range(16):
                for kind, size in (("x", 8), ("y", 1)):
                    file = io.BytesIO()
                    torch.save(torch.rand(size, generator=generator), file)
                    about = tarfile.TarInfo(f"{number}-{sample:03}.{kind}.pth")
                    about.size = file.tell()
                    tar.addfile(about, io.BytesIO(file.getvalue()))
    return f'{{ callable = "streams:of_webdataset", kwargs = {{ folder = "{folder}" }} }}'


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Committed]:
    """The commits of a stream of each package without a fault, read at the stages."""

    def run(package: str) -> Committed:
        job = JobFolder(tmp_path_factory.mktemp(package) / "job")
        section = data_of(package, "stage", job.folder)
        return committed(drive(Faults(job).config(BY_STEP, stages=2, sections=section)))

    return functools.cache(run)


def data_of(package: str, at: str, folder: Path) -> str:
    train, more, num_workers, test = f'"streams:of_{package}"', "", 2, '"streams:Plain"'
    if package == "webdataset":
        train = shards(folder / "shards")
    if package == "datasets":
        more, test = 'collate = "streams:columns"', train
    if package == "torchdata":
        num_workers = 0
    return data(train, at, num_workers, more, test)


@pytest.mark.parametrize("at", ["driver", "stage"])
@pytest.mark.parametrize("package", ["datasets", "webdataset", "torchdata"])
def test_streams_of_packages(
    job: JobFolder, package: str, at: str, undisturbed: Callable[[str], Committed]
) -> None:
    """A run that loses a worker is one without a fault, wherever samples are loaded."""
    faults = Faults(job).fail_at(0, 4, "backward", "SIGKILL")
    section = data_of(package, at, job.folder)
    result = drive(faults.config(BY_STEP, stages=2, sections=section))
    assert committed(result) == undisturbed(package)
    assert len(faults.triggered) == 1
    assert ("are read again" in warnings(result)) == (package == "webdataset")
