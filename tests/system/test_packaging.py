"""The wheel and the sdist are reproducible and complete."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import rpcmp
from tests.support.places import ROOT

DIST_INFO = f"rpcmp-{rpcmp.__version__}.dist-info"

LEFT_BY_RUNS = ("runs",)
"""Folders beside a config after a run of an example in this tree."""

EPOCH = 1_000_000_000
"""September 9, 2001, 01:46:40 UTC."""

ORIGIN = """
import rpcmp as _rpcmp
if not _rpcmp.__file__.startswith({site!r}):
    raise ImportError(f"rpcmp is that of {{_rpcmp.__file__}}")
"""
"""For a model, which drivers and workers import."""


def build(source: Path, out: Path, *kinds: str, **environment: str) -> dict[str, Path]:
    """Build without isolation, so without a download; returns the files by kind."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds]
    inherited = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"}
    done = subprocess.run(
        [*command, str(source)],
        capture_output=True,
        text=True,
        env=inherited | environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kind = {".whl": "wheel", ".gz": "sdist"}
    return {kind[path.suffix]: path for path in out.iterdir()}


def copy(to: Path, age: int, mode: int) -> Path:
    """Copy this repository with files of this age, and permissions of this umask."""
    unwanted = (".git", "certs", ".*_cache", ".venv", "dist", "build", "*.egg-info", ".hypothesis")
    shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*unwanted, *LEFT_BY_RUNS))
    for path in to.rglob("*"):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~mode)
        os.utime(path, (age, age))
    return to


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files built from a tree that also contains unrelated private files."""
    folder = tmp_path_factory.mktemp("one")
    source = copy(folder / "rpcmp", age=EPOCH, mode=0o002)
    for stray in (
        *("deploy/certs/stage0/tls.key", "notes.txt", "rpcmp/__pycache__/old.pyc"),
        *("rpcmp/examples/runs/digits-1/config.toml", "rpcmp/examples/rpcmp-digits/step-1/a"),
    ):
        (source / stray).parent.mkdir(parents=True, exist_ok=True)
        (source / stray).write_text("private")
    return build(source, folder / "out")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names(archive: Path) -> set[str]:
    """Return the names in a wheel, or in an sdist below its top folder."""
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as opened:
        return {member.name.partition("/")[2] for member in opened.getmembers()}


def shipped(folder: str) -> set[str]:
    """Return the files of a folder of this repository."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", *LEFT_BY_RUNS}.intersection(path.parts)
    }


def test_builds_are_reproducible_by_any_user_at_any_time_and_place(
    built: dict[str, Path], tmp_path: Path
) -> None:
    source = copy(tmp_path / "far" / "away", age=2 * EPOCH - 1, mode=0o077)
    again = build(source, tmp_path / "out", TZ="Asia/Tokyo", PYTHONHASHSEED="1")
    assert {kind: sha256(path) for kind, path in again.items()} == {
        kind: sha256(path) for kind, path in built.items()
    }
    shutil.unpack_archive(built["sdist"], tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    dated = build(unpacked, tmp_path / "dated", "--wheel", SOURCE_DATE_EPOCH=str(EPOCH))
    dates = {info.date_time for info in zipfile.ZipFile(dated["wheel"]).infolist()}
    assert dates == {(2001, 9, 9, 1, 46, 40)}
    assert names(dated["wheel"]) == names(built["wheel"])


def test_the_wheel_has_the_package_the_protos_and_the_license(built: dict[str, Path]) -> None:
    wheel = names(built["wheel"])
    protos = {f"rpcmp/{name}" for name in shipped("protos")}
    vendored = "rpcmp/observability/dashboard/assets/vendor"
    licenses = {f"licenses/{vendored}/{of}.LICENSE" for of in ("dagre", "uPlot")}
    papers = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"} | licenses
    assert wheel == shipped("rpcmp") | protos | {f"{DIST_INFO}/{name}" for name in papers}
    for needed in (
        "py.typed",
        "examples/digits.toml",
        "examples/spirals.py",
        "guide/README.md",
        "v1/control_pb2.pyi",
        "observability/dashboard/assets/index.html",
        "observability/dashboard/assets/vendor/uPlot.iife.min.js",
    ):
        assert f"rpcmp/{needed}" in wheel
    assert "rpcmp/protos/rpcmp/v1/control.proto" in wheel


def test_the_sdist_can_be_tested_and_built_again(
    built: dict[str, Path],
) -> None:
    sdist = names(built["sdist"])
    deployed = {f"deploy/{path.name}" for path in (ROOT / "deploy").iterdir() if path.is_file()}
    papers = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", ".ci/run", "PKG-INFO"}
    papers |= {".pre-commit-config.yaml", ".git-blame-ignore-revs"}
    folders = shipped("rpcmp") | shipped("protos") | shipped("tests") | shipped(".github")
    assert sdist == folders | deployed | papers | {".gitignore"}


def test_the_metadata_describes_the_package(built: dict[str, Path]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(built["wheel"]) as wheel:
        found = message_from_string(wheel.read(f"{DIST_INFO}/METADATA").decode())
    assert (found["Name"], found["Version"]) == ("rpcmp", rpcmp.__version__)
    assert (found["License-Expression"], found["Requires-Python"]) == (
        "Apache-2.0 AND MIT",
        ">=3.11",
    )
    assert found.get_payload() == (ROOT / "README.md").read_text()
    needed = [one for one in found.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert len(needed) == len(project["dependencies"])
    assert set(found.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert "Typing :: Typed" in found.get_all("Classifier", [])


@pytest.fixture
def environment(built: dict[str, Path], tmp_path: Path) -> Path:
    """A fresh virtual environment with the wheel; it shares this one's dependencies."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, *offline, str(built["wheel"])], check=True, timeout=120)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # After its own; what is installed here in place of a copy is not found like this.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder


def test_the_wheel_in_a_fresh_environment_makes_a_model_and_trains_it(
    environment: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    hidden = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(environment / "bin" / "rpcmp"), *command],
            capture_output=True,
            text=True,
            cwd=empty,
            env=hidden,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("--version").split()[-1] == rpcmp.__version__
    assert run("guide", "examples").startswith("# Examples")
    run("new", "my_model")
    assert {path.name for path in empty.iterdir()} == {"my_model.py", "my_model.toml"}
    with (empty / "my_model.py").open("a") as model:
        model.write(ORIGIN.format(site=str(environment)))
    assert "done: 5 steps" in run("drive", "my_model.toml", "--steps", "5")
