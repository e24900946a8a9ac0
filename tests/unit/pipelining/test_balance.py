"""The balance computed from a measured model, and its predicted times."""

from __future__ import annotations

import asyncio
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.job import autobalance
from rpcmp.job.autobalance import as_one
from rpcmp.pipelining.cost_model import Prediction, predict
from rpcmp.pipelining.partition import StageHost, choose_balance
from rpcmp.process.fork_client import Forks
from tests.support.examples import examples
from tests.support.graphs import chain_of
from tests.support.profiles import host, layer


def hosts(times: list[list[float]]) -> list[StageHost]:
    """Return hosts, one per row of seconds per layer."""
    return [host([layer(each) for each in row], index) for index, row in enumerate(times)]


@pytest.mark.parametrize(
    ("times", "balance"),
    [
        ([[1, 1, 1, 1]] * 2, [2, 2]),
        ([[1, 1, 9, 1, 1]] * 3, [2, 1, 2]),
        ([[5, 1, 1, 1]] * 3, [1, 1, 2]),  # the first stage sets the time
        ([[1, 1, 5, 1, 1, 1, 1]] * 4, [2, 1, 2, 2]),
        ([[1, 1, 1, 1], [3, 3, 3, 3]], [3, 1]),  # the second host is three times as slow
        ([[3, 3, 3, 3], [1, 1, 1, 1]], [1, 3]),
        ([[0, 0, 0]] * 2, [1, 2]),
        ([[0.1] * 6] * 3, [2, 2, 2]),  # equal up to rounding, which must not decide
    ],
)
def test_times_give_the_expected_balance(times: list[list[float]], balance: list[int]) -> None:
    assert choose_balance(hosts(times)) == balance


def test_the_update_counts_once_a_step_and_the_rest_for_each_micro_batch() -> None:
    costly = layer().model_copy(update={"update_s": 3.0})
    assert host([layer(), costly], num_microbatches=4).seconds(0, 2) == 4 * 2.0 + 3.0


def test_a_stage_holds_its_state_and_the_activations_of_all_open_micro_batches() -> None:
    stage = host([layer(), layer(state=100, activations=7), layer(state=50)], held=3)
    assert stage.memory(1, 3) == 10 + 100 + 50 + 3 * (1 + 7)


def test_a_memory_limit_moves_the_cut() -> None:
    layers = [layer(state=100) for _ in range(6)]
    assert choose_balance([host(layers, 0), host(layers, 1)]) == [3, 3]
    assert choose_balance([host(layers, 0), host(layers, 1, limit=220)]) == [4, 2]


def test_a_model_that_does_not_fit_names_the_stage_with_the_largest_deficit() -> None:
    layers = [layer(state=1024) for _ in range(4)]
    message = (
        r"no balance fits into memory; with \[3, 1\], .* stage 'stage1' needs 1.0 KiB and may "
        r"have 500 B; .* `memory`"
    )
    with pytest.raises(ConfigError, match=message):
        choose_balance([host(layers, 0, limit=4096), host(layers, 1, limit=500)])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 stages need at least as many layers, .* has 2"):
        choose_balance(hosts([[1, 1]] * 3))


def balances(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [[end - start for start, end in pairwise([0, *cut, num_layers])] for cut in cuts]


def loads(stages: list[StageHost], balance: list[int]) -> list[float] | None:
    """Return each stage's seconds; None if one stage does not fit into its memory."""
    ends = [sum(balance[: index + 1]) for index in range(len(balance))]
    parts = list(zip(stages, [0, *ends], ends, strict=False))
    if any(stage.overrun(start, end) > 0 for stage, start, end in parts):
        return None
    return [stage.seconds(start, end) for stage, start, end in parts]


@st.composite
def clusters(draw: st.DrawFn) -> list[StageHost]:
    """Draw hosts that differ in speed and memory; the numbers are whole, so that sums are exact."""
    num_layers = draw(st.integers(1, 7))
    num_stages = draw(st.integers(1, num_layers))
    sizes = draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers))
    times = st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)
    limits = st.none() | st.integers(10, 40)
    return [
        host(
            [layer(time * 4, size, size) for time, size in zip(draw(times), sizes, strict=True)],
            index,
            limit=draw(limits),
        )
        for index in range(num_stages)
    ]


