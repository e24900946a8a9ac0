"""Where the tensors and the config of `init` lie; how they are read: test_initial_weights.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rpcmp.errors import ConfigError
from rpcmp.pipelining.weight_files import CONFIG, INDEX, MAX_CONFIG, SINGLE, WeightFiles

ONE = {"a": np.zeros(2, dtype=np.float32)}


def test_a_file_and_a_folder_have_the_same_tensors(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_file(ONE, path)
    for given in (path, tmp_path):
        assert WeightFiles(str(given)).places == {"a": path}
    index = {"a": "other.safetensors"}
    save_file(ONE, tmp_path / index["a"])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    assert WeightFiles(str(tmp_path)).places == {"a": tmp_path / index["a"]}


def test_what_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_text("no tensors")
    with pytest.raises(ConfigError, match=r"\(model\.safetensors\) cannot be read"):
        assert WeightFiles(str(tmp_path)).names


def test_a_folder_may_have_a_config(tmp_path: Path) -> None:
    files = WeightFiles(str(tmp_path))
    assert files.config() == b""
    (tmp_path / CONFIG).write_text("{}")
    assert files.config() == b"{}"
    assert WeightFiles(str(tmp_path / SINGLE)).config() == b""
    (tmp_path / CONFIG).write_text("x" * (MAX_CONFIG + 1))
    with pytest.raises(ConfigError, match=r"\(config\.json\) cannot be read"):
        files.config()


def test_a_config_that_leads_out_of_its_folder_is_not_sent(tmp_path: Path) -> None:
    """The driver's host reads it with all rights of the user, and hosts of others get it."""
    secret, blobs = tmp_path / "secret.json", tmp_path / "hub" / "blobs"
    secret.write_text('{"auths": {}}')
    snapshot = tmp_path / "hub" / "snapshots" / "1a2b"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    for place in (tmp_path / "hub", snapshot):
        (place / CONFIG).symlink_to(secret)
        with pytest.raises(ConfigError, match=r"config\.json leads to .*secret\.json: copy that"):
            WeightFiles(str(place)).config()
        (place / CONFIG).unlink()
    (blobs / "5e6f").write_text("{}")
    (snapshot / CONFIG).symlink_to(blobs / "5e6f")  # as the hub's cache has it
    assert WeightFiles(str(snapshot)).config() == b"{}"
    blobs.rename(tmp_path / "blobs")
    blobs.symlink_to(tmp_path / "blobs")
    with pytest.raises(ConfigError, match="leads to"):
        WeightFiles(str(snapshot)).config()
