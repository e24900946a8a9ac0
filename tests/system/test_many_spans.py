"""A trace with the maximum number of spans stays within its memory limit; it takes seconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from rpcmp.observability.trace import chrome
from tests.support.memory import MOST_MIB, measured
from tests.support.tracefiles import GOOD_SPAN


def test_a_trace_above_the_span_limit_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    text = json.dumps(GOOD_SPAN).encode() + b","
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(chrome.MAX_SPANS // 1000):
            file.write(text * 1000)
        file.write(text[:-1] + b"]}")
    code, message, mib = measured("trace", path)
    assert (code, mib < MOST_MIB) == (2, True), (code, mib)
    assert f"{path} has more than 1,000,000 spans" in message
