"""The log lines of workers: in order, with gaps named."""

from __future__ import annotations

import asyncio

from rpcmp.job.worker_logs import LogCollector
from rpcmp.process.logging.records import Entry
from rpcmp.v1 import control_pb2 as pb


def test_lines_are_passed_on_with_a_warning_for_each_gap() -> None:
    entries: list[Entry] = []
    logs = LogCollector(3, entries.append)

    async def run() -> None:
        waiting = asyncio.create_task(logs.wait_for_line("one", 4))
        for number in (1, 4):
            await logs.add("one", [pb.LogLine(number=number, level="INFO", text=f"line {number}")])
        await waiting
        await logs.add("two", [pb.LogLine(number=1, level="ERROR", text="its own numbers")])

    asyncio.run(run())
    logs.add_own("two", "said here", "INFO")
    assert [(each["stage"], each["level"], each["text"]) for each in entries] == [
        ("one", "INFO", "line 1"),
        ("one", "WARNING", "2 lines are missing here: they were too many"),
        ("one", "INFO", "line 4"),
        ("two", "ERROR", "its own numbers"),
        ("two", "INFO", "said here"),
    ]
    assert {each["generation"] for each in entries} == {3}
