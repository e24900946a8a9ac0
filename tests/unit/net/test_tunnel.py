"""The Unix socket of a tunnel, which has to have a short path."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rpcmp.errors import ConfigError
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.net.tunnel import MAX_SOCKET_PATH, Tunnel, bind_unix
from tests.support.eventloops import in_event_loop


@in_event_loop
async def test_a_tmpdir_that_is_too_deep_is_named_with_the_limit_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * MAX_SOCKET_PATH)
    os.mkdir(deep)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError) as error:
        Tunnel(Dialer(Security()), "127.0.0.1:50051", 0)
    message = str(error.value)
    assert f"{deep}/rpcmp-tunnel-" in message
    assert "bytes, and may have at most 107" in message
    assert "set TMPDIR to a folder with a short path" in message
    assert os.listdir(deep) == []


@pytest.mark.parametrize("excess", [0, 1])
def test_a_socket_path_may_have_107_bytes(excess: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s" * (MAX_SOCKET_PATH - len(folder) - 1 + excess))
        if excess:
            with pytest.raises(ConfigError, match="has 108 bytes, and may have at most 107"):
                bind_unix(path)
        else:
            bind_unix(path).close()
