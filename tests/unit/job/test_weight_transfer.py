"""When a stage is sent its part of `init`, and what it is told otherwise."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from rpcmp.checkpoint.weight_excerpt import Excerpt
from rpcmp.errors import ConfigError
from rpcmp.job import weight_transfer
from rpcmp.job.weight_transfer import WeightTransfer
from rpcmp.pipelining.weight_files import CONFIG, SINGLE
from rpcmp.server.client import StageClient
from rpcmp.server.connection import machine
from rpcmp.v1 import control_pb2 as pb

WEIGHTS = {"a": torch.randn(3), "b": torch.randn(2**19), "c": torch.randn(2)}


@pytest.fixture
def init(tmp_path: Path) -> str:
    save_file(WEIGHTS, tmp_path / "init")
    return str(tmp_path / "init")


class Server:
    """A server, as far as `WeightTransfer` talks with one."""

    def __init__(self) -> None:
        self.key, self.put_of = "", 0
        self.tensors: dict[str, Tensor] = {}
        self.lines: list[str] = []
        self.config = b""

    def send(self, init: str, names: list[str] | None, **claim: Any) -> bool:
        client = cast(StageClient, SimpleNamespace(name="one", put=self.put))
        transfer = WeightTransfer(init, "job", 2, lambda label, text: self.lines.append(text))
        answer = pb.PrepareResponse(host="far", weights_key=self.key, **claim)
        return asyncio.run(transfer.send(client, answer, names))

    async def put(self, requests: AsyncIterator[pb.PutRequest]) -> None:
        head = await anext(requests)
        assert (head.job_id, head.generation, head.is_init) == ("job", 2, True)
        data = b"".join([part.data async for part in requests])
        assert len(data) == head.file.size
        if head.file.path == CONFIG:
            self.config = data
            return
        assert head.file.path == SINGLE
        self.key, self.tensors = head.file.sha256, load(data)
        self.put_of += 1


def test_a_host_without_a_copy_is_sent_the_tensors_of_its_layers_once(init: str) -> None:
    server = Server()
    assert server.send(init, ["c", "a"])
    assert set(server.tensors) == {"a", "c"}
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in server.tensors.items())
    assert server.lines == [f"there is no {init} on far: it is sent 156 B of it"]
    assert server.send(init, ["a", "c"])
    assert server.put_of == 1
    assert server.send(init, ["a"])
    assert server.put_of == 2


def test_the_config_of_a_folder_goes_along(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / SINGLE)
    (tmp_path / CONFIG).write_text("{}")
    server = Server()
    for _ in range(2):
        assert server.send(str(tmp_path), ["a"])
    assert (server.config, server.put_of) == (b"{}", 1)
    (tmp_path / CONFIG).write_text("{ }")
    assert server.send(str(tmp_path), ["a"])
    assert (server.config, server.put_of) == (b"{ }", 2)


def test_the_copy_of_a_host_is_left_alone(init: str) -> None:
    server = Server()
    assert not server.send(init, ["a"], has_init=True)
    assert not server.send("", None)
    assert server.put_of == 0


def test_a_long_transfer_is_told(init: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "TELL_SECONDS", 0.0)
    server = Server()
    server.send(init, ["b"])
    assert server.lines[-1] == "2.0 MiB of 2.0 MiB have been sent"


def test_what_cannot_be_read_any_more_is_named(init: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC cancels a call whose messages cannot be read, and says no more."""

    class Cancelling(Server):
        async def put(self, requests: AsyncIterator[pb.PutRequest]) -> None:
            async def cancelled(requests: AsyncIterator[pb.PutRequest]) -> None:
                try:
                    await Server.put(self, requests)
                except Exception:
                    raise asyncio.CancelledError from None

            stub = SimpleNamespace(Put=cancelled)
            client = SimpleNamespace(_snapshots=stub, _call=lambda call: call)
            await StageClient.put(cast(StageClient, client), requests)

    class Cut(Excerpt):
        def blocks(self) -> Iterator[bytes]:
            os.truncate(init, 0)
            return super().blocks()

    monkeypatch.setattr(weight_transfer, "Excerpt", Cut)
    with pytest.raises(ConfigError, match=r"init = '.*' cannot be read: .* was cut off"):
        Cancelling().send(init, ["b"])


def test_weights_that_are_nowhere_are_an_error(init: str) -> None:
    with pytest.raises(ConfigError, match=r"no init = '.*none' on far, nor on the driver's host$"):
        Server().send(f"{init}none", None)
    with pytest.raises(ConfigError, match=r"no init = '.*none' on far$"):
        Server().send(f"{init}none", None, machine=machine())


def test_names_that_only_the_host_knows_are_an_error(init: str) -> None:
    with pytest.raises(ConfigError, match="on far, and only there it is known which tensors"):
        Server().send(init, None)
