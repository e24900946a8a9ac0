"""Errors end with the command that helps next, with the user's own config and addresses in it."""

from __future__ import annotations

import itertools
import shlex
import shutil
from pathlib import Path
from typing import Any

import click
import pytest

from rpcmp import errors
from rpcmp.cli import COMMANDS, cli
from rpcmp.cli.failed import failed
from rpcmp.cli.remedy import DECISIONS, Command, remedy
from tests.commandlines import parsed
from tests.processes import EXAMPLES, Result, rpcmp, running_servers
from tests.test_errors import EXAMPLES as ERRORS
from tests.test_errors import tree

CONFIG = 'steps = 1\nloss = "torch.nn:MSELoss"\n[[stages]]\nmodule = "torch.nn:Identity"\n'
DRIVE = "'my job.toml' --steps 9 --connect a:1,b:2 --certs . --set seed=3"
RESUMED = f"rpcmp drive {DRIVE} --resume"
ABOUT = "'my job.toml' --set seed=3 --certs . --connect a:1,b:2"


def drive(arguments: str = DRIVE, **known: Any) -> Command:
    """A `rpcmp drive` that has failed."""
    words = shlex.split(arguments)
    command = cli.get_command(click.Context(cli), "drive")
    assert command is not None
    found = failed(command, "drive", words, COMMANDS)
    return Command(**{**vars(found), "is_there": True, "is_loaded": True, **known})


def an(error: type[errors.RpcmpError]) -> errors.RpcmpError:
    """An error of that class."""
    return next(each for each in ERRORS if type(each) is error)


def test_every_class_of_errors_is_decided_about() -> None:
    assert set(DECISIONS) == tree(errors.RpcmpError)


def test_what_is_offered_is_a_command_that_there_is() -> None:
    for error, name in itertools.product(ERRORS, COMMANDS):
        for command in (
            Command(name, ["c.toml"], "c.toml", ["--set", "seed=1", "--connect"], others=COMMANDS),
            Command(name, ["c.toml"], "c.toml", has_checkpoint=True, checkpoints="x"),
            Command(name, [], listen="127.0.0.1:1", certs="certs", others=COMMANDS),
        ):
            words = shlex.split(remedy(error, command) or "")
            if words[:1] == ["rpcmp"]:
                assert words != ["rpcmp", name, *command.arguments], "it has just failed"
                assert words[1] in COMMANDS
                if words[1] != "certs" and words[-1] != "--help":
                    parsed(words[1:])
            else:
                assert words in ([], ["python", "-m", "rpcmp.configdoc"])


@pytest.mark.parametrize(
    ("error", "known", "expected"),
    [
        (errors.ConfigError, {}, f"rpcmp explain {ABOUT}"),
        (errors.KeyConfigError, {"is_loaded": False}, "python -m rpcmp.configdoc"),
        (errors.OtherRunError, {"has_checkpoint": True}, RESUMED),
        (errors.FactoryError, {}, f"rpcmp doctor {ABOUT}"),
        (errors.VersionError, {}, f"rpcmp doctor {ABOUT}"),
        (
            errors.CheckpointError,
            {"checkpoints": "kept"},
            RESUMED.replace("--resume", "--set checkpoint.dir=kept-2"),
        ),
        (errors.SecurityError, {}, "rpcmp certs show ."),
        (errors.UnreachableError, {}, f"rpcmp doctor {ABOUT}"),
        (errors.BusyError, {}, f"rpcmp status {ABOUT}"),
        (errors.DrainingError, {}, f"rpcmp status {ABOUT}"),
        (errors.DrainingError, {"has_checkpoint": True}, RESUMED),
        (errors.RelayError, {}, f"rpcmp doctor {ABOUT}"),
        (errors.ExhaustedError, {"has_checkpoint": True}, RESUMED),
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
def test_the_command_that_helps(
    error: type[errors.RpcmpError], known: dict[str, Any], expected: str | None
) -> None:
    assert remedy(an(error), drive(**known)) == expected


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
    assert last_line(rpcmp("drive", config)) == "try: python -m rpcmp.configdoc"


def test_a_server_that_is_not_there_ends_with_the_doctor(tmp_path: Path) -> None:
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


def test_a_port_that_is_taken_ends_with_who_listens_there() -> None:
    with running_servers(1) as (server,):
        result = rpcmp("serve", "--stage", "0", "--listen", server.address)
        assert last_line(result) == f"try: rpcmp health {server.address}"
        assert rpcmp("health", server.address).code == 0
