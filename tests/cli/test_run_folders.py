"""Run folders of real runs, also on failing disks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rpcmp.cli import cli
from rpcmp.observability import run_folder
from rpcmp.observability.events import StepEvent, SummaryEvent
from rpcmp.observability.run_report import read
from rpcmp.observability.trace import chrome
from tests.support.places import ROOT
from tests.support.processes import JobFolder, rpcmp

LOGGERS = """
from pathlib import Path


def good(config, file):
    names = []

    def tell(event):
        names.append(event["event"])
        if event["event"] == "end":
            Path(config.folder, file).write_text(" ".join(names))

    return tell


def bad(config):
    def tell(event):
        if event["event"] == "step" and event["step"] == 2:
            raise OSError("no net")

    return tell
"""


def test_observing_commands_work_on_a_run(job: JobFolder) -> None:
    (job.folder / "my_logs.py").write_text(LOGGERS)
    config = job.config("""
        steps = 4
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        [log]
        folder = "kept/here"
        tensorboard = "curves"
        loggers = [{ callable = "my_logs:good", kwargs = { file = "events" } }, "my_logs:bad"]
    """)
    result = rpcmp("drive", config)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    warnings = [line for line in lines if "warning" in line]
    assert len(warnings) == 1
    assert "the logger 'my_logs:bad' failed: OSError: no net" in warnings[0]
    (path,) = (job.folder / "kept" / "here").glob("job-*")
    run = read(path)
    assert run.info.outcome == "done"
    assert set(run.info.versions) == {"rpcmp", "torch", "python"}
    assert run.config["model"]["balance"] == [2, 2]
    assert [event.step for event in run.all(StepEvent)] == [1, 2, 3, 4]
    assert run.events[-1].event == "end"
    assert run.all(SummaryEvent)[0].parameters_sha256 in result.out
    log = (path / run_folder.LOG).read_text().splitlines()
    assert set(lines) - set(log) <= {line for line in lines if "step" in line}
    events = (job.folder / "events").read_text().split()
    assert (events.count("step"), events[-1]) == (4, "end")
    (curves,) = (job.folder / "curves").iterdir()
    found = EventAccumulator(str(curves)).Reload()
    assert [point.step for point in found.Scalars("loss")] == [1, 2, 3, 4]
    assert {node.name for node in found.Graph().node} >= {"stage0", "stage1"}
    trace = chrome.read(path / run_folder.TRACE)
    for track in trace.tracks:
        assert {span.step for span in track.spans} == {1, 2, 3, 4}
    made = CliRunner().invoke(cli, ["report", str(path)])
    assert (made.exit_code, made.output) == (0, f"{path / 'report.html'}\n")
    assert f'"name":"{path.name}"' in (path / "report.html").read_text()


def test_a_bad_logger_fails_before_the_run_starts(job: JobFolder) -> None:
    config = job.config("""
        [model]
        layers = "zoo:mlp"
        [log]
        loggers = ["zoo:nothing_of_that_name"]
    """)
    result = rpcmp("drive", config, "--json")
    assert (result.code, result.out) == (2, "")
    assert "log.loggers.0 = 'zoo:nothing_of_that_name' does not import" in result.err
    assert not (job.folder / "runs").exists()


FULL_DISK = """
import resource, sys
from pathlib import Path
from rpcmp.cli.observing import create_observers
from rpcmp.observability.observers import watching
from tests.support import runs
from tests.support.runevents import typed

resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # where a full disk would begin
of = runs.config(Path(sys.argv[1]))
shown = []
with watching(create_observers(of), shown.append) as report:
    for event in runs.events(of, [1.0 / step for step in range(1, 1001)])[:-1]:
        report(typed(event))
names = [event.event for event in shown]
assert names.count("step") == 1000 and names[-1] == "end", names
(text,) = [event.text for event in shown if event.event == "warning"]
print(text)
"""


def test_a_full_disk_costs_the_folder_and_not_the_run(tmp_path: Path) -> None:
    root = ROOT
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    why = "OSError: [Errno 27] File too large"
    assert result.stdout == f"the run folder failed: {why}; the run goes on without it\n"
    (path,) = (tmp_path / "runs").glob("job-*")
    steps = [event.step for event in read(path).all(StepEvent)]
    assert steps == list(range(1, len(steps) + 1))
    assert 0 < len(steps) < 1000
