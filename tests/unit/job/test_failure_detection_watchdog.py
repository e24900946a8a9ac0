"""The process that the watchdog names if nothing makes progress. No processes."""

from __future__ import annotations

import asyncio

import pytest

from rpcmp.errors import WorkerHungError
from rpcmp.job.failure_detection import Watchdog
from rpcmp.process.activity import NO_MICROBATCH, Doing
from rpcmp.v1 import control_pb2 as pb

SECONDS = 0.01


class Asked:
    """Stages that report their activity and its duration."""

    def __init__(self, *answers: dict[str, tuple[str, float]]) -> None:
        self._answers = [*answers]

    async def inspect(self) -> dict[str, pb.InspectResponse]:
        """Return the next answer, or the last one again."""
        answers = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return {
            stage: pb.InspectResponse(host=f"{stage}'s", doing=pb.Doing(phase=phase, seconds=since))
            for stage, (phase, since) in answers.items()
        }


def named(asked: Asked, driver: Doing | None = None) -> tuple[str, str]:
    """Return the stage that hangs, and its phase."""
    watchdog = Watchdog(SECONDS, asked.inspect)
    if driver is not None:
        watchdog.update_driver(driver)
    with pytest.raises(WorkerHungError) as error:
        asyncio.run(asyncio.wait_for(watchdog.run(), 60))
    return error.value.stage, error.value.phase


@pytest.mark.parametrize(
    ("answers", "stage"),
    [
        ({"a": ("forward", 2.0), "b": ("backward", 3.0)}, "b"),
        ({"a": ("", 9.0), "b": ("backward", 3.0)}, "b"),
        ({"a": ("join", 9.0), "b": ("build", 3.0), "c": ("", 9.0)}, "b"),
        ({"a": ("backward", 3.0), "b": ("sum", 9.0)}, "a"),
        ({"a": ("join", 3.0), "b": ("join", 9.0)}, "b"),
    ],
)
def test_watchdog_names_the_stage_that_is_in_an_action_of_its_own(
    answers: dict[str, tuple[str, float]], stage: str
) -> None:
    assert named(Asked(answers)) == (stage, answers[stage][0])


def test_watchdog_names_the_driver_if_all_stages_wait() -> None:
    driver = Doing("data", 3, NO_MICROBATCH, 9.0)
    assert named(Asked({"a": ("", 9.0), "b": ("", 9.0)}), driver) == ("driver", "data")


def test_watchdog_is_silent_while_one_stage_makes_progress() -> None:
    """The first inspection shows no hang yet: b has just started."""
    going_on = {"a": ("forward", 9.0), "b": ("backward", 0.0)}
    hangs = {"a": ("", 9.0), "b": ("backward", 9.0)}
    assert named(Asked(going_on, hangs)) == ("b", "backward")
