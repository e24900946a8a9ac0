"""Hashes and versions of the code that a process uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.config import files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two folders on the path: of a user, and one with packages beside each other."""
    before = set(sys.modules)
    sources = {
        "user/model_a.py": "import helper_b.deep, packed_c\nfrom packed_d import nothing\n",
        "user/helper_b/__init__.py": "",
        "user/helper_b/deep.py": "",
        "user/unused_e.py": "",
        "lib/packed_c.py": "import packed_f\n__version__ = '1.2'\n",
        "lib/packed_d/__init__.py": "__version__ = '3.4'\ndef nothing(): pass\n",
        "lib/packed_f.py": "__version__ = '5.6'\n",
        "lib/loss_g.py": "",
        "lib/any-1.0.dist-info/METADATA": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for part in ("lib", "user"):
        monkeypatch.syspath_prepend(tmp_path / part)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_hash_covers_named_modules_their_siblings_and_versions_of_imports(folder: Path) -> None:
    for name in ("model_a", "loss_g"):
        importlib.import_module(name)
    found = files.code_versions({"model_a", "loss_g", "torch.nn", "functools"})
    assert list(found) == [
        "the code of 'helper_b'",
        "the code of 'loss_g'",
        "the code of 'model_a'",
        "the version of 'packed_c'",
        "the version of 'packed_d'",
    ]
    assert [found[f"the version of 'packed_{which}'"] for which in "cd"] == ["1.2", "3.4"]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ("user/helper_b/deep.py", "the code of 'helper_b'"),
        ("user/helper_b/late.py", "the code of 'helper_b'"),
        ("lib/loss_g.py", "the code of 'loss_g'"),
        ("user/unused_e.py", None),
        ("lib/packed_f.py", None),
    ],
)
def test_a_changed_file_is_reported_by_its_module_if_it_is_used(
    folder: Path, changed: str, name: str | None
) -> None:
    importlib.import_module("model_a")
    before = files.code_versions({"model_a", "loss_g"})  # the latter is loaded in another process
    (folder / changed).write_text("# another release\n")
    after = files.code_versions({"model_a", "loss_g"})
    assert {key for key in after if after[key] != before[key]} == ({name} if name else set())


def test_the_build_of_a_release_is_ignored(folder: Path) -> None:
    """One host may have a wheel for CUDA, and the other one none."""

    def found(tag: str) -> dict[str, str]:
        (folder / "lib/packed_c.py").write_text(f"__version__ = '1.2+{tag}'\n")
        sys.modules.pop("packed_c", None)
        importlib.invalidate_caches()
        importlib.import_module("model_a")
        importlib.import_module("packed_c")
        return files.code_versions({"model_a", "packed_c"})  # named by the config, too

    assert found("cpu")["the version of 'packed_c'"] == "1.2"
    assert found("cpu") == found("cu126")
