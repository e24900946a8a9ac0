"""Addresses of --metrics that cannot be bound."""

from __future__ import annotations

import socket

import pytest

from tests.support.processes import JobFolder, rpcmp
from tests.support.scraping import HERE


@pytest.mark.parametrize("command", ["serve", "drive"])
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("9464", "is not HOST:PORT"),
        ("192.0.2.1:9464", "not a loopback address"),
        ("taken", "Address already in use"),
    ],
)
def test_an_address_that_cannot_be_bound_fails_before_anything_starts(
    job: JobFolder, command: str, address: str, why: str
) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"')
    with socket.create_server((HERE, 0)) as listener:
        where = f"{HERE}:{listener.getsockname()[1]}" if address == "taken" else address
        what = (
            [config, "--json"] if command == "drive" else ["--stage", "0", "--listen", f"{HERE}:0"]
        )
        result = rpcmp(command, *what, "--metrics", where)
    assert result.code == 2, result.err
    assert why in result.err
    assert result.out == ""
