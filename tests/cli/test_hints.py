"""Errors end with the next command to run, with the user's config and addresses."""

from __future__ import annotations

import itertools
import shlex
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest

from rpcmp import errors
from rpcmp.cli import COMMANDS, cli
from rpcmp.cli.hints import SUGGESTIONS, Command, failed, remedy
from rpcmp.config import loader
from rpcmp.config.schema import Config
from tests.support.commandlines import parsed
from tests.support.everyerror import EXAMPLES as ERRORS
from tests.support.everyerror import tree
from tests.support.lan import cli as run_certs
from tests.support.lan import issue
from tests.support.places import EXAMPLES
from tests.support.pool import lend_servers
from tests.support.processes import Result, rpcmp, running_server

LONG_AGO = datetime.min.replace(tzinfo=UTC)
CONFIG = 'steps = 1\nloss = "torch.nn:MSELoss"\n[[stages]]\nmodule = "torch.nn:Identity"\n'
DRIVE = "'my job.toml' --steps 9 --connect a:1,b:2 --certs . --set seed=3"
RESUMED = f"rpcmp drive {DRIVE} --resume"
ABOUT = "'my job.toml' --set seed=3 --certs . --connect a:1,b:2"


def drive(arguments: str = DRIVE, **known: Any) -> Command:
    """Return a failed `rpcmp drive`."""
    words = shlex.split(arguments)
    command = cli.get_command(click.Context(cli), "drive")
    assert command is not None
    found = failed(command, "drive", words, LONG_AGO)
    return Command(**{**vars(found), "is_there": True, "is_loaded": True, **known})


def an(error: type[errors.RpcmpError]) -> errors.RpcmpError:
    """Return an error of this class."""
    return next(each for each in ERRORS if type(each) is error)


def test_every_error_class_has_a_suggestion() -> None:
    assert set(SUGGESTIONS) == tree(errors.RpcmpError)


def test_remedy_suggests_only_valid_commands() -> None:
    for error, name in itertools.product(ERRORS, COMMANDS):
        for command in (
            Command(name, ["c.toml"], "c.toml", ["--set", "seed=1", "--connect"]),
            Command(name, ["c.toml"], "c.toml", has_checkpoint=True),
            Command(name, [], health=["127.0.0.1:1", "--certs", "certs"], certs="certs"),
        ):
            words = shlex.split(remedy(error, command) or "")
            if words[:1] == ["rpcmp"]:
                assert words != ["rpcmp", name, *command.arguments], "it has just failed"
                assert words[1] in COMMANDS
                if words[1] != "certs" and words[-1] != "--help":
                    parsed(words[1:])
            else:
                assert words == []


@pytest.mark.parametrize(
    ("error", "known", "expected"),
    [
        (errors.ConfigError, {}, f"rpcmp explain {ABOUT}"),
        (errors.KeyConfigError, {"is_loaded": False}, "rpcmp guide configuration"),
        (errors.CheckpointConflictError, {}, RESUMED),
        (errors.FactoryError, {}, f"rpcmp doctor {ABOUT}"),
        (errors.FactoryError, {"has_servers": False}, "rpcmp guide models"),
        (errors.VersionError, {}, f"rpcmp doctor {ABOUT}"),
        (errors.CheckpointError, {}, RESUMED.replace("--resume", "--fresh")),
        (errors.SecurityError, {}, "rpcmp certs show ."),
        (errors.UnreachableError, {}, f"rpcmp doctor {ABOUT}"),
        (errors.BusyError, {}, f"rpcmp status {ABOUT}"),
        (errors.TakenOverError, {}, f"rpcmp status {ABOUT}"),
        (errors.DrainingError, {}, f"rpcmp status {ABOUT}"),
        (errors.DrainingError, {"has_checkpoint": True}, RESUMED),
        (errors.RelayError, {}, f"rpcmp doctor {ABOUT}"),
        (errors.RecoveryTimeoutError, {"has_checkpoint": True}, RESUMED),
        (errors.StageError, {}, f"rpcmp explain {ABOUT}"),
        (errors.StageError, {"has_checkpoint": True}, RESUMED),
        (errors.WorkerDiedError, {"has_checkpoint": True}, RESUMED),
        (errors.WorkerDiedError, {}, f"rpcmp doctor {ABOUT}"),
        (errors.WorkerHungError, {"has_checkpoint": True}, RESUMED),
        (
            errors.NonFiniteLossError,
            {"has_checkpoint": True},
            f"{RESUMED} --set max_grad_norm=1.0",
        ),
        (
            errors.NonFiniteLossError,
            {"has_checkpoint": True, "max_grad_norm": 1.0, "learning_rate": 0.02},
            f"{RESUMED} --set optimizer.kwargs.lr=0.002",
        ),
        (errors.LossScaleError, {"has_checkpoint": True}, f"{RESUMED} --set autocast=bfloat16"),
        (errors.MismatchError, {}, f"rpcmp verify {ABOUT}"),
        (errors.InterruptedJobError, {"has_checkpoint": True}, RESUMED),
        (errors.InterruptedJobError, {}, None),
    ],
)
def test_remedy_suggests_a_command_per_error(
    error: type[errors.RpcmpError], known: dict[str, Any], expected: str | None
) -> None:
    assert remedy(an(error), drive(**known)) == expected


