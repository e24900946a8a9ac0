"""Excerpts of the files of `init`; reading them: tests/unit/pipelining/test_initial_weights.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rpcmp.checkpoint.weight_excerpt import Excerpt
from rpcmp.errors import ConfigError
from rpcmp.pipelining.weight_files import INDEX, WeightFiles
from rpcmp.server.connection import MAX_MESSAGE

WEIGHTS = {
    "a": torch.arange(5, dtype=torch.uint8),
    "b": torch.randn(3, 2),
    "c": torch.randn(7).to(torch.bfloat16),
    "d": torch.randn(2**19),  # 2 MiB
    "empty": torch.empty(0, 3),
}


def several(folder: Path) -> WeightFiles:
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(WEIGHTS)}
    for file in set(places.values()):
        part = {name: WEIGHTS[name] for name in WEIGHTS if places[name] == file}
        save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return WeightFiles(str(folder))


def written(excerpt: Excerpt, path: Path) -> dict[str, Tensor]:
    blocks = list(excerpt.blocks())
    path.write_bytes(b"".join(blocks))
    assert path.stat().st_size == excerpt.size
    return load_file(path)


@pytest.mark.parametrize("names", [["d", "a", "c", "a"], list(WEIGHTS), ["empty"], []])
def test_an_excerpt_has_the_named_tensors_of_all_files(tmp_path: Path, names: list[str]) -> None:
    found = written(Excerpt(several(tmp_path), names), tmp_path / "excerpt")
    assert set(found) == set(names)
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in names)


def test_equal_excerpts_have_one_key_and_others_another(tmp_path: Path) -> None:
    files = several(tmp_path)
    file = files.places["a"]
    key = Excerpt(files, ["a", "b"]).key
    assert Excerpt(WeightFiles(str(tmp_path)), ["b", "a"]).key == key
    assert Excerpt(files, ["a"]).key != key
    os.utime(file, ns=(0, 0))
    assert Excerpt(files, ["a", "b"]).key != key


def test_a_tensor_that_its_file_lacks_is_named(tmp_path: Path) -> None:
    files = several(tmp_path)
    files.places["a"] = files.places["b"]
    with pytest.raises(ConfigError, match=r"init = '.*': part-1\.safetensors has no 'a'"):
        Excerpt(files, ["a"])


def test_a_tensor_that_is_in_no_file_any_more_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"init = '.*' has no 'gone' any more"):
        Excerpt(several(tmp_path), ["a", "gone"])


def test_a_file_that_is_cut_off_meanwhile_is_named(tmp_path: Path) -> None:
    files = several(tmp_path)
    excerpt = Excerpt(files, ["d"])
    os.truncate(files.places["d"], 2**20)
    with pytest.raises(ConfigError, match=r"\(part-1\.safetensors\) cannot be read: .* cut off"):
        list(excerpt.blocks())


def test_blocks_fit_into_messages(tmp_path: Path) -> None:
    large = {"large": torch.zeros(2 * MAX_MESSAGE, dtype=torch.uint8)}
    save_file(large, tmp_path / "large")
    excerpt = Excerpt(WeightFiles(str(tmp_path / "large")), large)
    assert max(map(len, excerpt.blocks())) <= MAX_MESSAGE / 2
