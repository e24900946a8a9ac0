"""A minimal trace file with one span and the metadata of the run."""

from __future__ import annotations

GOOD_SPAN = {
    "ph": "X",
    "cat": "forward",
    "pid": 1,
    "ts": 1,
    "dur": 1,
    "args": {"step": 1, "microbatch": 0, "waited_us": 0},
}

HEADER = {"version": "1", "begin_ns": 0, "stages": [{"name": "a", "host": "h", "producers": []}]}
