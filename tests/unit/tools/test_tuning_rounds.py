"""Which settings stay in a sweep from round to round."""

from __future__ import annotations

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.tools.tuning_rounds import FEWEST, SweepPlan, spread_out
from tests.support.settings import setting

SETTINGS = [setting(number, "1f1b") for number in range(1, 9)]


def plan(seconds: dict[ScheduleOptions, float], budget: float = 1e6) -> SweepPlan:
    return SweepPlan(own=SETTINGS[-1], rounds=3, steps=4, budget=budget, step_s=seconds)


def test_the_better_half_stays_and_so_does_the_configs_own() -> None:
    far_apart = plan({one: 10.0**one.num_microbatches for one in SETTINGS})
    assert far_apart.survivors(SETTINGS, 1, 1e12) == [*SETTINGS[:4], SETTINGS[-1]]


def test_what_is_close_to_the_best_stays_if_there_is_time_for_it() -> None:
    close = plan({one: 1.0 + one.num_microbatches / 1000 for one in SETTINGS})
    assert close.survivors(SETTINGS, 1, 1e6) == SETTINGS
    assert len(close.survivors(SETTINGS, 1, 1.0)) == FEWEST + 1


def test_any_first_few_settings_are_spread_over_all() -> None:
    first = spread_out(SETTINGS, SETTINGS[2])[:4]
    assert first[0] == SETTINGS[2]
    assert (
        max(one.num_microbatches for one in first)
        > 4
        >= min(one.num_microbatches for one in first[1:])
    )
