"""Whose CPU time counts, and when others have taken too much of it."""

from __future__ import annotations

import os
import re
import time

import pytest

from rpcmp.tools.bench import cpu_usage
from rpcmp.tools.bench.cpu_usage import CpuMeter, Kin, MachineTimes, disturbance

KIN = {
    1: Kin(0, 0.0),
    10: Kin(1, 0.0),  # the benchmark
    11: Kin(10, 0.0),  # a peer, and what it has started
    12: Kin(11, 0.0),
    13: Kin(10, 0.0),  # ours
    14: Kin(13, 0.0),
    20: Kin(1, 0.0),
}


def test_a_family_is_all_that_was_started_but_by_others() -> None:
    assert cpu_usage.family(KIN, [10]) == {10, 11, 12, 13, 14}
    assert cpu_usage.family(KIN, [10], [11]) == {10, 13, 14}
    assert cpu_usage.family(KIN, [11, 99], [10, 13]) == {11, 12}
    assert cpu_usage.family(KIN, [10], [10, 11]) == {10, 13, 14}


def test_a_processs_name_may_contain_anything() -> None:
    ticks = round(1 / cpu_usage.TICK_SECONDS)
    stat = f"7 (a) R 1 (b) S 4 7 7 0 -1 0 0 0 0 0 11 12 {2 * ticks} {ticks} 20 0 1 0 99"
    kin = cpu_usage.parse_kin(stat)
    assert kin.parent == 4
    assert kin.ended_seconds == pytest.approx(3.0)


def test_readings_themselves_do_not_count() -> None:
    meter = CpuMeter()
    counted, began = meter.read([os.getpid()]), time.process_time()
    for _ in range(3):
        last = meter.read([os.getpid()])
    assert 0 <= last - counted < time.process_time() - began


def test_only_the_cpus_that_may_be_used_count() -> None:
    stat = """cpu  999 999 999 999 999 999 999 999 9 9
cpu0 100 200 300 400 500 60 7 80 9 0
cpu1 10 20 30 40 50 6 7 8 9 0
cpu10 1 2 3 4 5 6 7 8 9 0
intr 1 2 3
"""
    ticks = cpu_usage.TICK_SECONDS
    both = MachineTimes.parse(stat, [0, 10], 5.0)
    assert both.total == pytest.approx((1647 + 36) * ticks)
    assert both.busy == pytest.approx((600 + 6) * ticks)
    assert both.stolen == pytest.approx((80 + 8) * ticks)
    assert both.ours == 5.0


@pytest.mark.parametrize(
    ("total", "busy", "stolen", "ours", "shares"),
    [
        (20.0, 10.0, 0.0, 9.5, []),
        (20.0, 10.0, 0.0, 8.0, ["10%", "0%"]),
        (20.0, 10.0, 1.4, 10.0, ["0%", "7%"]),
        (20.0, 10.0, 0.6, 9.4, ["3%", "3%"]),
        (20.0, 10.0, 0.6, 12.0, []),  # the two counters differ; ours is the better one
        (0.5, 0.5, 0.0, 0.0, []),  # too short to tell
    ],
)
def test_others_are_noted_from_a_share_on(
    total: float, busy: float, stolen: float, ours: float, shares: list[str]
) -> None:
    before = MachineTimes(100.0, 50.0, 1.0, 7.0)
    after = MachineTimes(100.0 + total, 50.0 + busy, 1.0 + stolen, 7.0 + ours)
    assert re.findall(r"\d+%", disturbance(before, after)) == shares
