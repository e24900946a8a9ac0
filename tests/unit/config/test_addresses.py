"""Addresses of stage servers."""

from __future__ import annotations

import pytest

from rpcmp.config import addresses
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


@pytest.mark.parametrize(
    "address",
    ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "host:" + "1" * 5000, "[::1"],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        addresses.parse(address)


@pytest.mark.parametrize("address", ["fe80::1", "::1:50051", "[host]:1"])
def test_only_an_ipv6_address_has_brackets(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"an IPv6 address has brackets, and no other: \[::1\]:50051"
    ):
        addresses.parse(address)


def test_a_host_without_a_port_means_the_default_port_of_its_stage() -> None:
    given = ["host-a", "host-b:7", "[::1]", "[::1]:7"]
    found = [addresses.with_port(address, index) for index, address in enumerate(given)]
    assert found == ["host-a:50051", "host-b:7", "[::1]:50053", "[::1]:7"]


def test_every_stage_has_a_default_port_and_replicas_lie_a_hundred_apart() -> None:
    assert [addresses.default_port(stage) for stage in range(3)] == [50051, 50052, 50053]
    assert addresses.default_port(1, replica=2) == 50252
    with pytest.raises(ConfigError, match="stage 1 replica 200 has no default port: give HOST"):
        addresses.default_port(1, replica=200)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "127.0.0.1:50051"),
        ("50052", "127.0.0.1:50052"),
        (":50052", "127.0.0.1:50052"),
        ("host-b", "host-b:50051"),
        ("[::1]", "[::1]:50051"),
        ("host-b:7", "host-b:7"),
    ],
)
def test_missing_parts_of_an_address_are_filled_in(given: str, expected: str) -> None:
    assert addresses.with_defaults(given) == expected
    addresses.parse(expected)