@pytest.mark.parametrize(
    ("override", "offered"),
    [
        ("log.loggers.0.kwargs.token=SECRET", 'log.loggers.0.kwargs.token="${TOKEN:?fill it in}"'),
        ('data.kwargs.key="SECRET"', 'data.kwargs.key="${KEY:?fill it in}"'),
        ('log.loggers=[{kwargs={a="SECRET"}}]', 'log.loggers="${LOGGERS:?fill it in}"'),
        ("optimizer.kwargs={password=7777}", 'optimizer.kwargs="${KWARGS:?fill it in}"'),
        (
            "log.loggers.0.kwarg.api_key=SECRET",
            'log.loggers.0.kwarg.api_key="${API_KEY:?fill it in}"',
        ),
        ("optimizer.kwargs.lr=0.5", "optimizer.kwargs.lr=0.5"),
        ("loss=torch.nn:MSELoss", "loss=torch.nn:MSELoss"),
    ],
)
def test_remedy_hides_confidential_values(override: str, offered: str) -> None:
    for one in (
        f"job.toml --set {shlex.quote(override)}",
        f"job.toml {shlex.quote(f'--set={override}')}",
    ):
        for error in ERRORS:
            message = remedy(error, drive(one, has_checkpoint=True, max_grad_norm=1.0)) or ""
            assert "SECRET" not in message
            assert "7777" not in message
    command = drive(f"job.toml --set {shlex.quote(override)}", has_checkpoint=True)
    assert remedy(an(errors.WorkerDiedError), command) == (
        f"rpcmp drive job.toml --set {offered} --resume"
    )


def test_hidden_values_are_shell_variables_that_must_be_set() -> None:
    command = drive("job.toml --set 'data.kwargs.key=a \"b'", has_checkpoint=True)
    line = (remedy(an(errors.WorkerDiedError), command) or "").replace("rpcmp", "printf '%s|'", 1)
    found = subprocess.run(
        ["sh", "-c", line], env={"KEY": 'a "b'}, capture_output=True, text=True, check=True
    )
    assert found.stdout == 'drive|job.toml|--set|data.kwargs.key=a "b|--resume|'
    without = subprocess.run(
        ["sh", "-c", line], env={}, capture_output=True, text=True, check=False
    )
    assert without.returncode != 0
    assert without.stdout == ""
    assert "KEY: fill it in" in without.stderr


OPTIMIZER = 'optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.5 } }'


def of_stages(config: Config) -> list[float]:
    """Return the learning rate of each stage."""
    return [config.optimizer_of(index).kwargs["lr"] for index in range(config.num_stages)]


