"""Vitals of a run's processes, from the reports of stage servers and driver process."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from rpcmp.config.topology import DRIVER
from rpcmp.job.vitals import Vitals
from rpcmp.process.activity import Doing
from rpcmp.process.sockets import PeerTraffic
from rpcmp.v1 import control_pb2 as pb

A, B, D = "127.77.0.1:40001", "127.77.0.2:40002", "127.77.0.3:40003"


class Clock:
    """`time.monotonic`, set by the test."""

    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("rpcmp.job.vitals.time.monotonic", lambda: made.now)
    return made


def server_state(
    *ways: PeerTraffic,
    state: pb.ServerState.ValueType = pb.SERVER_STATE_RUNNING,
    listens: str = "",
    pid: int = 7,
) -> pb.WatchResponse:
    """Return a server's report on its worker."""
    return pb.WatchResponse(
        state=state,
        listens=listens,
        vitals=pb.Vitals(
            host="host-a",
            pid=pid,
            doing=pb.Doing(phase="forward", step=3, microbatch=2, seconds=0.5),
            memory=1000,
            cpu_seconds=1.5,
            in_flight=2,
            device="cuda:1",
            device_memory=300,
            ways=[pb.Way(**way._asdict()) for way in ways],
        ),
    )


@pytest.fixture
def vitals() -> Vitals:
    """Vitals of a generation that has started."""
    made = Vitals()
    made.start_generation()
    return made


def vitals_of(vitals: Vitals) -> dict[str, Any]:
    return vitals.event(5).to_json()


def links(vitals: Vitals) -> dict[tuple[str, str], dict[str, Any]]:
    return {(link["from"], link["to"]): link for link in vitals_of(vitals)["links"]}


def test_a_workers_vitals_equal_those_that_its_server_reports(vitals: Vitals) -> None:
    vitals.update_worker("a", server_state())
    event = vitals_of(vitals)
    assert (event["event"], event["step"], event["driver"]) == ("vitals", 5, {})
    assert event["workers"] == {
        "a": {
            "state": "running",
            "restarts": 0,
            "host": "host-a",
            "pid": 7,
            "phase": "forward",
            "microbatch": 2,
            "seconds": 0.5,
            "memory": 1000,
            "cpu_seconds": 1.5,
            "in_flight": 2,
            "device": "cuda:1",
            "device_memory": 300,
        }
    }


def test_a_change_without_vitals_changes_only_the_state(vitals: Vitals) -> None:
    vitals.update_worker("a", pb.WatchResponse(state=pb.SERVER_STATE_CLAIMED))
    assert vitals_of(vitals)["workers"] == {}  # nothing is known of it yet
    vitals.update_worker("a", server_state(state=pb.SERVER_STATE_BUILDING))
    vitals.update_worker("a", pb.WatchResponse(state=pb.SERVER_STATE_RUNNING))
    worker = vitals_of(vitals)["workers"]["a"]
    assert (worker["state"], worker["memory"]) == ("running", 1000)


def test_links_add_up_the_connections_of_both_ends(vitals: Vitals) -> None:
    vitals.update_worker(
        "a",
        server_state(
            PeerTraffic(B, 100, 10, 0.2), PeerTraffic("127.0.0.1:80", 9, 9, 0.1), listens=A
        ),
    )
    vitals.update_worker("b", server_state(PeerTraffic(A, 1000, 1, 0.1), listens=B))
    vitals.add_driver_address(D)
    doing = Doing("step", 3, -1, 0.1)
    vitals.update_driver(9, doing, {A: 0.04}, ([[A, 5, 6, 0.3], ["", 70, 80, 0.0]], []))
    found = links(vitals)
    assert {pair: link["bytes"] for pair, link in found.items()} == {
        ("a", "b"): 101,
        ("b", "a"): 1010,
        (DRIVER, "a"): 5,
        ("a", DRIVER): 6,
    }
    assert found["a", "b"]["rtt_s"] == found["b", "a"]["rtt_s"] == 0.1
    assert found[DRIVER, "a"]["rtt_s"] == 0.04  # between the hosts, not to the own supervisor


