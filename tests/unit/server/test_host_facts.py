"""Facts about a host: its folder for checkpoints, and its code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rpcmp.config.files import sha256_of
from rpcmp.config.types import Factory
from rpcmp.server.host_facts import CheckRequest, check_devices_and_code, marked, try_folder


def test_try_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    found = try_folder(tmp_path / "a" / "b")
    assert (found.problem, found.has_marker) == ("", False)
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    with marked(tmp_path) as marker:
        assert try_folder(tmp_path, marker).has_marker
    (tmp_path / "file").write_text("")
    assert try_folder(tmp_path / "file" / "b").problem == "Not a directory"


def test_the_hash_of_a_package_covers_its_subpackages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "rpcmp_test_package"
    (package / "inner").mkdir(parents=True)
    for made in (package, package / "inner"):
        (made / "__init__.py").write_text("")
    (package / "inner" / "deep.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = sha256_of(package.name)
    (package / "inner" / "deep.py").write_text("x = 2\n")
    assert sha256_of(package.name) != first
    (package / "inner" / "deep.py").write_text("x = 1\n")
    for name in ("notes", ".ipynb_checkpoints"):  # folders that a job does not send
        (package / name).mkdir()
        (package / name / "deep.py").write_text("x = 3\n")
    assert sha256_of(package.name) == first
    with pytest.raises(ImportError, match="no module 'rpcmp_no_such_package'"):
        sha256_of("rpcmp_no_such_package")


BUILT = """
from pathlib import Path
from torch import nn

def net(file):
    Path(__file__).with_name(file).read_text()
    return nn.Linear(2, 2)

def draws():
    layer = nn.Linear(2, 2)
    assert layer.weight.abs().sum() > 0  # cannot be made without values
    return layer

def layers(file):
    return [("a", lambda: net(file))]
"""


def problems_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    made: str,
    file: str = "",
    init: str = "",
) -> dict[str, str]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "built_there", raising=False)
    (folder / "built_there.py").write_text(BUILT)
    name = f"built_there:{made}"
    request = CheckRequest(
        callables={key: name},
        devices=[],
        builds={key: Factory(callable=name, kwargs={"file": file} if file else {})},
        init=init,
    )
    order = {"order": request.model_dump_json(), "code_folder": str(folder), "allowed": None}
    (answer,) = check_devices_and_code(order)
    problems: dict[str, str] = answer["problems"]
    return problems


def test_what_cannot_be_built_on_a_host_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is read by a constructor is there or not, as by an import."""
    (tmp_path / "sizes.txt").write_text("2")
    for made in ("net", "layers"):
        key = "model.module" if made == "net" else "model.layers"
        assert problems_of(tmp_path, monkeypatch, key, made, "sizes.txt") == {}
    assert problems_of(tmp_path, monkeypatch, "model.module", "draws") == {}
    found = problems_of(tmp_path, monkeypatch, "stages.1.module", "net", "vocabulary.txt")
    assert "'built_there:net' failed: FileNotFoundError: " in found["stages.1.module"]
    found = problems_of(tmp_path, monkeypatch, "model.module", "draws", "unknown")
    assert "model.module" in found
    # Its weights are sent by the driver later.
    away = str(tmp_path / "weights")
    assert problems_of(tmp_path, monkeypatch, "model.module", "net", "no", init=away) == {}
