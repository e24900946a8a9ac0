"""Addresses of stage servers."""

from __future__ import annotations

import pytest

from rpcmp import addresses
from rpcmp.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("localhost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_host_and_port_are_taken_apart(address: str, host: str, port: int) -> None:
    assert addresses.parse(address) == (host, port)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        addresses.parse(address)


def test_every_stage_has_a_default_port_and_replicas_lie_a_hundred_apart() -> None:
    assert [addresses.default_port(stage) for stage in range(3)] == [50051, 50052, 50053]
    assert addresses.default_port(1, replica=2) == 50252


@pytest.mark.parametrize("host", ["127.0.0.1", "127.77.0.3", "[::1]", "localhost"])
def test_loopback_addresses_are_allowed(host: str) -> None:
    addresses.require_loopback([f"{host}:50051"])


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "192.168.0.5", "[::]", "10.0.0.1", "example.org", "localhost.evil.org"]
)
def test_addresses_that_others_reach_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="is not a loopback address"):
        addresses.require_loopback(["127.0.0.1:50051", f"{host}:50051"])
