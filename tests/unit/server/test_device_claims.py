"""Devices that workers of several jobs have on one host."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from rpcmp.server import device_claims
from rpcmp.server.device_claims import DeviceClaim, choose
from tests.support.eventloops import in_event_loop

ALL = ["x:1", "x:2", "x:0"]


@pytest.mark.parametrize(
    ("held", "may_share", "expected"),
    [
        ([], False, ("x:1", False)),
        ([("x:2", "other")], False, ("x:1", False)),
        ([("x:1", "other")], False, ("x:2", False)),
        ([("x:1", "mine")], False, ("x:2", False)),  # another job has sent a neighbour there
        ([("x:1", "mine")], True, ("x:1", False)),
        ([("x:1", "other"), ("x:2", "mine")], True, ("x:0", False)),
        ([("x:1", "other"), ("x:2", "mine"), ("x:0", "mine")], False, ("x:1", True)),
        ([("x:1", "mine"), ("x:2", "other"), ("x:0", "other")], False, ("x:1", False)),
    ],
)
def test_a_device_of_another_job_is_taken_only_if_there_is_no_other(
    held: list[tuple[str, str]], may_share: bool, expected: tuple[str, bool]
) -> None:
    assert choose(ALL, may_share, "mine", held) == expected


def test_a_worker_whose_device_is_named_gets_it_whoever_has_it() -> None:
    assert choose(["x:1"], True, "mine", [("x:1", "other")]) == ("x:1", True)


def named(count: int) -> list[str]:
    """Return names of devices that no other test has."""
    kind = uuid.uuid4().hex
    return [f"{kind}:{index}" for index in range(count)]


@in_event_loop
async def test_jobs_that_choose_at_one_time_get_distinct_devices() -> None:
    names, claims = named(3), [DeviceClaim(f"job {index}") for index in range(4)]
    found = await asyncio.gather(*(each.choose(names, False) for each in claims))
    for each in claims:
        each.release()
    assert len({device for device, _ in found[:3]}) == 3
    assert [is_shared for _, is_shared in found] == [False, False, False, True]


@in_event_loop
async def test_a_released_device_is_free() -> None:
    names, one, other = named(2), DeviceClaim("one"), DeviceClaim("other")
    assert await one.choose(names, False) == (names[0], False)
    assert await other.choose(names, False) == (names[1], False)
    one.release()
    assert await other.choose(names, False) == (names[0], False)
    other.release()


def test_a_server_that_never_ends_to_choose_holds_others_up_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_claims, "CHOOSING_SECONDS", 0.0)
    monkeypatch.setattr(device_claims, "CHOOSING", f"\0{uuid.uuid4().hex}")
    held = device_claims._bind(device_claims.CHOOSING)
    assert held is not None
    with held:
        claim, (name,) = DeviceClaim("job"), named(1)
        assert asyncio.run(claim.choose([name], False)) == (name, False)
        claim.release()


@pytest.mark.parametrize("sent", [None, [], "x:1", [1], ["a/b"], ["x:1\n"], ["x"] * 2000])
def test_names_that_a_worker_may_not_send_are_refused(sent: Any) -> None:
    with pytest.raises(ValueError, match="no names"):
        asyncio.run(DeviceClaim("job").choose(sent, False))