def test_rates_use_the_time_between_counts_and_not_between_reports(
    clock: Clock, vitals: Vitals
) -> None:
    vitals.update_worker("b", server_state(listens=B))
    for counted, heard, count, rate in (
        (10.0, 10.4, 1000, 0.0),  # the first has no start time
        (12.0, 12.1, 1100, 50.0),
        (12.0, 12.9, 1100, 50.0),  # the same once more
        (14.0, 14.2, 1100, 0.0),
        (14.5, 14.5, 1300, 400.0),
    ):
        clock.now = heard
        change = server_state(PeerTraffic(B, count, 2 * count, 0.1))
        change.vitals.counted_s_ago = heard - counted
        vitals.update_worker("a", change)
        found = links(vitals)
        assert found["a", "b"]["bytes_per_s"] == pytest.approx(rate)
        assert found["b", "a"]["bytes_per_s"] == pytest.approx(2 * rate)
        assert found["a", "b"]["bytes"] == count


def test_a_process_is_lost_until_the_next_one_reports(vitals: Vitals) -> None:
    for label in ("a", "b"):
        vitals.update_worker(
            label, server_state(PeerTraffic(B, 1, 1, 0.1), listens=A if label == "a" else B)
        )
    vitals.mark_lost("a")
    lost, other = (vitals_of(vitals)["workers"][label] for label in ("a", "b"))
    assert (lost["state"], lost["pid"], lost["memory"], lost["in_flight"]) == ("lost", 0, 0, 0)
    assert (other["state"], other["pid"]) == ("running", 7)
    vitals.start_generation()
    assert vitals_of(vitals)["links"] == []  # they begin anew, with the processes
    assert vitals_of(vitals)["workers"]["a"]["state"] == "lost"
    vitals.update_worker("a", server_state(state=pb.SERVER_STATE_CLAIMED, pid=8))
    fresh = vitals_of(vitals)["workers"]["a"]
    assert (fresh["state"], fresh["pid"], fresh["restarts"]) == ("claimed", 8, 1)


def test_a_loss_without_a_label_changes_nothing(vitals: Vitals) -> None:
    vitals.update_worker("a", server_state())
    before = vitals_of(vitals)["workers"]
    vitals.mark_lost("")
    assert vitals_of(vitals)["workers"] == before


def test_a_process_lost_before_its_first_vitals_is_not_reported() -> None:
    vitals = Vitals()
    for _ in range(2):
        vitals.start_generation()
        vitals.update_worker("a", pb.WatchResponse(state=pb.SERVER_STATE_CLAIMED))
        for label in ("a", DRIVER):
            vitals.mark_lost(label)
            assert (vitals_of(vitals)["workers"], vitals_of(vitals)["driver"]) == ({}, {})


def test_the_driver_reports_vitals(vitals: Vitals) -> None:
    vitals.update_driver(9, Doing("plan", 0, -1, 0.1), {}, ([], []))
    assert vitals_of(vitals)["driver"]["state"] == "building"
    vitals.add_driver_address(D)
    vitals.update_driver(9, Doing("step", 3, -1, 0.1), {}, None)
    driver = vitals_of(vitals)["driver"]
    assert (driver["state"], driver["phase"], driver["pid"]) == ("running", "step", 9)
    assert driver["host"] == platform.node()
    vitals.mark_lost(DRIVER)
    assert vitals_of(vitals)["driver"]["state"] == "lost"


def test_links_count_tensors_if_they_exceed_the_connections(clock: Clock, vitals: Vitals) -> None:
    vitals.update_worker("a:1", server_state(listens=A))
    for now, tensors in ((1.0, 1000), (2.0, 3000)):
        clock.now = now
        change = server_state(PeerTraffic(A, 50, 5000, 0.1), listens=B)
        change.vitals.tensors.add(peer="a:1", sent=tensors, received=tensors)
        vitals.update_worker("b", change)
    vitals.add_driver_address(D)
    answers = [[name, 0, n, 0.0] for name, n in (("a:1", 7), ("b:0", 8), ("b", 1), ("nobody", 1))]
    vitals.update_driver(9, Doing("step", 3, -1, 0.1), {}, ([], answers))
    vitals.update_driver(9, Doing("step", 4, -1, 0.1), {}, None)  # nothing was counted
    found = links(vitals)
    assert {pair: link["bytes"] for pair, link in found.items()} == {
        ("b", "a:1"): 3000,
        ("a:1", "b"): 5000,
        (DRIVER, "a:1"): 0,
        ("a:1", DRIVER): 7,
        (DRIVER, "b"): 0,
        ("b", DRIVER): 9,
    }
    assert found["b", "a:1"]["bytes_per_s"] == pytest.approx(2000.0)
    assert found["b", "a:1"]["rtt_s"] == 0.1
