"""Which device a worker gets if its stage leaves it open."""

from __future__ import annotations

import pytest

from rpcmp.config.device_places import AUTO, Place, on_machine, place, shared


@pytest.mark.parametrize(
    ("wanted", "count", "expected"),
    [
        ("auto auto auto auto", 4, "0 1 2 3"),
        ("auto cpu auto", 4, "0 - 1"),
        ("auto cuda:1 auto auto cpu", 4, "0 - 2 3 -"),
        ("auto cuda:1 auto auto cpu", 2, "0 - 0 0 -"),
        ("auto auto cuda auto", 3, "1 2 - 1"),
        ("auto auto auto", 2, "0 1 0"),
        ("cuda:0 auto auto", 1, "- 0 0"),
        ("cuda:7 auto", 1, "- 0"),
    ],
)
def test_each_worker_of_a_host_gets_a_device_of_its_own_as_long_as_there_are(
    wanted: str, count: int, expected: str
) -> None:
    names = wanted.split()
    found = [str(place(names, i, count)) if n == AUTO else "-" for i, n in enumerate(names)]
    assert " ".join(found) == expected


def test_only_workers_that_leave_it_open_and_share_are_named() -> None:
    places = [
        Place("stage0", "a", "host-a", AUTO, "cuda:0"),
        Place("stage1", "a", "host-a", "cuda:1", "cuda:1"),
        Place("stage2", "a", "host-a", "cuda:1", "cuda:1"),
        Place("stage3", "b", "host-b", AUTO, "cuda:0"),
        Place("stage4", "b", "host-b", AUTO, "cpu"),
        Place("stage5", "b", "host-b", AUTO, "cpu"),
    ]
    assert shared(places) == []
    (text,) = shared([*places, Place("stage6", "a", "host-a", AUTO, "cuda:0")])
    assert text.startswith("stage0, stage6 share cuda:0 of host-a, which has no device for each")


def test_only_the_workers_of_a_machine_share_its_devices() -> None:
    wanted, machines = ["auto", "cpu", "auto", "cuda:1"], ["a", "b", "b", "a"]
    assert on_machine(wanted, machines, 2) == (["cpu", "auto"], 1)
    assert on_machine(wanted, machines, 0) == (["auto", "cuda:1"], 0)
