"""The Python files that a job sends to its stage servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.errors import ConfigError
from rpcmp.job import server_calls
from rpcmp.job.server_calls import code_access, collect_code


def write(folder: Path, *paths: str, content: str = "") -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


def collected(folder: Path) -> list[str]:
    return [file.path for file in collect_code(folder)]


def test_modules_and_packages_beside_the_config_are_collected(tmp_path: Path) -> None:
    write(tmp_path, "model.py", "data.py", "zoo/__init__.py", "zoo/deep/__init__.py")
    write(tmp_path, "zoo/deep/net.py")
    assert collected(tmp_path) == [
        "data.py",
        "model.py",
        "zoo/__init__.py",
        "zoo/deep/__init__.py",
        "zoo/deep/net.py",
    ]


def test_other_files_and_folders_are_not_collected(tmp_path: Path) -> None:
    write(tmp_path, "config.toml", "weights.bin", "model.pyc", "notes.py.txt")
    write(tmp_path, ".hidden.py", ".venv/__init__.py", ".venv/lib.py")
    write(tmp_path, "scripts/tool.py")  # no package
    write(tmp_path, "zoo/__init__.py", "zoo/__pycache__/x.py", "zoo/.cache/__init__.py")
    (tmp_path / "folder.py").mkdir()
    assert collected(tmp_path) == ["zoo/__init__.py"]


def test_a_folder_without_init_is_a_package_if_it_is_imported(tmp_path: Path) -> None:
    write(tmp_path, "model.py", content="import os\n\nfrom nets.deep import Net\n")
    write(tmp_path, "nets/deep.py", content="    import helpers.more as more\n")
    write(tmp_path, "helpers/more.py", "named/data.py", "scripts/tool.py")
    found = ["model.py", "nets/deep.py", "helpers/more.py"]
    assert sorted(collected(tmp_path)) == sorted(found)
    assert sorted(file.path for file in collect_code(tmp_path, ["named.data"])) == sorted(
        [*found, "named/data.py"]
    )


def test_collected_files_keep_their_bytes(tmp_path: Path) -> None:
    content = "# -*- coding: latin-1 -*-\r\nname = 'é'\r\n".encode("latin-1")
    (tmp_path / "model.py").write_bytes(content)
    (file,) = collect_code(tmp_path)
    assert file.content == content


def test_an_empty_folder_has_no_code(tmp_path: Path) -> None:
    assert collected(tmp_path) == []


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_calls, "MAX_FILES", 2)
    write(tmp_path, "a.py", "b.py")
    assert collected(tmp_path) == ["a.py", "b.py"]
    write(tmp_path, "c.py")
    with pytest.raises(ConfigError, match=r"more than 2 Python files .*ship_code = false"):
        collect_code(tmp_path)


def test_too_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_calls, "MAX_BYTES", 2**20)
    write(tmp_path, "a.py", "b.py", content="#" * 2**19)
    assert collected(tmp_path) == ["a.py", "b.py"]
    write(tmp_path, "c.py", content="#")
    with pytest.raises(ConfigError, match="1 MiB"):
        collect_code(tmp_path)


def test_a_file_that_vanished_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "model.py")

    def vanish(path: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "read_bytes", vanish)
    with pytest.raises(ConfigError, match=r"cannot read .*model\.py: No such file"):
        collect_code(tmp_path)


def test_a_link_out_of_the_jobs_folder_is_no_code(tmp_path: Path) -> None:
    """This process may read keys, and what it sends the job's code may read on other hosts."""
    job, data = tmp_path / "job", tmp_path / "data"
    write(job, "nets/__init__.py")
    write(data, "key", "shared/__init__.py")
    (job / "notes.py").symlink_to(data / "key")
    with pytest.raises(ConfigError, match=r"notes\.py leads to .*/data/key, outside of the job's"):
        collect_code(job)
    assert len(collect_code(job, may_lead=[str(data)])) == 2
    assert len(collect_code(job, may_lead=None)) == 2
    (job / "notes.py").unlink()
    (job / "shared").symlink_to(data / "shared")
    with pytest.raises(ConfigError, match="outside of the job's folder"):
        collect_code(job)
    (job / "shared").unlink()
    (job / "same.py").symlink_to(job / "nets" / "__init__.py")
    assert collected(job) == ["nets/__init__.py", "same.py"]


def test_code_beside_a_config_in_the_home_reads_python_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config({"loss": "m:loss", "model": {"layers": "m:layers"}})
    write(tmp_path, "m.py", "ann/m.py", "ann/letters.txt")
    for home, folder in [("ann", "ann"), ("ann", "."), ("bob", "ann")]:
        monkeypatch.setenv("HOME", str(tmp_path / home))
        access = code_access(config.with_folder(tmp_path / folder), ["127.0.0.1:1"])
        assert access is not None
        reads = access.may_read(str(tmp_path / "ann" / "letters.txt"))
        assert reads is (home == "bob")
        assert access.may_read(str(tmp_path / folder / "m.py"))


def test_a_folder_full_of_keys_cannot_be_hidden(tmp_path: Path) -> None:
    """One message to the fork server names all that a confined process may not open."""
    config = parse_config({"loss": "m:loss", "model": {"layers": "m:layers"}})
    config = config.with_folder(tmp_path)
    write(tmp_path, "one.key")
    access = code_access(config, ["127.0.0.1:1"])
    assert access is not None
    assert str(tmp_path / "one.key") in access.hidden
    write(tmp_path, *(f"{'x' * 200}{number}.key" for number in range(200)))
    with pytest.raises(ConfigError, match="has 201 files with names of keys and credentials"):
        code_access(config, ["127.0.0.1:1"])
