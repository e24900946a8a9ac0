"""Two real torch RPC agents with an inspection between them, as in a relay, which records all
bytes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from rpcmp.errors import SecurityError
from rpcmp.net.rpc_inspection import Inspection, Pipes
from tests.support.processes import poll_for

AGENTS = """
import ctypes, json, os, re, signal, sys, time
import torch
from torch.distributed import FileStore, Store, rpc
from torch.distributed import autograd as dist_autograd
from torch._C._distributed_autograd import _init as _init_autograd
from torch._C._distributed_rpc import TensorPipeAgent
from torch.distributed.rpc import api, internal

class Proxied(Store):
    # Where "outside" finds "inside", there is a proxy.
    def __init__(self, folder, rank):
        super().__init__()
        self._folder, self._rank = folder, rank
        self._store = FileStore(os.path.join(folder, "store"), 2)
    def set(self, key, value):
        if key == "addrs/inside":
            name = os.path.join(self._folder, "address")
            with open(name + ".new", "wb") as file:
                file.write(value if isinstance(value, bytes) else value.encode())
            os.rename(name + ".new", name)
        self._store.set(key, value)
    def get(self, key):
        if key == "addrs/inside" and self._rank == 1:
            name = os.path.join(self._folder, "proxy")
            while not os.path.exists(name):
                time.sleep(0.01)
            real = open(os.path.join(self._folder, "address"), "rb").read()
            return re.sub(rb":[0-9]+$", b":" + open(name, "rb").read(), real)
        return self._store.get(key)
    def compare_set(self, key, expected, desired):
        return self._store.compare_set(key, expected, desired)
    def add(self, key, value):
        return self._store.add(key, value)
    def wait(self, keys, timeout=None):
        self._store.wait(keys)

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2

class Service:
    pass

def service():
    return Service()
def name_of(rref):
    return type(rref.local_value()).__name__
def twice(*tensors):
    return [Twice.apply(tensor) for tensor in tensors]
def echo(value):
    return value
def ignored(value):
    return "nothing"
def fails():
    raise ValueError("as it should")

def agent(folder, rank, script):
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the process that has forked us
    names = ["inside", "driver"]
    os.dup2(os.open(os.path.join(folder, ("inside", "outside")[rank]), os.O_CREAT | os.O_WRONLY), 1)
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, rpc_timeout=20, _transports=["uv"], _channels=["cma", "basic"]
    )
    store = Proxied(folder, rank)
    _init_autograd(rank)
    agent = TensorPipeAgent(store, names[rank], rank, 2, options, {}, [])
    api._init_rpc_states(agent)
    if rank == 0:
        signal.pause()
    try:
        exec(script, {**globals(), "agent": agent})
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    else:
        print("done", flush=True)
    os._exit(0)

for line in sys.stdin:
    folder, script = json.loads(line)
    inside, outside = agent(folder, 0, ""), agent(folder, 1, script)
    os.waitpid(outside, 0)
    os.kill(inside, signal.SIGKILL)
    os.waitpid(inside, 0)
    print("ended", flush=True)
"""
"""Code that imports torch once, and forks two agents per script; the outside agent runs it."""


@dataclass
class Conversation:
    """One connection: the bytes that each side sent, and the bytes that passed the inspection."""

    from_outside: bytearray = field(default_factory=bytearray)
    from_inside: bytearray = field(default_factory=bytearray)
    passed: bytearray = field(default_factory=bytearray)


class Proxy:
    """A listener at the address that "outside" has for "inside", which inspects every connection.

    Attributes:
        conversations: all connections so far.
        refused: the reports of the inspection.
    """

    def __init__(self, host: str, port: int) -> None:
        self.conversations: list[Conversation] = []
        self.refused: list[SecurityError] = []
        self._pipes = Pipes(self.refused.append)
        self._inside = (host, port)
        self._listener = socket.create_server((host, 0))
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._until_closed())
        self._loop.close()

    async def _until_closed(self) -> None:
        server = await asyncio.start_server(self._begin, sock=self._listener)
        await self._ended.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _begin(self, outside: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.ensure_future(self._serve(outside, back)))

    async def _serve(self, outside: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        inside, there = await asyncio.open_connection(*self._inside)
        talk = Conversation()
        self.conversations.append(talk)
        inspection = Inspection(self._pipes, "driver", "outside")
        inspection.resume = lambda: self._pass(talk, inspection, b"", there)
        ways = [
            asyncio.ensure_future(self._inwards(talk, inspection, outside, there)),
            asyncio.ensure_future(self._outwards(talk, inspection, inside, back)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        for way in ways:
            way.cancel()
        for error in await asyncio.gather(*ways, return_exceptions=True):
            assert error is None or isinstance(
                error, OSError | SecurityError | asyncio.CancelledError
            )
        for writer in (there, back):
            writer.transport.abort()
        inspection.close()

    async def _inwards(
        self,
        talk: Conversation,
        inspection: Inspection,
        outside: asyncio.StreamReader,
        there: asyncio.StreamWriter,
    ) -> None:
        while data := await outside.read(65536):
            talk.from_outside += data
            self._pass(talk, inspection, data, there)
        there.write_eof()

    @staticmethod
    def _pass(
        talk: Conversation, inspection: Inspection, data: bytes, there: asyncio.StreamWriter
    ) -> None:
        passed = bytes(inspection.received(data))
        talk.passed += passed
        there.write(passed)

    async def _outwards(
        self,
        talk: Conversation,
        inspection: Inspection,
        inside: asyncio.StreamReader,
        back: asyncio.StreamWriter,
    ) -> None:
        host, port = self._inside
        while data := await inside.read(65536):
            # The outside must open further connections to the proxy as well.
            data = data.replace(f"{host}:{port}".encode(), f"{host}:{self.port}".encode())
            talk.from_inside += data
            inspection.sent(data)
            back.write(data)
        back.write_eof()


@dataclass
class Talk:
    """The result of a script: its output, and the recorded connections."""

    printed: str
    proxy: Proxy


class Agents:
    """Processes that send each other messages, see AGENTS; `close` ends them."""

    def __init__(self, folder: Path) -> None:
        source = folder / "agents.py"
        source.write_text(AGENTS)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, str(source)], stdin=pipe, stdout=pipe, text=True
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def talk(self, folder: Path, script: str) -> Talk:
        """Run `script` in an agent called "driver", and inspect its messages to "inside"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), script]), file=self._process.stdin, flush=True)
        address = folder / "address"
        poll_for(address.exists, "the agent's address")
        host, _, port = address.read_text().rpartition(":")
        proxy = Proxy(host.rpartition("/")[2], int(port))
        try:
            (folder / "proxy.new").write_text(str(proxy.port))
            (folder / "proxy.new").rename(folder / "proxy")
            assert self._process.stdout.readline() == "ended\n"
        finally:
            proxy.close()
        return Talk((folder / "outside").read_text(), proxy)
