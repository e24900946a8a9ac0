"""Connections that send nothing: the kernel holds them back, and then they are closed."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest

from rpcmp.net import connection_limits

HERE = "127.0.0.1"

PATIENCE = 60.0


@contextlib.contextmanager
def listening(defers: bool) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        listener.setblocking(False)
        if defers:
            connection_limits.listen_deferred(listener)
        else:
            listener.listen()
        yield listener


def wait_for(one: socket.socket) -> None:
    assert select.select([one], [], [], PATIENCE)[0], "nothing came"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "FIRST_BYTE_SECONDS", 1)


def test_a_silent_connection_is_closed_and_one_with_data_is_accepted() -> None:
    with listening(defers=True) as listener:
        where = listener.getsockname()
        with socket.create_connection(where) as silent:
            wait_for(listener)  # the kernel has waited for it long enough
            with socket.create_connection(where) as speaking:
                speaking.sendall(b"hello")
                accepted, address = connection_limits.accept_with_data(listener)
                with accepted:
                    assert address == speaking.getsockname()
                    assert accepted.recv(5) == b"hello"
            wait_for(silent)
            assert silent.recv(1) == b""
            with pytest.raises(BlockingIOError):
                connection_limits.accept_with_data(listener)


def test_a_silent_connection_is_accepted_if_the_server_may_send_first() -> None:
    with (
        listening(defers=False) as listener,
        socket.create_connection(listener.getsockname()) as silent,
    ):
        wait_for(listener)
        accepted, address = connection_limits.accept_with_data(listener)
        with accepted:
            assert address == silent.getsockname()


def test_a_flood_of_silent_connections_does_not_starve_others() -> None:
    with listening(defers=True) as listener, contextlib.ExitStack() as stack:
        where = listener.getsockname()
        silent = [
            stack.enter_context(socket.create_connection(where))
            for _ in range(connection_limits.SILENT_AT_ONCE + 10)
        ]
        rounds = 0
        while silent:
            wait_for(listener)
            rounds += 1
            with pytest.raises(BlockingIOError):
                connection_limits.accept_with_data(listener)
            gone, _, _ = select.select(silent, [], [], 0)
            silent = [one for one in silent if one not in gone]
        assert rounds > 1
