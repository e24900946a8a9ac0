"""The folder of a run, which can be read however the run ended. These tests start no processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rpcmp.cli.observing import create_observers
from rpcmp.config.files import MIB
from rpcmp.errors import ConfigError
from rpcmp.observability import run_folder, run_report
from rpcmp.observability.events import EvalEvent, Json, StepEvent, WarningEvent
from rpcmp.observability.run_folder import RunFolder, Thinning
from tests.support import runs
from tests.support.runevents import typed

LOSSES = [2.0, 1.0, 0.1 + 0.2]

DEEP = "[" * 100_000
LONG_NUMBER = f'{{"event": "step", "time": 1{"0" * 400}}}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a run that is done."""
    of = runs.config(tmp_path)
    return runs.write_run_folder(of, runs.events(of, LOSSES))


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def lines_of(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_run_folder_keeps_every_event_in_its_file(tmp_path: Path) -> None:
    of = runs.config(tmp_path)
    told = runs.events(of, LOSSES)
    path = runs.write_run_folder(of, told)
    assert path.parent == tmp_path / "runs"
    assert path.name.startswith("job-2")
    assert names(path) == [
        run_folder.CONFIG,
        run_folder.EVENTS,
        run_folder.LOG,
        run_folder.METRICS,
        run_folder.RUN,
    ]
    metrics = lines_of(path / run_folder.METRICS)
    assert [event["event"] for event in metrics] == ["step", "step", "step", "eval"]
    assert [event["loss"] for event in metrics[:3]] == LOSSES  # to the last bit
    others = [event["event"] for event in lines_of(path / run_folder.EVENTS)]
    assert others == ["run", "start", "timeline", "fault", "summary", "end"]
    assert (path / run_folder.LOG).read_text().split() == [event["event"] for event in told]
    record = run_report.read(path)
    assert {event.event for event in record.events} == {event["event"] for event in told}
    assert [event.time for event in record.events] == sorted(e["time"] for e in told)
    assert (record.info.outcome, record.info.run) == ("done", "abc")
    assert record.info.versions["torch"] == "2.13.0"


def test_run_folder_keeps_no_secrets(tmp_path: Path) -> None:
    log = {"loggers": [{"callable": "m:f", "kwargs": {"key": "a secret"}}]}
    of = runs.config(tmp_path, log=log)
    path = runs.write_run_folder(
        of, [event for event in runs.events(of, LOSSES) if event["event"] != "run"]
    )
    config = json.loads((path / run_folder.CONFIG).read_text())
    assert config["optimizer"]["kwargs"]["lr"] == 0.1
    assert config["optimizer"]["kwargs"]["note"].startswith("sha256:")
    assert all("a secret" not in file.read_text() for file in path.iterdir())


def test_the_folders_of_runs_stay_out_of_repositories(tmp_path: Path) -> None:
    of = runs.config(tmp_path)
    runs.write_run_folder(of, runs.events(of, LOSSES))
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n"
    (tmp_path / "mine").mkdir()
    of = runs.config(tmp_path, log={"folder": "mine"})
    runs.write_run_folder(of, runs.events(of, LOSSES))
    assert not (tmp_path / "mine" / ".gitignore").exists()  # the folder belongs to the user


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path) -> None:
    first = run_folder.make_folder(tmp_path, "job", 0.0)
    assert run_folder.make_folder(tmp_path, "job", 0.0).name == f"{first.name}-2"
    assert run_folder.make_folder(tmp_path, "job", 0.0).name == f"{first.name}-3"
    assert re.fullmatch(r"job-\d{8}-\d{6}", first.name)


@pytest.mark.parametrize("others", [0, 1])
def test_run_that_never_started_leaves_no_folder(tmp_path: Path, others: int) -> None:
    of = runs.config(tmp_path)
    for _ in range(others):
        runs.write_run_folder(of, runs.events(of, LOSSES))
    end = {"event": "end", "outcome": "failed", "error": "nobody answers", "time": 0.0}
    assert not runs.write_run_folder(of, [runs.run(of), end]).exists()
    assert (tmp_path / "runs").exists() == bool(others)


def test_a_run_that_is_resumed_names_the_newest_folder_of_the_run(tmp_path: Path) -> None:
    of = runs.config(tmp_path)
    begun, whole = runs.events(of, LOSSES)[:2], runs.events(of, LOSSES)
    resumed = {"event": "resumed", "step": 3, "run": "abc", "changed": [], "time": runs.BEGIN}
    first = runs.write_run_folder(of, whole)
    second = runs.write_run_folder(of, [{**begun[0], "job_id": "other"}, resumed, begun[1]])
    third = runs.write_run_folder(of, [{**begun[0], "job_id": "another"}, resumed, begun[1]])
    found = [run_report.read(path).info for path in (first, second, third)]
    assert [info.continues for info in found] == [None, first.name, second.name]
    assert {info.run for info in found} == {"abc"}