@examples(400)
@given(clusters())
def test_no_balance_is_better_than_the_chosen_one(stages: list[StageHost]) -> None:
    every = balances(len(stages[0].profile.layers), len(stages))
    found = [load for balance in every if (load := loads(stages, balance)) is not None]
    if not found:
        with pytest.raises(ConfigError, match="no balance fits"):
            choose_balance(stages)
        return
    chosen = loads(stages, choose_balance(stages))
    assert chosen is not None
    best = min((max(load), sum(seconds**2 for seconds in load)) for load in found)
    assert (max(chosen), sum(seconds**2 for seconds in chosen)) == best


def predicted(updates: list[float], **changes: Any) -> Prediction:
    """Return the prediction for three stages of one layer, with four micro-batches.

    Each forward and each whole backward takes one unit of time.
    """
    config = chain_of(3, model={"layers": "m:layers", "num_stages": 3}, **changes)
    layers = [layer(2.0).model_copy(update={"update_s": update}) for update in updates]
    stages = [host(layers, index, 20, num_microbatches=4) for index in range(3)]
    return predict(config, stages, [1, 1, 1])


def test_the_prediction_equals_the_drawn_schedule() -> None:
    found = predicted([0, 0, 0])
    assert found.step_s == 12.0
    assert found.bubble == pytest.approx(1 / 3)
    stage = found.stages["stage1"]
    assert (stage.num_layers, stage.busy_s, stage.memory_bytes) == (1, 8.0, 11)
    assert stage.bubble == pytest.approx(1 / 3)


def test_the_next_step_overlaps_with_this_one_unless_the_driver_looks_at_all_stages() -> None:
    assert predicted([0, 0, 3]).step_s == 12.0
    assert predicted([0, 0, 6]).step_s == 8.0 + 6.0
    assert predicted([0, 0, 6], max_grad_norm=1.0).step_s == 12.0 + 6.0


# Replicas


@pytest.mark.parametrize(
    ("seconds", "more", "expected"),
    [
        ([1, 1], {}, 2),  # two of four each
        ([1, 1, 1], {}, 2),  # round robin: one of them has two
        ([1] * 8, {}, 1),  # four have one, the others none
        ([1, 3], {}, 6),
        ([1, 3], {"balance_replicas": True}, 3),  # three and one
        ([1, 3], {"stages": [{"replicas": 2, "shares": [3, 1]}]}, 3),
        ([1, 1], {"microbatches_per_message": 4}, 4),  # one message, one replica
    ],
)
def test_the_slowest_replica_sets_the_time_of_its_stage(
    seconds: list[float], more: dict[str, Any], expected: float
) -> None:
    replicas = {"stages": [{"replicas": len(seconds)}], "num_microbatches": 4}
    config = chain_of(1, model={"layers": "m:layers"}, **{**replicas, **more})
    profiles = [host([layer(each), layer(each)]).profile for each in seconds]
    profile = as_one(config, 0, profiles)
    one = StageHost("stage0", profile, None, config.num_microbatches, 1)
    assert one.seconds(0, 1) == pytest.approx(expected)
    assert profile.base_bytes == 10


# Steps of few samples


AUTO = {"layers": "m:layers", "balance": "auto", "num_stages": 2}


@pytest.mark.parametrize(("batch_size", "count"), [(2, 2), (4, 4), (10, 4)])
def test_steps_of_few_samples_are_measured_as_they_are(batch_size: int, count: int) -> None:
    data = {"train": "m:data", "batch_size": batch_size}
    given = chain_of(2, model=AUTO, num_microbatches=4, data=data)
    full = given.with_full_microbatches()
    assert full == given.model_copy(update={"num_microbatches": count})
    without = given.model_copy(update={"data": None})
    assert without.with_full_microbatches() is without


def test_a_stage_is_never_busy_for_longer_than_a_step_of_few_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def measured(config: Config, *_: Any) -> list[StageHost]:
        counts = {"num_microbatches": config.num_microbatches, "held": 1}
        return [host([layer(), layer()], index, **counts) for index in range(2)]

    monkeypatch.setattr(autobalance, "stage_hosts", measured)
    data = {"train": "m:data", "batch_size": 2}
    given = chain_of(2, model=AUTO, num_microbatches=4, data=data)
    config, found = asyncio.run(autobalance.balanced(given, None, Forks([])))
    assert config.num_microbatches == 4  # the config keeps its number
    assert found is not None
    prediction = found.predict(config.with_full_microbatches())
    assert [stage.busy_s for stage in prediction.stages.values()] == [2.0, 2.0]
    assert prediction.step_s == pytest.approx(3.0)