@pytest.mark.parametrize(
    ("job", "own", "is_lowered"),
    [
        (OPTIMIZER, "", True),
        (OPTIMIZER, "optimizer = { momentum = 0.9 }", True),
        (OPTIMIZER, OPTIMIZER, False),
        (OPTIMIZER, "optimizer = { lr = 0.5 }", False),
        ("", "", False),
        ("", OPTIMIZER, False),
        ('optimizer = "torch.optim:Adam"', "", False),
    ],
)
def test_steps_become_smaller_by_what_the_config_has(
    job: str, own: str, is_lowered: bool, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(f"max_grad_norm = 3.0\n{job}\n{CONFIG}{own}\n")
    words = shlex.split(remedy(an(errors.NonFiniteLossError), typed(tmp_path / "job.toml")) or "")
    before, after = (loader.load_config(tmp_path / "job.toml", o) for o in ([], overrides(words)))
    if is_lowered:
        assert of_stages(after) == [of_stages(before)[0] / 10]
    else:
        assert after == before.model_copy(update={"max_grad_norm": 0.3})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("more", [[], ["--set", "max_grad_norm=1.0"]], ids=["", "clipped"])
def test_overrides_that_a_remedy_suggests_for_a_config_load(path: Path, more: list[str]) -> None:
    offered = set()
    for name in ("doctor", "drive", "verify"):
        command = typed(path, *more, name=name)
        offered |= {remedy(error, command) or "" for error in ERRORS}
    found = {tuple(overrides(w)) for text in offered if str(path) in (w := shlex.split(text))}
    assert found
    for each in found:
        loader.load_config(path, each)


def typed(path: Path, *more: str, name: str = "drive") -> Command:
    """Return a failed `rpcmp NAME PATH MORE...`."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return failed(command, name, [str(path), *more], LONG_AGO)


def overrides(words: list[str]) -> list[str]:
    """Return the overrides on a command line."""
    found: list[str] = parsed(words[1:]).get("overrides", [])
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--stage 1", "127.0.0.1:50052"),
        ("--stage 1 --insecure --listen 0.0.0.0:7", "127.0.0.1:7 --insecure"),
        ("--stage 1 --insecure --listen [::]:7", "[::1]:7 --insecure"),
        ("--stage 1 --listen localhost:7", "localhost:7"),
        ("--stage 1 --certs CERTS", "127.0.0.1:50052 --certs CERTS --server-name host-b"),
        ("--stage 1 --certs CERTS --listen [::]:7", "[::1]:7 --certs CERTS --server-name host-b"),
        ("--stage 1 --certs CERTS --listen host-b:7", "host-b:7 --certs CERTS"),
        ("--stage 1 --certs CERTS --listen 192.0.2.7:7", "192.0.2.7:7 --certs CERTS"),
        ("--stage 1 --certs . --listen 0.0.0.0:7", "127.0.0.1:7 --certs ."),
    ],
)
def test_health_asks_the_address_of_the_listener(
    options: str, expected: str, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certs.parent)  # where there is no certificate
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    words = options.replace("CERTS", str(certs)).split()
    found = remedy(an(errors.AddressInUseError), failed(command, "serve", words, LONG_AGO))
    assert shlex.split(found or "") == shlex.split(
        f"rpcmp health {expected}".replace("CERTS", str(certs))
    )


def test_a_listen_address_of_another_machine_suggests_the_help() -> None:
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    words = ["--stage", "1", "--insecure", "--listen", "192.0.2.7:0"]
    found = remedy(an(errors.AddressInUseError), failed(command, "serve", words, LONG_AGO))
    assert found == "rpcmp serve --help"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of stage 1, which has no name for loopback."""
    folder = issue(tmp_path_factory.mktemp("certs"), "host-a")
    run_certs(folder, "issue", "--name", "stage1", "--host", "host-b", "--host", "192.0.2.7")
    return folder / "stage1"


def test_a_bare_connect_stays_bare() -> None:
    command = drive("c.toml --connect --steps 3", has_checkpoint=True)
    assert remedy(an(errors.BusyError), command) == "rpcmp status c.toml --connect"
    assert remedy(an(errors.WorkerDiedError), command) == (
        "rpcmp drive c.toml --connect --steps 3 --resume"
    )
    last = drive("c.toml --connect", has_checkpoint=True)
    assert remedy(an(errors.WorkerDiedError), last) == "rpcmp drive c.toml --connect --resume"


def last_line(result: Result) -> str:
    return result.err.splitlines()[-1]


def test_a_misspelt_key_ends_with_the_table_of_keys(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(f"num_microbatch = 3\n{CONFIG}")
    assert last_line(rpcmp("drive", config)) == "try: rpcmp guide configuration"


@pytest.mark.usefixtures("impatient")
def test_an_absent_server_is_reported_with_the_doctor(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    shutil.copy(EXAMPLES / "digits.toml", config)
    shutil.copy(EXAMPLES / "digits.py", tmp_path)
    result = rpcmp(
        "drive", config, "--set", "model.balance=[2, 4]", "--connect", "127.0.0.1:9,127.0.0.1:7"
    )
    assert result.code == 75
    assert last_line(result) == (
        f"try: rpcmp doctor {config} --set 'model.balance=[2, 4]' --connect 127.0.0.1:9,127.0.0.1:7"
    )


def test_a_port_that_is_taken_is_reported_with_its_listener() -> None:
    with lend_servers(1) as (first,):
        require_health_hint("--listen", first.address)


@pytest.mark.parametrize(
    "options", ["--listen 0.0.0.0:0 --insecure", "--listen 0.0.0.0:0 --certs CERTS"]
)
def test_a_port_taken_on_all_interfaces_suggests_its_health(options: str, certs: Path) -> None:
    words = options.replace("CERTS", str(certs)).split()
    with running_server("--stage", "1", *words) as first:
        require_health_hint(*words, "--listen", first.address)


def require_health_hint(*options: str) -> None:
    """Check that a server whose address is taken suggests `rpcmp health`, which then gets an
    answer.
    """
    second = rpcmp("serve", "--stage", "1", *options)
    assert second.code == 2
    command = last_line(second).removeprefix("try: rpcmp ")
    assert command.startswith("health ")
    found = rpcmp(*shlex.split(command))
    assert (found.code, found.out[-12:]) == (0, " is SERVING\n"), found.err
