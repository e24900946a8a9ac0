"""Shell completion, requested as shells do, and by a real shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class

from rpcmp.cli import COMMANDS, cli
from rpcmp.cli.new import examples
from rpcmp.config.loader import load_config
from rpcmp.errors import ConfigError
from rpcmp.tools.bench.cases import frozen
from tests.support.places import EXAMPLES

CONFIG = """
steps = 1
loss = "torch.nn:MSELoss"
optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.1, momentum = 0.9 } }
[[stages]]
module = "m:A"
[[stages]]
module = "m:B"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with configs."""
    (tmp_path / "first.toml").write_text(CONFIG)
    (tmp_path / "second.toml").write_text(CONFIG)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/third.toml").touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


def offered(folder: Path, line: str) -> list[str]:
    """Return the completions of a line's last word, as requested by fish."""
    words = line.split(" ")
    environment = {"COMP_WORDS": line, "COMP_CWORD": words[-1]}
    shell = get_completion_class("fish")
    assert shell is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in environment.items():
            patch.setenv(name, value)
        answer = shell(cli, {}, "rpcmp", "_RPCMP_COMPLETE").complete()
    lines = [each.split("\t")[0].split(",", 1) for each in answer.splitlines()]
    return [value if kind == "plain" else f"({kind})" for kind, value in lines]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rpcmp d", ["doctor", "drain", "drive"]),
        ("rpcmp certs i", ["init", "issue"]),
        ("rpcmp drive --re", ["--resume"]),
        ("rpcmp drive ", ["first.toml", "jobs/", "second.toml"]),
        ("rpcmp drive s", ["second.toml"]),
        ("rpcmp drive jobs/", ["jobs/third.toml"]),
        ("rpcmp drive empty/", ["(file)"]),
        ("rpcmp drive first.toml --set data.b", ["data.batch_size="]),
        ("rpcmp drive first.toml --set data", ["data."]),
        ("rpcmp drive first.toml --set optimizer", ["optimizer=", "optimizer."]),
        (
            "rpcmp drive first.toml --set optimizer.kwargs.",
            ["optimizer.kwargs.lr=", "optimizer.kwargs.momentum="],
        ),
        ("rpcmp drive first.toml --set stages.", ["stages.0.", "stages.1."]),
        ("rpcmp drive first.toml --set stages.1.na", ["stages.1.name="]),
        ("rpcmp drive first.toml --set schedule=z", ["schedule=zero-bubble"]),
        (
            "rpcmp drive first.toml --set recovery.enabled=",
            ["recovery.enabled=true", "recovery.enabled=false"],
        ),
        ("rpcmp drive first.toml --set nothing.like.it", []),
        ("rpcmp doctor nowhere.toml --set optimizer.kwargs.", []),
        ("rpcmp new job --like re", [name for name in examples() if name.startswith("re")]),
        ("rpcmp bench o", ["overhead"]),
        ("rpcmp bench ", [*frozen(), "first.toml", "jobs/", "second.toml"]),
        ("rpcmp serve --certs ", ["(dir)"]),
        ("rpcmp completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_started_words_are_completed(folder: Path, line: str, expected: list[str]) -> None:
    assert offered(folder, line) == expected


def test_all_commands_are_offered(tmp_path: Path) -> None:
    assert offered(tmp_path, "rpcmp ") == list(COMMANDS)


def test_every_completed_key_exists(folder: Path) -> None:
    """Down to the leaves: a nonsense value causes a wrong value, never an unknown key."""
    open_, keys = [""], list[str]()
    while open_:
        for found in offered(folder, f"rpcmp drive first.toml --set {open_.pop()}"):
            (open_ if found.endswith(".") else keys).append(found)
    assert {"steps=", "data.train.callable=", "stages.0.device=", "recovery.enabled="} <= {*keys}
    for key in keys:
        message = complaint(folder / "first.toml", f"{key}{{ nonsense = 1 }}")
        assert f"{key.removesuffix('=')}: unknown key" not in message
    assert "stages.0.nam: unknown key" in complaint(folder / "first.toml", "stages.0.nam=1")


def complaint(config: Path, override: str) -> str:
    """Return the error of a config."""
    try:
        load_config(config, [override])
    except ConfigError as error:
        return str(error)
    return ""


def test_completion_imports_neither_torch_nor_grpc() -> None:
    code = """
import contextlib, os, sys
from rpcmp.cli import main
for line in sys.argv[1:]:
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    with contextlib.suppress(SystemExit):
        main()
    found = [name for name in ("torch", "grpc", "numpy") if name in sys.modules]
    print(found, flush=True)  # each call has an output of its own
"""
    lines = ["rpcmp ", "rpcmp drive x.toml --set data.", "rpcmp bench ", "rpcmp new x --like "]
    result = subprocess.run(
        [sys.executable, "-c", code, *lines],
        env={**os.environ, "_RPCMP_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    *offered, rest = result.stdout.split("[]\n")
    assert (len(offered), rest) == (len(lines), ""), result.stderr
    assert all(len(text.splitlines()) > 1 for text in offered)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_every_shell_calls_rpcmp(shell: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rpcmp", "completion", shell],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"_RPCMP_COMPLETE={shell}_complete" in result.stdout
    if shell == "bash":  # of the others see tests/system/test_shells.py
        checked = subprocess.run(["bash", "-n"], input=result.stdout, text=True, timeout=60)
        assert checked.returncode == 0


BECOMES = {
    "rpcmp dri\t": "drive",
    "rpcmp drive fi\t": "drive first.toml",
    "rpcmp drive first.toml --set data.ba\t64": "drive first.toml --set data.batch_size=64",
    "rpcmp drive first.toml --set schedule=z\t": "drive first.toml --set schedule=zero-bubble",
}
"""What is typed, and the arguments that it becomes."""


def test_bash_completes_a_typed_line(folder: Path) -> None:
    """A real bash with its line editor."""
    assert typed_in_bash(folder, *BECOMES) == list(BECOMES.values())


def test_a_files_name_is_no_command(folder: Path) -> None:
    for name in ("$(touch made).toml", "x\nplain,$(touch made).toml"):
        (folder / "empty" / name).touch()
    assert typed_in_bash(folder, "rpcmp drive empty/\t") == ["drive empty/$(touch made).toml"]
    assert not (folder / "made").exists()


def typed_in_bash(folder: Path, *lines: str) -> list[str]:
    """Return the arguments of each command that is typed on a terminal."""
    import pty

    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "rpcmp").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rpcmp "$@"\n')
    (bin_ / "rpcmp").chmod(0o755)
    calls = folder / "calls"
    setup = folder / "setup.bash"
    setup.write_text(
        f'PATH={shlex.quote(str(bin_))}:"$PATH"\n'
        'eval "$(rpcmp completion bash)"\n'
        # From now on the command only says what it got; to complete it, bash asks the program.
        f'rpcmp() {{ echo "$*" >> {calls}; }}\n'
    )
    master, slave = pty.openpty()
    process = subprocess.Popen(
        ["bash", "--rcfile", setup, "-i"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(slave)
    os.write(master, "".join(f"{line}\n" for line in (*lines, "exit")).encode())
    shown = b""
    while True:
        try:
            shown += os.read(master, 65536)
        except OSError:
            break
    os.close(master)
    process.wait(30)
    assert calls.exists(), shown.decode(errors="replace")
    return [line.strip() for line in calls.read_text().splitlines()]


def test_the_examples_can_be_completed(tmp_path: Path) -> None:
    begun = str(EXAMPLES / "digi")
    assert offered(tmp_path, f"rpcmp verify {begun}") == [f"{EXAMPLES}/digits.toml"]
