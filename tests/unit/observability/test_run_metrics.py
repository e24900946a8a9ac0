"""The metrics of runs and servers, computed from events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.config.topology import DRIVER
from rpcmp.job.vitals import Vitals
from rpcmp.observability.prometheus import Family, Store
from rpcmp.observability.run_metrics import RunMetrics
from tests.support.runevents import typed
from tests.support.scraping import Samples, of, value


def after(*events: dict[str, Any]) -> Samples:
    """Return the metrics of a run with these events."""
    metrics = RunMetrics()
    for each in events:
        metrics.handle(typed(each))
    return samples(metrics.store)


def samples(store: Store) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in store.collect()
        for sample in family.samples
    }


# Counters


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 100)), max_size=30))
def test_counters_never_fall(seen: list[tuple[int, int]]) -> None:
    store, before = Store([Family("x", "counter", "An x", ("key",))]), 0.0
    for source, count in sorted(seen, key=lambda pair: pair[0]):
        store.count("x", source, count, "key")
        total = value(samples(store), "x_total", key="key")
        assert total is not None
        assert total >= before
        before = total
    highest: dict[int, int] = {}
    for source, count in seen:
        highest[source] = max(count, highest.get(source, 0))
    assert before == sum(highest.values())


def test_store_refuses_labels_of_another_family() -> None:
    store = Store([Family("x", "gauge", "An x", ("stage",))])
    with pytest.raises(ValueError, match="has the labels"):
        store.set("x", 1.0)


# Runs


def event(name: str, generation: int = 1, **more: Any) -> dict[str, Any]:
    return {"event": name, "time": 1000.0, "generation": generation, **more}


def step(number: int, **busy: dict[str, float]) -> dict[str, Any]:
    return event(
        "step",
        step=number,
        epoch=1,
        loss=1 / number,
        samples_per_s=320.0,
        step_s=0.1,
        data_share=0.2,
        busy_seconds=busy,
        learning_rates=dict.fromkeys(busy, 0.5),
    )


def process(pid: int, **more: Any) -> dict[str, Any]:
    known = {"memory": 100, "in_flight": 2, "restarts": 0, "state": "running", "cpu_seconds": 1.0}
    return {**known, "pid": pid, **more}


def vitals(generation: int, links: dict[tuple[str, str], int], **workers: Any) -> dict[str, Any]:
    traffic = [
        {"from": a, "to": b, "bytes": n, "bytes_per_s": 0.0, "rtt_s": 0.001}
        for (a, b), n in links.items()
    ]
    return event("vitals", generation, step=1, workers=workers, driver={}, links=traffic)


def test_metrics_of_steps_add_up() -> None:
    busy = {"F": 0.01, "B": 0.02, "W": 0.0, "O": 0.005}
    found = after(step(1, a=busy), step(2, a=busy))
    assert value(found, "rpcmp_step") == 2
    assert value(found, "rpcmp_loss") == 0.5
    assert value(found, "rpcmp_samples_total") == 64
    assert value(found, "rpcmp_steps_total") == 2
    assert value(found, "rpcmp_data_seconds_total") == pytest.approx(0.04)
    assert value(found, "rpcmp_learning_rate", stage="a") == 0.5
    assert of(found, "rpcmp_busy_seconds_total", "kind") == pytest.approx(
        {("forward",): 0.02, ("backward",): 0.04, ("weight",): 0.0, ("optimizer",): 0.01}
    )
    assert not of(found, "rpcmp_idle_seconds_total", "kind")  # a timeline event gives the reasons


def test_parameter_groups_have_learning_rates_if_a_stage_has_several() -> None:
    found = after({**step(1, a={}, b={}), "group_learning_rates": {"a": [0.5, 0.25]}})
    assert of(found, "rpcmp_group_learning_rate", "group") == {("0",): 0.5, ("1",): 0.25}


def test_idle_time_is_divided_completely_among_its_reasons() -> None:
    busy = {"F": 0.02, "B": 0.02, "W": 0.0, "O": 0.0}  # of 0.1 s
    lost = {"bubble": 0.3, "network": 0.1, "overhead": 0.0}
    events = [step(1, a=busy)]
    for number, shares in ((2, lost), (3, dict.fromkeys(lost, 0.0))):
        events.append(event("timeline", stages=[{"label": "a", "lost": shares}]))
        events.append(step(number, a=busy))
    found = of(after(*events), "rpcmp_idle_seconds_total", "kind")
    assert found == pytest.approx({("bubble",): 0.11, ("network",): 0.05, ("overhead",): 0.02})
    assert sum(found.values()) == pytest.approx(3 * 0.06)


def test_bytes_and_cpu_time_accumulate_over_generations() -> None:
    metrics = RunMetrics()
    seen = []
    for generation, count, pid, seconds in (
        (1, 100, 7, 1.0),
        (1, 300, 7, 2.0),
        (1, 300, 0, 0.0),  # the process has ended
        (2, 0, 8, 0.5),
        (2, 50, 8, 1.5),
    ):
        worker = process(pid, cpu_seconds=seconds, restarts=generation - 1)
        metrics.handle(typed(vitals(generation, {("a", "b"): count}, a=worker)))
        found = samples(metrics.store)
        seen.append(
            (
                value(found, "rpcmp_link_bytes_total", source="a", target="b"),
                value(found, "rpcmp_cpu_seconds_total", stage="a"),
            )
        )
    assert seen == [(100, 1.0), (300, 2.0), (300, 2.0), (300, 2.5), (350, 3.5)]
    assert value(found, "rpcmp_restarts_total", stage="a") == 1
    assert value(found, "rpcmp_generation") == 2


def test_only_the_present_device_of_a_worker_has_memory() -> None:
    here = process(8, device="cpu", device_memory=0)
    devices = [process(7, device=device, device_memory=300) for device in ("cuda:0", "cuda:1")]
    found = after(*(vitals(1, {}, a=there, b=here) for there in devices))
    memory = of(found, "rpcmp_device_memory_bytes", "stage", "device")
    assert memory == {("a", "cuda:1"): 300}


def test_process_is_in_exactly_one_state() -> None:
    found = after(*(vitals(1, {}, a=process(7, state=state)) for state in ("running", "lost")))
    states = of(found, "rpcmp_worker_state", "state")
    assert [state for (state,), is_in in states.items() if is_in] == ["lost"]


def test_metrics_accept_a_driver_that_died_before_its_first_vitals() -> None:
    metrics, known = RunMetrics(), Vitals()
    for generation in (1, 2):
        known.start_generation()
        known.mark_lost(DRIVER)
        metrics.handle(known.event(step=0).stamped(1000.0, generation))
    found = samples(metrics.store)
    assert value(found, "rpcmp_generation") == 2
    assert value(found, "rpcmp_memory_bytes", stage=DRIVER) is None


def test_checkpoint_age_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = RunMetrics()
    assert value(samples(metrics.store), "rpcmp_checkpoint_age_seconds") is None
    metrics.handle(typed(event("checkpoint", step=3, seconds=0.5, bytes=4096, path="somewhere")))
    for now, age in ((1007.0, 7.0), (1030.0, 30.0), (990.0, 0.0)):  # the clock was set back
        monkeypatch.setattr("rpcmp.observability.run_metrics.time.time", lambda now=now: now)
        assert value(samples(metrics.store), "rpcmp_checkpoint_age_seconds") == age
    assert value(samples(metrics.store), "rpcmp_checkpoint_duration_seconds") == 0.5
    assert value(samples(metrics.store), "rpcmp_checkpoints_total") == 1


def test_metrics_ignore_events_without_values() -> None:
    names = ("warning", "log", "resumed", "end", "report")
    found = after(*(event(name, text="t") for name in names))
    assert set(found) == {("rpcmp_generation", frozenset())}
