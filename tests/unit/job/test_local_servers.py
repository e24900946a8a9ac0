"""The options of servers that a job starts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.errors import ConfigError
from rpcmp.job.local_servers import serve_options

JOB = {"loss": "torch.nn:MSELoss", "model": {"layers": "m:layers", "balance": [1, 1]}}


def test_servers_keep_a_jobs_checkpoints_where_it_wants_them(tmp_path: Path) -> None:
    config = parse_config({**JOB, "name": "digits"}).with_folder(tmp_path)
    assert serve_options(config) == ["--checkpoints", str(tmp_path / "rpcmp-digits")]


def test_confined_servers_let_workers_read_what_the_job_names(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    data = {"train": "m:train", "paths": ["images"]}
    config = parse_config({**JOB, "data": data, "security": {"confine": True}})
    options = serve_options(config.with_folder(tmp_path))
    assert options[2:] == ["--confine", "--data", str(tmp_path / "images")]
    (tmp_path / "images").rmdir()
    with pytest.raises(ConfigError, match=r"there is no .*images on this machine"):
        serve_options(config.with_folder(tmp_path))
