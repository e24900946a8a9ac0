"""The settings that a sweep measures."""

from __future__ import annotations

from collections import defaultdict

import pytest

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.errors import ConfigError
from rpcmp.pipelining.setting_grid import Axes, Grid, grid
from tests.support.settings import chain


def drawn(found: Grid) -> list[str]:
    """Return a line per combination of schedule and limit, with its numbers of micro-batches."""
    by_way: defaultdict[str, list[int]] = defaultdict(list)
    for setting in found.settings:
        by_way[setting.without_count].append(setting.num_microbatches)
    return [f"{way}: {numbers}" for way, numbers in by_way.items()]


def test_the_largest_max_in_flight_counts_the_replicas_of_a_stage() -> None:
    behind = chain(stages=[{}, {"replicas": 2}], data={"train": "zoo:regression", "batch_size": 64})
    most = {setting.max_in_flight for setting in grid(behind, Axes()).settings}
    assert most == {None, 6}  # twice the three workers from the first stage to the loss


def test_the_default_grid_has_both_schedules_and_two_samples_in_each_micro_batch() -> None:
    found = grid(chain(), Axes())
    assert drawn(found) == [
        "1f1b: [1, 2, 4, 8]",
        "zero-bubble: [1, 2, 4, 8]",
        "zero-bubble, max_in_flight 4: [4, 8]",  # 1 and 2 never reach this limit
    ]
    assert found.left_out == [
        "left out: num_microbatches 1, 2, zero-bubble, max_in_flight 4: the same as zero-bubble"
    ]
    large = chain(data={"train": "zoo:regression", "batch_size": 5000})
    assert max(s.num_microbatches for s in grid(large, Axes()).settings) == 128
    single = chain(data={"train": "zoo:regression", "batch_size": 1}, num_microbatches=1)
    assert {s.num_microbatches for s in grid(single, Axes()).settings} == {1}


def test_the_configs_own_setting_is_always_measured() -> None:
    own = chain(num_microbatches=3, schedule="gpipe")
    found = grid(own, Axes([2], ["1f1b"]))
    assert drawn(found) == ["1f1b: [2]", "gpipe: [3]"]
    assert found.own == ScheduleOptions(num_microbatches=3, schedule="gpipe")


def test_messages_are_an_axis_and_increase_max_in_flight() -> None:
    found = grid(chain(), Axes([2, 8], ["zero-bubble"], None, [1, 4]))
    assert drawn(found) == [
        "1f1b: [4]",
        "zero-bubble: [2, 8]",
        "zero-bubble, max_in_flight 4: [8]",
        "zero-bubble, 4 a message: [2, 8]",
        "zero-bubble, max_in_flight 16, 4 a message: [8]",
    ]
    assert "max_in_flight 16, 4 a message: the same" in found.left_out[-1]
    few = grid(chain(), Axes([8], ["1f1b"], [3], [4]))
    assert few.left_out == [
        "left out: num_microbatches 8, 1f1b, max_in_flight 3, 4 a message: a message has 4 "
        "micro-batches"
    ]


def test_useless_settings_are_left_out_with_a_reason() -> None:
    axes = Axes([4, 16, 17, 4], ["1f1b", "gpipe"], [None, 2, 20])
    found = grid(chain(), axes)
    assert drawn(found) == [
        "1f1b: [4, 16]",
        "1f1b, max_in_flight 20: [4, 16]",
        "gpipe: [4, 16]",
    ]
    assert found.left_out == [
        "left out: num_microbatches 17, 1f1b: a mini-batch has 16 samples",
        "left out: num_microbatches 4, 16, 1f1b, max_in_flight 2: the same as 1f1b",
        "left out: num_microbatches 17, 1f1b, max_in_flight 2: a mini-batch has 16 samples",
        "left out: num_microbatches 17, 1f1b, max_in_flight 20: a mini-batch has 16 samples",
        "left out: num_microbatches 17, gpipe: a mini-batch has 16 samples",
        "left out: num_microbatches 4, 16, gpipe, max_in_flight 2: gpipe always holds all "
        "micro-batches",
        "left out: num_microbatches 17, gpipe, max_in_flight 2: a mini-batch has 16 samples",
        "left out: num_microbatches 4, 16, gpipe, max_in_flight 20: gpipe always holds all "
        "micro-batches",
        "left out: num_microbatches 17, gpipe, max_in_flight 20: a mini-batch has 16 samples",
    ]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (Axes([0]), "num_microbatches: .* greater than or equal to 1 .got 0"),
        (Axes(max_in_flight=[-1]), "max_in_flight: .* greater than or equal to 1 .got -1"),
        (Axes(schedules=["zbv"]), "no schedule 'zbv'; there are 'gpipe', '1f1b', 'zero-bubble'"),
    ],
)
def test_values_that_a_config_refuses_are_errors(axes: Axes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grid(chain(), axes)


def test_tuning_without_data_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no \[data\] section"):
        grid(chain(data=None), Axes())