def test_a_line_that_was_cut_off_is_left_out_and_no_other(path: Path) -> None:
    file = path / run_folder.METRICS
    file.write_bytes(file.read_bytes()[:-5])
    record = run_report.read(path)
    assert [event.loss for event in record.all(StepEvent)] == LOSSES
    assert record.all(EvalEvent) == []


def test_a_folder_of_another_version_is_read(path: Path) -> None:
    (path / run_folder.EVENTS).write_text(
        '{"event": "of another version", "time": 1.0}\n'
        '{"event": "warning", "time": 2.0, "text": "careful", "advice": "none"}\n'
        '{"event": "timeline", "time": 3.0, "step": 1}\n'
    )
    record = run_report.read(path)
    assert record.all(WarningEvent) == [WarningEvent(text="careful", time=2.0)]
    assert [event.event for event in record.events[:2]] == ["warning", "timeline"]


def test_periodic_events_are_kept_more_and_more_rarely() -> None:
    thinning = Thinning()
    kept = [
        second
        for second in range(24 * 3600)
        if thinning.passes({"event": "vitals", "time": float(second)})
    ]
    assert kept[:4] == [0, 30, 60, 90]
    assert len(kept) < 150
    assert [event["time"] for event in thinning.take_held()] == [24 * 3600 - 1.0]
    assert thinning.take_held() == []


def test_run_is_refused_if_its_configured_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"log\.folder: cannot write .*taken"):
        create_observers(runs.config(tmp_path, log={"folder": "taken"}))
    with pytest.raises(ConfigError, match=r"log\.folder: cannot write .*/taken/below"):
        create_observers(runs.config(tmp_path, log={"folder": "taken/below"}))


def test_run_warns_if_its_default_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    (folder,) = create_observers(runs.config(tmp_path))
    assert isinstance(folder, RunFolder)
    with pytest.raises(OSError, match="runs"):
        folder.handle(typed({"event": "start"}))
    folder.close()
    assert create_observers(runs.config(tmp_path, log={"folder": ""})) == []


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (run_folder.RUN, '{"format": 2, "unknown": 1}', "a newer one wrote it; update rpcmp"),
        (run_folder.RUN, "{", "run.json is damaged or missing"),
        (run_folder.RUN, "[]", "run.json is damaged or missing"),
        (run_folder.RUN, '{"format": 1, "name": 3}', "name: Input should be a valid string"),
        (run_folder.CONFIG, "[]", "config.json is damaged or missing: it is not a JSON object"),
        (run_folder.METRICS, "{}\n", "metrics.jsonl is damaged or missing: line 1 is no event"),
        (run_folder.EVENTS, "{\n{}\n", "events.jsonl is damaged or missing: line 1 is not JSON"),
        (run_folder.EVENTS, '{"event": "start", "time": 1, "steps": "x"}\n', "has steps = 'x'"),
        (
            run_folder.EVENTS,
            "3\n",
            "events.jsonl is damaged or missing: line 1 is not a JSON object",
        ),
        (run_folder.RUN, DEEP, "run.json is damaged or missing: .*recursion"),
        (run_folder.CONFIG, DEEP, "config.json is damaged or missing: .*recursion"),
        (run_folder.CONFIG, " " * (16 * MIB + 1), "config.json is .*longer than 16 MiB"),
        (run_folder.METRICS, " " * (4 * MIB + 1), "metrics.jsonl is .*line 1 is longer than 4 MiB"),
        (run_folder.EVENTS, LONG_NUMBER, "events.jsonl is .*a number has 401 digits"),
    ],
)
def test_read_names_a_damaged_file(path: Path, file: str, content: str, said: str) -> None:
    (path / file).write_text(content)
    with pytest.raises(ConfigError, match=said):
        run_report.read(path)


@pytest.mark.parametrize(
    "name", [run_folder.RUN, run_folder.CONFIG, run_folder.METRICS, run_folder.EVENTS]
)
def test_read_refuses_a_link_to_a_device(name: str, path: Path) -> None:
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{name} is damaged or missing: .* not a regular"):
        run_report.read(path)


def test_read_refuses_other_folders_and_suggests_runs(tmp_path: Path, path: Path) -> None:
    cases = {
        tmp_path / "nowhere": "there is nothing of that name",
        tmp_path: "it has no run.json",
        path.parent: f"it holds 1 of them; name one: {path}",
        path / run_folder.LOG: "is no folder of a run",
    }
    for given, said in cases.items():
        with pytest.raises(ConfigError) as error:
            run_report.read(given)
        assert said in str(error.value)
