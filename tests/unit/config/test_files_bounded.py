"""Files from other parties are read within bounds."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from rpcmp.checkpoint.folder import MANIFEST, look
from rpcmp.config import loader
from rpcmp.config.files import MIB
from rpcmp.errors import ConfigError
from rpcmp.observability.trace import chrome, spans
from rpcmp.observability.trace.analysis import measure
from tests.support.tracefiles import GOOD_SPAN, HEADER
from tests.support.traces import drawn


def test_a_compressed_trace_is_limited_by_its_decompressed_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome, "MAX_TEXT", 100_000)
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress(b" " * 200_000))
    with pytest.raises(ConfigError, match=r"run.json.gz is not .* longer than 100,000 characters"):
        chrome.read(path)


def test_pipes_and_devices_are_refused_as_traces(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    for path in (tmp_path / "run.json", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="not a regular file"):
            chrome.read(path)


def test_values_may_span_blocks_and_the_array_may_be_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    later = [
        {**GOOD_SPAN, "ts": 10 * n, "args": {"step": n, "microbatch": 0, "waited_us": 0}}
        for n in range(1, 2000)
    ]
    document = {"other": 1.5, "metadata": {"rpcmp": HEADER}, "traceEvents": later, "last": [{}]}
    path.write_text(json.dumps(document, indent=3))
    assert [span.step for span in chrome.read(path).tracks[0].spans] == [*range(1, 2000)]


def test_some_steps_of_a_trace_with_too_many_spans_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    cells = "F0 B0 O . " * 9
    chrome.write(drawn(f"a {cells}\nb . {cells}"), path)
    whole = chrome.read(path)
    expected = measure(whole, spans.choose_window(whole, 4, 5))
    monkeypatch.setattr(chrome, "MAX_SPANS", 30)
    with pytest.raises(ConfigError, match=r"run.json has more than 30 spans .* --steps 10:12"):
        chrome.read(path)
    part = chrome.read(path, 4, 5)
    assert len(part.tracks[0].spans) == 12
    assert measure(part, spans.choose_window(part, 4, 5)) == expected


def test_a_manifest_beyond_the_limits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_bytes(b" " * (16 * MIB + 1))
    assert "longer than 16 MiB" in getattr(look(tmp_path), "problem", "")
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "not a regular file" in getattr(look(tmp_path), "problem", "")


def test_a_config_beyond_the_limits_is_refused(tmp_path: Path) -> None:
    deep, endless = tmp_path / "deep.toml", tmp_path / "endless.toml"
    deep.write_text("a = " + "[" * 100_000)
    endless.symlink_to("/dev/zero")
    for path, reason in ((deep, "recursion"), (endless, "not a regular file")):
        with pytest.raises(ConfigError, match=rf"{path.name} is not valid TOML: .*{reason}"):
            loader.load_config(path)
