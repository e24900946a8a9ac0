"""The versions that two hosts must share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest

from rpcmp.errors import ConfigError
from rpcmp.server import connection
from rpcmp.v1 import control_pb2 as pb
from tests.support.places import ROOT


def host(**changed: str | int) -> pb.Versions:
    """Return the versions of a host, with some of them changed."""
    versions = {"rpcmp": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11", "protocol": 1}
    return pb.Versions(**{**versions, **changed})  # type: ignore[arg-type]


@pytest.fixture
def _anew() -> Iterator[None]:
    """Have the versions read again, in this test and after it."""
    connection.versions.cache_clear()
    yield
    connection.versions.cache_clear()


def test_versions_lists_the_installed_packages() -> None:
    found = connection.versions()
    assert (found.rpcmp, found.torch) == (metadata.version("rpcmp"), metadata.version("torch"))
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.protocol == connection.PROTOCOL


@pytest.mark.usefixtures("_anew")
def test_versions_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each worker of each generation: it takes 2 ms."""
    read: list[str] = []
    version = metadata.version

    def counted(name: str) -> str:
        read.append(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", counted)
    for _ in range(3):
        connection.versions()
    assert sorted(read) == ["rpcmp", "torch"]


@pytest.mark.usefixtures("_anew")
def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.10.1", "2.16.0+cpu", "3.0"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        with pytest.raises(ConfigError, match=f"torch {re.escape(version)} is installed .*pip"):
            connection.versions()
    for version in ("2.11.0", "2.14.1", "2.15.0+cu132"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        connection.versions.cache_clear()
        assert connection.versions().torch == version


def test_the_releases_of_torch_are_those_of_the_package() -> None:
    first, end = (".".join(map(str, release)) for release in connection.TORCH)
    assert f'"torch>={first},<{end}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.13.0", "2.13.0+cu126"])
def test_equal_hosts_have_no_differences_and_the_build_of_torch_is_none(torch: str) -> None:
    assert connection.differences(host(), host(torch=torch)) == []


@pytest.mark.parametrize(
    ("field", "other", "message"),
    [
        ("protocol", 2, "protocol: 1 here, 2 there"),
        ("rpcmp", "0.2.0", "rpcmp: 0.1.0 here, 0.2.0 there"),
        ("torch", "2.13.1+cpu", "torch: 2.13.0+cpu here, 2.13.1+cpu there"),
        ("python", "3.12", "python: 3.11 here, 3.12 there"),
    ],
)
def test_a_difference_names_both_sides(field: str, other: str | int, message: str) -> None:
    assert connection.differences(host(), host(**{field: other})) == [message]


def test_all_differences_are_named() -> None:
    assert len(connection.differences(host(), pb.Versions())) == 4
