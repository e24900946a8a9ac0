"""Workers of one host exchange tensors through memory that both have mapped."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.faults import Faults
from tests.support.pool import lend_servers
from tests.support.processes import JobFolder, Running, connect, running

ENDLESS = "steps = 100000\nnum_microbatches = 2"


def shared_with(run: Running) -> dict[str, set[str]]:
    """Return whose memory each process of a run has mapped, by their names."""
    event = run.result().event("generation")
    pids = {name: worker["pid"] for name, worker in event["workers"].items()}
    pids["driver"] = event["driver"]["pid"]
    maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    return {
        name: set(re.findall(r"memfd:rpcmp-tensors-(\w+)\S*-[0-9a-f]{32}", text))
        for name, text in maps.items()
    }


def test_readers_map_the_memory_of_those_that_they_read(job: JobFolder) -> None:
    config = Faults(job).config(ENDLESS, stages=3)
    with running("drive", config, "--json") as run:
        run.wait_for_line('"step": 3,')
        found = shared_with(run)
    assert found["stage0"] >= {"stage0", "driver"}
    assert found["stage1"] >= {"stage0", "stage1"}
    assert found["stage2"] >= {"stage1", "driver"}
    assert found["stage0"].isdisjoint({"stage1", "stage2"})


def test_so_do_confined_workers_which_may_open_nothing_of_each_other(job: JobFolder) -> None:
    config = Faults(job).config(ENDLESS, stages=2)
    with running("drive", config, "--json", "--set", "security.confine=true") as run:
        run.wait_for_line('"step": 3,')
        found = shared_with(run)
    assert found["stage1"] >= {"stage0", "driver"}


def test_standing_servers_of_one_host_share_memory_as_well(job: JobFolder) -> None:
    config = Faults(job).config(ENDLESS, stages=2)
    with lend_servers(2) as servers:
        where = ("--connect", connect(servers))
        with running("drive", config, "--json", *where) as run:
            run.wait_for_line('"step": 3,')
            found = shared_with(run)
    assert found["stage1"] >= {"stage0", "driver"}
