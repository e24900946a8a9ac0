"""A new user's way from nothing to a model on two hosts: the README's commands, word for word.

The commands of the section are run in their order, each on the host that its comment names. Only
`scp` is replaced, by a copy between two folders.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docs import commands_of, section
from tests.support.lan import Host, lan
from tests.support.processes import Result, Running, rpcmp, running

SECTION = "From nothing to two hosts"


class Newcomer:
    """A user who has read nothing but the README.

    Args:
        hosts: by name; commands run on the first unless their comment names another.
        homes: the user's folder on each host.
        started: processes that run until the test ends.
    """

    def __init__(
        self, hosts: dict[str, Host], homes: dict[str, Path], started: contextlib.ExitStack
    ) -> None:
        self._hosts, self._homes, self._started = hosts, homes, started
        self.servers: list[Running] = []

    def type(self, line: str) -> Result | None:
        """Run a line; returns its result unless it keeps running."""
        command = shlex.split(line, comments=True)
        name = next((name for name in self._hosts if f"# on {name}" in line), "host-a")
        home = self._homes[name]
        if command[0] == "scp":
            _, option, source, there = command
            assert (option, there) == ("-r", "host-b:")
            shutil.copytree(home / source, self._homes["host-b"] / Path(source).name)
            return None
        assert command[0] == "rpcmp"
        under = self._hosts[name].inside
        run = self._started.enter_context(
            running(*command[1:], cwd=home, under=under, as_typed=True)
        )
        if command[1] == "serve":
            run.wait_for_line("is SERVING on")
            self.servers.append(run)
            return None
        return run.wait()


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    names = ("host-a", "host-b")
    homes = {name: tmp_path / name for name in names}
    for home in homes.values():
        home.mkdir()
    with lan(2, tmp_path) as hosts, contextlib.ExitStack() as started:
        yield Newcomer(dict(zip(names, hosts, strict=True)), homes, started)


def test_from_nothing_to_two_hosts(
    newcomer: Newcomer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "host-a"
    monkeypatch.chdir(home)
    alone, certificates, together = (commands_of(block) for block in section(SECTION))
    config = home / "my_model.toml"
    for command in alone:
        result = rpcmp(*shlex.split(command, comments=True)[1:])
        assert result.code == 0, f"{command}\n{result.err}"
        if config.exists():  # as the text below the block says
            text = config.read_text().replace("epochs = 10 ", "epochs = 1 ")
            config.write_text(text)
    config.write_text(re.sub(r"(?m)^#(?=\[checkpoint|dir|every_steps)", "", config.read_text()))
    for line in certificates:
        ended = newcomer.type(line)
        assert ended is None or ended.code == 0, line
    said = {}
    for line in together:
        name, _, value = line.partition("=")
        if name.startswith("export "):
            monkeypatch.setenv(name.removeprefix("export "), value)
            continue
        ended = newcomer.type(line)
        assert ended is not None
        assert ended.code == 0, f"{line}\n{ended.err}"
        said[line.split()[1]] = ended.out
    assert "0 failed" in said["doctor"]
    assert "done: 20 steps" in said["drive"]
    assert "bottleneck:" in said["trace"]
    assert (home / "my_model.safetensors").exists()
    assert list((tmp_path / "host-b").glob("checkpoints/*/step-*/stage1.safetensors"))
    assert newcomer.servers[1].wait().code == 0  # it was drained
