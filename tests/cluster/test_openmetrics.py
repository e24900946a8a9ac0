"""The metrics of real runs and servers, as Prometheus scrapes them."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from rpcmp.observability import run_metrics as run_module
from rpcmp.server import server_metrics as server_module
from tests.support.faults import Faults
from tests.support.processes import (
    JobFolder,
    RunningHere,
    connect,
    poll_for,
    rpcmp,
    running,
    running_servers,
)
from tests.support.scraping import HERE, Samples, of, scrape, url_of, value

COUNTERS = tuple(
    family.sample
    for family in (*run_module.FAMILIES, *server_module.FAMILIES)
    if family.kind == "counter"
)


def assert_risen(before: Samples, after: Samples) -> None:
    """Fail if a counter has fallen or is missing."""
    fallen = {
        key: (number, after.get(key))
        for key, number in before.items()
        if key[0] in COUNTERS and not after.get(key, -1.0) >= number
    }
    assert fallen == {}


def restarted_at(url: str) -> Samples | None:
    """Return the samples of a server if its second worker runs, else None.

    A server looks at itself once a second, so "running" alone may still be the first one's.
    """
    found = scrape(url)
    runs = value(found, "rpcmp_server_state", state="running") == 1
    return found if runs and value(found, "rpcmp_server_worker_restarts_total") == 1 else None


ENDLESS = "steps = 100000\nnum_microbatches = 1"


@pytest.mark.cluster
def test_a_run_and_its_servers_are_scraped_while_one_is_lost(job: JobFolder) -> None:
    saved = "[checkpoint]\ndir = 'saved'\nevery_seconds = 0.5"
    config = Faults(job).config(ENDLESS, stages=2, milliseconds=10.0, sections=saved)
    anywhere = ("--metrics", f"{HERE}:0")
    with (
        running_servers(2, *anywhere) as servers,
        running("drive", config, "--connect", connect(servers), "--json", *anywhere) as run,
    ):
        url = url_of(run)
        others = [url_of(server.run) for server in servers]

        def complete() -> Samples | None:
            found = scrape(url)
            names = {name for name, _ in found}
            wanted = {f.sample for f in run_module.FAMILIES} - RARE
            pairs = set(of(found, "rpcmp_link_bytes_total", "source", "target"))
            return found if names >= wanted and pairs >= LINKS else None

        run.wait_for_line('"step": 5,')  # scrapes are expensive
        before = poll_for(complete, "all that a run has to say")
        first = [scrape(other) for other in others]
        labels = {("stage0",), ("stage1",), ("driver",)}
        assert set(of(before, "rpcmp_memory_bytes", "stage")) == labels
        assert min(of(before, "rpcmp_memory_bytes", "stage").values()) > 10 * 2**20
        assert 0 < min(of(before, "rpcmp_link_round_trip_seconds", "source").values()) < 10
        assert value(before, "rpcmp_generation") == 1
        assert value(before, "rpcmp_worker_state", stage="stage1", state="running") == 1

        os.kill(run.result().event("generation")["workers"]["stage1"]["pid"], signal.SIGKILL)

        def recovered() -> Samples | None:
            found = scrape(url)
            steps = value(found, "rpcmp_step") or 0
            is_back = value(found, "rpcmp_worker_state", stage="stage1", state="running") == 1
            goes_on = steps > (value(before, "rpcmp_step") or 0) + 5
            is_next = value(found, "rpcmp_restarts_total", stage="stage1") == 1
            flows = value(found, "rpcmp_link_bytes_total", source="stage0", target="stage1") or 0
            more = value(before, "rpcmp_link_bytes_total", source="stage0", target="stage1") or 0
            return found if is_back and goes_on and is_next and flows > more else None

        run.wait_for_line('"recovered"')
        again = run.result().event("recovered")["step"]
        run.wait_for_line(f'"event": "step".*"step": {again + 15},')
        after = poll_for(recovered, "the run to go on")
        assert_risen(before, after)
        assert value(after, "rpcmp_faults_total", stage="stage1") == 1
        assert value(after, "rpcmp_generation") == 2
        for other, seen in zip(others, first, strict=True):
            now = poll_for(partial(restarted_at, other), "the server to count the restart")
            assert_risen(seen, now)
            assert value(now, "rpcmp_server_jobs_total") == 1
        assert {"forward", "backward", "optimizer"} <= {
            kind for (kind,) in of(now, "rpcmp_server_worker_busy_seconds_total", "kind")
        }
        os.kill(run.pid, signal.SIGINT)
        assert run.wait().code == 130
        poll_for(
            lambda: value(scrape(others[0]), "rpcmp_server_state", state="idle") == 1,
            "the server to be free",
        )
        assert value(scrape(others[0]), "rpcmp_server_jobs_total") == 1
        assert not of(scrape(others[0]), "rpcmp_server_worker_memory_bytes", "stage")


LINKS = {("stage0", "stage1"), ("stage1", "stage0"), ("driver", "stage0"), ("stage1", "driver")}


RARE = {
    "rpcmp_device_memory_bytes",
    "rpcmp_evaluation",
    "rpcmp_group_learning_rate",
    "rpcmp_loss_scale",
    "rpcmp_skipped_steps",
    "rpcmp_faults_total",
}
"""Metrics that have no samples in this run, at least at first."""


WIDTH = 20_000


MICROBATCH_BYTES = 3 * WIDTH * 4  # three float32 samples in the first of four micro-batches


WIDE = f"""
from torch import nn

def layers():
    return [
        ("hidden", lambda: nn.Linear(8, {WIDTH})),
        ("head", lambda: nn.Linear({WIDTH}, 1)),
    ]
"""

CONFIG = """
    steps = 100000
    [optimizer]
    callable = "torch.optim:SGD"
    kwargs = { lr = 1e-9 }
    [model]
    layers = "wide:layers"
    balance = [1, 1]
"""


@pytest.mark.cluster
def test_traffic_counts_tensors_copied_through_shared_memory(job: JobFolder) -> None:
    (job.folder / "wide.py").write_text(WIDE)

    def watch(run: RunningHere) -> None:
        url = url_of(run)

        def flows() -> tuple[float, float] | None:
            found = scrape(url)
            there, back = (
                value(found, "rpcmp_link_bytes_total", source=a, target=b) or 0
                for a, b in (("stage0", "stage1"), ("stage1", "stage0"))
            )
            return (there, back) if min(there, back) > 100 * MICROBATCH_BYTES else None

        run.wait_for_line('"step": 25,')  # scrapes are expensive
        there, back = poll_for(flows, "a hundred micro-batches")
        assert there == pytest.approx(back, rel=0.05)  # a gradient has the shape of its activation
        run.signal(signal.SIGINT)

    options = ("--json", "--metrics", f"{HERE}:0")
    assert rpcmp("drive", job.config(CONFIG), *options, during=watch).code == 130
