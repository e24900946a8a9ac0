"""Files of a run: only what its driver process has written itself arrives where it belongs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rpcmp.errors import ConfigError
from rpcmp.job.output_files import OutputFiles


def test_only_files_of_the_driver_process_are_delivered(tmp_path: Path) -> None:
    scratch, secret, place = tmp_path / "scratch", tmp_path / "key", tmp_path / "run" / "trace.json"
    scratch.mkdir()
    place.parent.mkdir()
    secret.write_text("secret")
    outputs = OutputFiles(scratch)
    written = Path(outputs.redirect({"trace": str(place)})["trace"])
    for make in (written.symlink_to, written.hardlink_to):
        make(secret)
        with pytest.raises(ConfigError, match="cannot write"):
            outputs.deliver()
        written.unlink()
        assert not place.exists()
    os.mkfifo(written)
    with pytest.raises(ConfigError, match="cannot write"):
        outputs.deliver()
    written.unlink()
    outputs.deliver()  # the file is missing
    with written.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(ConfigError, match="cannot write"):
        outputs.deliver()
    assert place.stat().st_size == 0
    written.write_text("a trace")
    outputs.deliver()
    assert place.read_text() == "a trace"
    written.replace(Path(outputs.redirect({"trace": str(tmp_path / "no" / "place")})["trace"]))
    with pytest.raises(ConfigError, match="no/place: No such file"):
        outputs.deliver()
