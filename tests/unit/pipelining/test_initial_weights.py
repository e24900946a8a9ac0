"""Weights to start from, in one file or in several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.pipelining.initial_weights import (
    StoredNames,
    load_weights,
    read_tensor,
    require_known_weights,
)
from rpcmp.pipelining.weight_files import INDEX, SINGLE, WeightFiles

WEIGHTS = {
    "a.weight": torch.full((2, 2), 1.0),
    "a.bias": torch.full((2,), 2.0),
    "b.weight": torch.full((2, 2), 3.0),
    "b.bias": torch.full((2,), 4.0),
}


def one_file(folder: Path) -> Path:
    save_file(WEIGHTS, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def one_in_a_folder(folder: Path) -> Path:
    save_file(WEIGHTS, folder / SINGLE)
    return folder


def several(folder: Path, parts: int = 2) -> Path:
    """Write the weights as `save_pretrained` does with a `max_shard_size`."""
    places: dict[str, str] = {}
    for number in range(parts):
        file = f"model-{number + 1:05}-of-{parts:05}.safetensors"
        part = dict(list(WEIGHTS.items())[number::parts])
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    total = {"metadata": {"total_size": 96}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(total))
    return folder


def its_index(folder: Path) -> Path:
    return several(folder) / INDEX


FORMS = pytest.mark.parametrize("write", [one_file, one_in_a_folder, several, its_index])


def model() -> dict[str, tuple[str, nn.Module]]:
    return {name: (f"{name}.", nn.Linear(2, 2)) for name in ("a", "b")}


def load(
    path: str,
    modules: dict[str, tuple[str, nn.Module]],
    tied_to: dict[str, str],
    owns_prefixes: bool = True,
) -> None:
    files = WeightFiles(path)
    load_weights(files, modules, StoredNames(files.names, tied_to), owns_prefixes)


def state(modules: dict[str, tuple[str, nn.Module]]) -> dict[str, Tensor]:
    pairs = modules.values()
    return {p + name: value for p, module in pairs for name, value in module.state_dict().items()}


@FORMS
def test_each_layer_gets_its_tensors(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = str(write(tmp_path))
    modules = model()
    require_known_weights(WeightFiles(path), ["a.", "b."], None)
    require_known_weights(WeightFiles(path), [], set(WEIGHTS))
    load(path, modules, {}, owns_prefixes=True)
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in state(modules).items())


def test_a_host_opens_only_the_files_that_its_layers_are_in(tmp_path: Path) -> None:
    several(tmp_path, parts=4)
    for part in (1, 2, 3):
        (tmp_path / f"model-0000{part}-of-00004.safetensors").write_text("damaged")
    files = WeightFiles(str(tmp_path))
    assert files.names == set(WEIGHTS)
    assert torch.equal(read_tensor(files, "b.bias"), WEIGHTS["b.bias"])
    with pytest.raises(ConfigError, match=r"\(model-00002-of-00004\.safetensors\) cannot be read"):
        read_tensor(files, "a.bias")


def test_a_tied_parameter_may_be_stored_once(tmp_path: Path) -> None:
    modules = model()
    stored = {name: value for name, value in WEIGHTS.items() if name != "b.weight"}
    save_file(stored, tmp_path / SINGLE)
    load(str(tmp_path), modules, {"b.weight": "a.weight"}, owns_prefixes=True)
    assert torch.equal(state(modules)["b.weight"], WEIGHTS["a.weight"])


def test_all_that_does_not_fit_is_named(tmp_path: Path) -> None:
    wrong = {name: value for name, value in WEIGHTS.items() if not name.endswith("bias")}
    wrong |= {"a.weight": torch.ones(3, 2), "b.scale": torch.ones(1)}
    save_file(wrong, tmp_path / SINGLE)
    with pytest.raises(ConfigError) as raised:
        load(str(tmp_path), model(), {}, owns_prefixes=True)
    assert str(raised.value) == (
        f"init = {str(tmp_path)!r} does not fit the model: it has another shape of a.weight "
        "([3, 2], not [2, 2]); it lacks a.bias, b.bias; it has, for no layer, b.scale"
    )
    with pytest.raises(ConfigError, match=r"has tensors of no layer: b\.scale"):
        require_known_weights(WeightFiles(str(tmp_path)), [], set(WEIGHTS))


def break_name(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a.weight": "../other.safetensors"}}')


def break_file(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def break_json(folder: Path) -> None:
    (folder / INDEX).write_text("[")


def break_place(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["b.bias"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def break_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (break_name, "names '../other.safetensors', which is no file beside it"),
        (break_file, "model-00002-of-00002.safetensors is missing, which model.safetensors.index"),
        (break_json, "model.safetensors.index.json: .*JSON"),
        (break_place, "model-00001-of-00002.safetensors has no 'b.bias', or is damaged"),
        (break_all, "is a folder without model.safetensors or model.safetensors.index.json"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_file(
    tmp_path: Path, damage: Callable[[Path], None], text: str
) -> None:
    damage(several(tmp_path))
    with pytest.raises(ConfigError, match=text):
        load(str(tmp_path), model(), {}, owns_prefixes=True)


@pytest.mark.parametrize("part", ["", SINGLE])
def test_a_link_that_cannot_be_read_says_what_a_link_needs(tmp_path: Path, part: str) -> None:
    (tmp_path / SINGLE).symlink_to(tmp_path / "blobs" / "1")
    with pytest.raises(ConfigError, match=r"is a link: its folder has to be in data\.paths too"):
        load(str(tmp_path / part), model(), {}, owns_prefixes=True)
