"""The image and the compose file are valid and locked down, and rpcmp has their commands."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rpcmp
from rpcmp.config.addresses import default_port, parse
from rpcmp.server.stage_server import DRAIN_SECONDS
from tests.support.commandlines import config_of, instructions, parsed
from tests.support.places import DEPLOY, ROOT
from tests.support.processes import running

DOCKERFILE, COMPOSE = DEPLOY / "Dockerfile", DEPLOY / "compose.yaml"

STAGES = ("stage0", "stage1", "stage2")


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Return the path of a program that pip installed beside this Python."""
    return subprocess.run(
        [Path(sys.executable).with_name(name), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def compose(*options: str) -> subprocess.CompletedProcess[str]:
    return tool("docker-compose", "--file", COMPOSE, "config", *options)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services as compose parses them."""
    found: dict[str, Any] = json.loads(compose("--format", "json").stdout)["services"]
    return found


@pytest.fixture(scope="module")
def image() -> dict[str, list[str]]:
    """The instructions of the image's last stage."""
    found: dict[str, list[str]] = {}
    for name, rest in instructions(DOCKERFILE):
        if name == "FROM":
            found = {}
        found.setdefault(name, []).append(rest)
    return found


def test_the_dockerfile_is_valid() -> None:
    found = tool("hadolint", "--failure-threshold", "style", DOCKERFILE)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_runs_rpcmp_as_an_unprivileged_user(image: dict[str, list[str]]) -> None:
    assert json.loads(image["ENTRYPOINT"][-1]) == ["rpcmp"]
    uid, gid = image["USER"][-1].split(":")
    assert "0" not in (uid, gid)
    assert f"--uid {uid}" in image["RUN"][0]
    assert f"--gid {gid}" in image["RUN"][0]
    assert image["EXPOSE"] == [str(default_port(0))]


def test_the_image_asks_the_server_for_its_health(image: dict[str, list[str]]) -> None:
    program, *command = json.loads(image["HEALTHCHECK"][0].partition("CMD ")[2])
    assert program == "rpcmp"
    assert parsed(command)["command"] == "health"


def test_a_container_stop_before_the_job_ends_is_a_failure(image: dict[str, list[str]]) -> None:
    (name,) = image["STOPSIGNAL"]
    with running("serve", "--stage", "0", "--listen", "127.0.0.1:0") as run:
        run.wait_for_line("SERVING")
        os.kill(run.pid, signal.Signals[name])
        assert run.wait().code not in (0, None)


def ignored(path: str) -> bool:
    """Whether a path is excluded from the build context: the last matching pattern decides."""
    patterns = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    result = False
    for pattern in (line for line in patterns if line and not line.startswith("#")):
        wanted = pattern.removeprefix("!")
        parts = [path, *map(str, Path(path).parents)]
        if any(fnmatch.fnmatch(part, wanted.replace("**/", "*")) for part in parts):
            result = not pattern.startswith("!")
    return result


def test_the_build_context_has_the_sources_and_no_secrets(tmp_path: Path) -> None:
    copied = [
        source
        for name, rest in instructions(DOCKERFILE)
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert {"pyproject.toml", "rpcmp", "README.md", "LICENSE"} <= set(copied)
    assert [path for path in copied if ignored(path) or not (ROOT / path).exists()] == []
    for secret in (
        "certs/ca.key",
        "deploy/certs/stage0/tls.key",
        ".git/config",
        "tests/support/lan.py",
    ):
        assert ignored(secret)


def test_the_images_torch_is_a_version_that_rpcmp_supports(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (line,) = [rest for name, rest in instructions(DOCKERFILE) if "TORCH_INDEX:+" in rest]
    for index, expected in (("", []), ("URL", ["--index-url", "URL"])):
        shown = subprocess.check_output(
            ["sh", "-c", line.replace("pip", "printf '%s\\n'", 1)],
            env={**os.environ, "TORCH_INDEX": index},
            cwd=tmp_path,
            text=True,
        )
        install, *arguments, requirement = shown.splitlines()
        assert (install, arguments) == ("install", expected)
        assert f'"{requirement}"' in (ROOT / "pyproject.toml").read_text()
        assert requirement.startswith("torch>=")


def test_the_compose_file_is_valid() -> None:
    found = compose("--quiet")
    assert (found.returncode, found.stderr) == (0, "")


def test_every_service_is_locked_down(
    services: dict[str, Any], image: dict[str, list[str]]
) -> None:
    assert set(services) == {*STAGES, "driver"}
    for name, service in services.items():
        assert service["image"] == f"rpcmp:{rpcmp.__version__}"
        assert service["user"] == image["USER"][-1]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"ports", "privileged", "cap_add", "network_mode", "pid"} & set(service)
        mounted = {volume["target"]: volume for volume in service["volumes"]}
        assert mounted["/certs"]["read_only"] is True
        assert Path(mounted["/certs"]["source"]) == DEPLOY / "certs" / name
        assert service["environment"]["RPCMP_CERTS"] == "/certs"
        assert image["WORKDIR"][-1] in mounted
        assert seconds(service["stop_grace_period"]) > DRAIN_SECONDS


def seconds(duration: str) -> int:
    minutes, rest = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", duration).groups(default="0")  # type: ignore[union-attr]
    return 60 * int(minutes) + int(rest)


def test_the_driver_waits_for_stages_that_it_reaches(services: dict[str, Any]) -> None:
    driver = services["driver"]
    assert {
        name: need["condition"] for name, need in driver["depends_on"].items()
    } == dict.fromkeys(STAGES, "service_healthy")
    drive = parsed(driver["command"])
    config = config_of(drive)
    dialled = [parse(address) for address in drive["connect"].split(",")]
    assert [host for host, _ in dialled] == list(STAGES)
    assert config.num_stages == len(STAGES)
    assert config.checkpoint is not None
    assert config.checkpoint.shared
    state = next(v["target"] for v in driver["volumes"] if v["type"] == "volume")
    assert Path(config.checkpoint.dir).is_relative_to(state)
    for index, (host, port) in enumerate(dialled):
        service = services[host]
        serve, (kind, program, *probe) = parsed(service["command"]), service["healthcheck"]["test"]
        assert int(serve["stage"]) == index
        assert parse(serve["listen"]) == ("0.0.0.0", port)
        assert (kind, program, parsed(probe)["command"]) == ("CMD", "rpcmp", "health")
        assert port == default_port(0), "the probe gives no address"
        assert service["environment"]["RPCMP_SERVER_NAME"] == host
        assert service["restart"] == "unless-stopped"


def test_the_comments_commands_make_the_mounted_certificates(services: dict[str, Any]) -> None:
    (line,) = re.findall(r"rpcmp (certs init .*)", COMPOSE.read_text())
    _, init, *options = line.split()
    assert (init, options[0]) == ("init", "certs")
    assert options[1:] == [part for stage in STAGES for part in ("--host", stage)]
