"""The options of a job whose keys are "auto", given, or left to the schedule."""

from __future__ import annotations

import pytest

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from tests.support.settings import chain


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "4 micro-batches, 1f1b"),
        ({"schedule": "auto", "max_in_flight": "auto"}, "4 micro-batches, 1f1b"),
        ({"schedule": "zero-bubble"}, "4 micro-batches, zero-bubble"),
        ({"max_in_flight": 3, "num_microbatches": 1}, "1 micro-batch, 1f1b, max_in_flight 3"),
        ({"microbatches_per_message": 2}, "4 micro-batches, 1f1b, 2 a message"),
    ],
)
def test_a_job_starts_with_what_it_gives_and_else_the_defaults(
    keys: dict[str, object], words: str
) -> None:
    config = chain(**keys)
    assert str(config.options) == words
    assert config.options.on(config).options == config.options


def test_a_job_with_given_options_has_nothing_left_to_find() -> None:
    fixed = ScheduleOptions(num_microbatches=4).on(chain())
    again = Config.model_validate_json(fixed.model_dump_json())
    keys = again.schedule, again.max_in_flight, again.microbatches_per_message
    assert keys == ("1f1b", None, 1)
