"""The timeline of a step, sampled during a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import pytest

from rpcmp.config.topology import Member
from rpcmp.driver.stage_group import StageGroup
from rpcmp.driver.tracing import STEPS_SAMPLED, StepSampler
from rpcmp.errors import JobError
from rpcmp.observability.events import Event
from rpcmp.observability.trace import chrome
from rpcmp.observability.trace.analysis import timeline
from rpcmp.observability.trace.spans import Kind, Span, SpanRecorder
from rpcmp.worker.stage import Stage
from tests.support.traces import SLOW_LINKS, ZERO_BUBBLE, drawn
from tests.support.twostages import STAGES, job

MS = 1e-3


def shown(picture: str, step: int) -> dict[str, Any]:
    found = timeline(drawn(picture), step)
    assert found is not None
    return found.to_json()


def stage(event: dict[str, Any], label: str) -> dict[str, Any]:
    (found,) = (each for each in event["stages"] if each["label"] == label)
    return cast(dict[str, Any], found)


def test_timeline_lasts_until_the_next_step_starts_at_any_stage() -> None:
    event = shown(ZERO_BUBBLE, 1)
    assert (event["event"], event["step"], event["seconds"]) == ("timeline", 1, 8 * MS)
    assert stage(event, "stage0")["spans"] == [
        ["F", 0, 0, 1 * MS],
        ["F", 1, 1 * MS, 2 * MS],
        ["B", 0, 3 * MS, 4 * MS],
        ["W", 0, 4 * MS, 5 * MS],
        ["B", 1, 5 * MS, 6 * MS],
        ["W", 1, 6 * MS, 7 * MS],
        ["O", -1, 7 * MS, 8 * MS],
    ]
    assert stage(event, "stage0")["idle"] == [["bubble", 2 * MS, 3 * MS]]
    assert stage(event, "stage0")["host"] == "host-stage0"
    assert event["bottleneck"].startswith("bottleneck: stage")


def test_timeline_spans_idle_times_and_shares_cover_the_same_time() -> None:
    event = shown(SLOW_LINKS, 1)
    for each in event["stages"]:
        assert sum(each["busy"].values()) + sum(each["lost"].values()) == pytest.approx(1)
        for kind, share in each["busy"].items():
            found = sum(end - start for k, _, start, end in each["spans"] if k == kind)
            assert found == pytest.approx(share * event["seconds"])
        for loss, share in each["lost"].items():
            found = sum(end - start for name, start, end in each["idle"] if name == loss)
            assert found == pytest.approx(share * event["seconds"])


def test_timeline_shows_spans_of_the_step_before_that_still_run() -> None:
    event = shown(
        """
        stage0  F0 .  B0 O  F0 .  B0 O  F0
        stage1  .  F0 B0 W0 W0 O  F0 B0 W0 O
        """,
        2,
    )
    assert [span[0] for span in stage(event, "stage1")["spans"]] == ["W", "O", "F", "B"]


def test_timeline_excludes_an_evaluation_after_the_step() -> None:
    event = shown("stage0  F0 B0 O  .  .  .  .  F0 B0 O", 1)
    assert event["seconds"] == 3 * MS
    assert stage(event, "stage0")["idle"] == []


@pytest.mark.parametrize("step", [2, 3])
def test_timeline_is_none_for_an_incomplete_step(step: int) -> None:
    assert timeline(drawn(ZERO_BUBBLE), step) is None


def test_stage_keeps_the_spans_of_its_last_steps() -> None:
    recorder = SpanRecorder()
    recorder.add("F", 1, 0, 0, 0)
    cursor = recorder.keep(STEPS_SAMPLED)
    for step in range(2, 70):
        for kind in ("F", "B", "O"):
            recorder.add(kind, step, 0, 0, 0)
    found = [span.step for span in recorder.read(cursor, 67, 69)[1]]
    assert found == [67] * 3 + [68] * 3 + [69] * 3
    assert [span.step for span in recorder.read(cursor, 67, 68)[1]] == [67] * 3 + [68] * 3
    kept = {span.step for span in recorder.read(cursor)[1]}
    assert kept == set(range(69 - STEPS_SAMPLED, 70))


class Stages:
    """Two stages that are sampled; the clock of the second is ahead."""

    AHEAD = 10**12

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.sampler = StepSampler(job(), cast(StageGroup, self), self._report, 2.0)
        self.asked: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: JobError | None = None

    def _report(self, event: Event) -> None:
        self.events.append(event.to_json())

    def after_step(self, step: int) -> None:
        """Let the sampler see a step, and wait until it has shown what it asked for."""
        self.sampler.after_step(step)
        if self.sampler._showing is not None:
            self.sampler._showing.exception()

    @property
    def workers(self) -> Self:
        return self

    def everywhere(self, method: Callable[..., Any], *args: Any) -> Any:
        return getattr(self, method.__name__)(*args)

    def record_spans(self, steps: int) -> dict[str, tuple[str, int]]:
        return dict.fromkeys(STAGES, ("host-a", 0))

    def rpc_sync(self, worker: Member, method: Callable[..., Any]) -> int:
        assert method is Stage.clock
        return self.AHEAD if worker.stage == STAGES[1] else 0

    def start(
        self, method: Callable[..., Any], args_of: Callable[[Member], tuple[int, int, int]]
    ) -> Callable[[], dict[str, tuple[int, list[Span]]]]:
        _, _, last_step = args_of(job().workers[0])
        self.asked.append(last_step)

        def answers() -> dict[str, tuple[int, list[Span]]]:
            self.may_answer.wait()
            if self.error is not None:
                raise self.error
            return {
                name: (0, _steps(last_step, ahead))
                for name, ahead in zip(STAGES, (0, self.AHEAD), strict=True)
            }

        return answers


def _steps(last: int, ahead: int) -> list[Span]:
    """Return a forward and a backward of a millisecond each for the last three steps."""
    found = []
    for step in range(last - 2, last + 1):
        for offset, kind in ((0, Kind.FORWARD), (1, Kind.BACKWARD)):
            start = ahead + step * 10_000_000 + offset * 1_000_000
            found.append(Span(kind, step, 0, start, start, start + 1_000_000))
    return found


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    monkeypatch.setattr(Clock, "now", 100.0)
    monkeypatch.setattr("rpcmp.driver.tracing.time.monotonic", lambda: Clock.now)
    monkeypatch.setattr("rpcmp.driver.tracing.time.perf_counter_ns", lambda: 0)
    return Clock


def test_sampler_emits_a_step_every_other_second_on_the_drivers_clock(clock: type[Clock]) -> None:
    stages = Stages()
    for step in range(1, 11):  # half a second each
        stages.after_step(step)
        clock.now += 0.5
    stages.sampler.close()
    assert stages.asked == [2, 6, 10]
    assert [event["step"] for event in stages.events] == [1, 5, 9]
    first, second = stages.events[0]["stages"]
    assert first["spans"] == second["spans"] == [["F", 0, 0.0, 0.001], ["B", 0, 0.001, 0.002]]


def test_sampler_emits_less_often_if_steps_take_long_to_analyse(
    clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = iter(range(0, 1000, 3))  # hundredths of a second of CPU time
    monkeypatch.setattr("rpcmp.driver.tracing.time.thread_time", lambda: next(spent) / 100)
    stages = Stages()
    for step in range(1, 11):
        stages.after_step(step)
        clock.now += 1.0
    stages.sampler.close()
    assert stages.asked == [2, 5, 8]


def test_sampler_does_not_block_training_on_a_slow_response(clock: type[Clock]) -> None:
    stages = Stages()
    stages.may_answer.clear()
    for step in range(1, 30):
        stages.sampler.after_step(step)
        clock.now += 10
    assert stages.asked == [2]  # one request at a time
    stages.may_answer.set()
    stages.sampler.close()
    assert [event["step"] for event in stages.events] == [1]


def test_sampler_ignores_a_lost_stage(clock: type[Clock]) -> None:
    stages = Stages()
    stages.error = JobError("the worker is gone")
    for step in (1, 2):
        stages.sampler.after_step(step)
    stages.sampler.close()
    assert stages.asked == [2]
    assert stages.events == []
    assert stages.sampler._showing is not None
    assert stages.sampler._showing.exception() is None


def test_sampler_writes_the_last_steps_as_a_trace(tmp_path: Path) -> None:
    stages = Stages()
    stages.sampler.write(tmp_path / "trace.json.gz")
    assert list(tmp_path.iterdir()) == []  # there has been no step
    for step in range(1, 5):
        stages.sampler.after_step(step)
    stages.sampler.close()
    stages.sampler.write(tmp_path / "trace.json.gz")
    trace = chrome.read(tmp_path / "trace.json.gz")
    assert [track.stage for track in trace.tracks] == list(STAGES)
    for track in trace.tracks:
        assert [span.step for span in track.spans] == [2, 2, 3, 3, 4, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
    stages.sampler.write(tmp_path / "nowhere" / "trace.json.gz")
    (text,) = [event["text"] for event in stages.events if event["event"] == "warning"]
    assert text.startswith("no trace of the last steps: cannot write the trace")
