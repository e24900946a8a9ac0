"""Streams end to end: at the driver and at the stages, interrupted, and of well-known packages.

Positions and what is read from them: tests/unit/data/test_streams.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import Faults, committed, drive
from tests.support.processes import JobFolder, Result, rpcmp
from tests.support.streamjobs import shards

BY_STEP = 'scheduler_interval = "step"'
AUTO = ("--set", "model.balance=auto", "--set", "model.num_stages=2")


def data(train: str, at: str = "driver", num_workers: int = 0, more: str = "") -> str:
    test = train if "collate" in more else '"streams:Plain"'  # which it has to collate as well
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


def train_of(name: str, folder: Path) -> str:
    """Return a `data.train`; of Kept, the samples that it yields are lines of a file "read"."""
    kwargs = f'samples = 21, log = "{folder / "read"}"' if name == "Kept" else ""
    if name == "of_webdataset":
        kwargs = f'folder = "{shards(folder / "shards")}"'
    return f'{{ callable = "streams:{name}", kwargs = {{ {kwargs} }} }}'


def warnings(result: Result) -> str:
    return "\n".join(event["text"] for event in result.events if event["event"] == "warning")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Runs of a stream without a fault."""

    def run(name: str, at: str, more: str = "") -> Result:
        job = JobFolder(tmp_path_factory.mktemp(name) / "job")
        section = data(train_of(name, job.folder), at, more=more)
        return drive(Faults(job).config(BY_STEP, stages=2, sections=section))

    return functools.cache(run)


@pytest.mark.parametrize(
    ("name", "at", "num_workers"),
    [
        ("Plain", "driver", 0),
        ("of_webdataset", "stage", 1),
        pytest.param("Plain", "driver", 2, marks=pytest.mark.cluster),
        pytest.param("Plain", "stage", 2, marks=pytest.mark.cluster),
    ],
)
def test_streams_have_the_bits_of_one_process(
    job: JobFolder, name: str, at: str, num_workers: int
) -> None:
    section = data(train_of(name, job.folder), at, num_workers)
    proved = rpcmp("verify", job_of(job, section), "--steps", "3")
    assert "identical: 3 losses" in proved.out, proved.err


@pytest.mark.cluster
def test_both_places_evaluate_the_same_stream(undisturbed: Callable[..., Result]) -> None:
    found = [undisturbed("Kept", at) for at in ("driver", "stage")]
    assert not any(map(warnings, found))
    first, second = ((run.event("eval")["loss"], committed(run)) for run in found)
    assert first == second


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param("Kept", "driver", marks=pytest.mark.cluster),
        ("Plain", "stage"),
        pytest.param("Kept", "stage", marks=pytest.mark.cluster),
        pytest.param("Plain", "driver", marks=pytest.mark.cluster),
    ],
)
def test_a_killed_worker_changes_nothing(
    job: JobFolder, name: str, at: str, undisturbed: Callable[..., Result]
) -> None:
    faults = Faults(job).fail_at(0, 4, "SIGKILL", "backward")
    section = data(train_of(name, job.folder), at)
    result = drive(faults.config(BY_STEP, stages=2, sections=section))
    assert committed(result) == committed(undisturbed(name, "stage"))
    assert len(faults.triggered) == 1
    told = "data.train has no state_dict: its first 3 mini-batches are read again, which takes"
    assert (told in warnings(result)) == (name == "Plain")
    if name == "Kept" and at == "driver":  # the last mini-batches twice at most, in either place
        assert len((job.folder / "read").read_text().splitlines()) <= 8 * (6 + 3)


@pytest.mark.cluster
def test_a_run_goes_on_where_its_stream_was(
    job: JobFolder, undisturbed: Callable[..., Result]
) -> None:
    expected = committed(undisturbed("Kept", "stage"))
    section = data(train_of("Kept", job.folder))
    config = Faults(job).config(
        BY_STEP, stages=2, sections=f'{section}\n[checkpoint]\ndir = "saved"\nevery_steps = 1'
    )
    before = rpcmp("drive", config, "--json", "--steps", "4")
    assert before.code == 0, before.err
    (job.folder / "read").unlink()
    after = rpcmp("drive", config, "--json", "--resume")
    assert committed(after) == (expected[0][4:], expected[1])
    assert len((job.folder / "read").read_text().splitlines()) == 8 * 2
    refused = rpcmp("drive", config, "--json", "--resume", "--set", "data.num_workers=2")
    assert refused.code == 2
    assert "leave data.num_workers as it was" in refused.err


def test_hosts_whose_streams_differ_are_named(job: JobFolder) -> None:
    result = rpcmp("drive", job_of(job, data('"streams:Unsteady"', "stage")), "--json")
    assert result.code == 2
    assert "data.train yields other samples in step 1 at stage 'stage0' than at stage 'stage1'" in (
        " ".join(result.err.split())
    )


@pytest.mark.cluster
@pytest.mark.parametrize("at", [pytest.param("driver", marks=pytest.mark.cluster), "stage"])
def test_a_balance_that_is_measured_before_a_run_reads_a_stream_too(
    job: JobFolder, at: str, undisturbed: Callable[..., Result]
) -> None:
    section = data(train_of("Plain", job.folder), at)
    measured = drive(Faults(job).config(BY_STEP, stages=2, sections=section), *AUTO)
    assert committed(measured) == committed(undisturbed("Plain", "stage"))


@pytest.mark.cluster
@pytest.mark.parametrize("at", ["driver", "stage"])
def test_a_stream_is_tuned(job: JobFolder, at: str) -> None:
    small = "optimizer={ callable = 'torch.optim:SGD', kwargs = { lr = 1e-9 } }"
    options = ("--microbatches", "2,3", "--schedules", "1f1b", "--budget", "5", "--json")
    config = job_of(job, data('"streams:Plain"', at))
    tuned = rpcmp("tune", config, *AUTO, "--set", small, *options)
    assert tuned.code == 0, tuned.err
    assert {each["num_microbatches"] for each in json.loads(tuned.out)["settings"]} == {2, 3}


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_a_stream_needs_steps(job: JobFolder, at: str) -> None:
    config = job_of(job, data('"streams:Plain"', at))
    config.write_text(config.read_text().replace("steps = 7", "epochs = 2"))
    result = rpcmp("drive", config, "--json")
    assert result.code == 2
    told = "data.train is a stream, which has no length: say with `steps`"
    assert told in " ".join(result.err.split())
    assert "step" not in {event["event"] for event in result.events}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("package", "at"), [("datasets", "stage"), ("webdataset", "driver"), ("torchdata", "stage")]
)
def test_streams_of_packages(
    job: JobFolder, package: str, at: str, undisturbed: Callable[..., Result]
) -> None:
    """A run that loses a worker is one without a fault, wherever samples are loaded."""
    faults = Faults(job).fail_at(0, 4, "SIGKILL", "backward")
    more = 'collate = "streams:columns"' if package == "datasets" else ""
    section = data(train_of(f"of_{package}", job.folder), at, num_workers=1, more=more)
    result = drive(faults.config(BY_STEP, stages=2, sections=section))
    assert committed(result) == committed(undisturbed(f"of_{package}", "stage", more))
    assert len(faults.triggered) == 1
    assert ("are read again" in warnings(result)) == (package == "webdataset")
