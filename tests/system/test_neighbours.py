"""Other users of a job's host find nothing on it that executes their orders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lan import Host, issue, lan, listening, serving, without_networks
from tests.support.longjob import IDLING
from tests.support.processes import JobFolder, Running, connect, poll_for, running

NOBODY = """
import os
os.setgroups([]), os.setgid(65534), os.setuid(65534)
"""

MODULES = 'import encodings.idna, pickle, socket, sys\n"".encode("idna")\n'

TLS_ALERT = "15"
"""The type of a record, in hexadecimal."""

PROBE = """
import encodings.idna, pickle, socket, sys
"".encode("idna")
class Evil:
    def __reduce__(self):
        return exec, (f"open({sys.argv[1]!r}, 'w').close()",)
http2 = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(9)
sayings = [pickle.dumps(Evil()), http2, bytes(4096), b"\\0\\0\\0\\2{}"]
for address in sys.argv[2:]:
    host, port = address.rsplit(":", 1)
    for saying in sayings:
        heard = b""
        try:
            with socket.socket() as connection:
                connection.settimeout(20)
                connection.connect((host, int(port)))
                connection.sendall(saying)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536):
                    heard += part
        except ConnectionError:
            pass
        print(address, heard.hex() or "nothing")
for line in open("/proc/net/unix"):
    path = line.split()[-1]
    if "rpcmp" in path and not path.startswith("@"):
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(path)
                print(path, "open")
            except OSError as error:
                print(path, type(error).__name__)
"""

AGENT = (
    """
import os, re, sys, torch
from torch.distributed import Store, rpc
from torch._C._distributed_autograd import _init as _init_autograd
from torch._C._distributed_rpc import TensorPipeAgent
from torch.distributed.rpc import api

class Prepared(Store):
    values = {}
    def set(self, key, value):
        self.values[key] = value if isinstance(value, bytes) else value.encode()
    def get(self, key):
        if key not in self.values:  # an address: such as our own, but for the port
            own = next(value for name, value in self.values.items() if name.startswith("addrs/"))
            port = key.removeprefix("addrs/port").encode()
            return re.sub(rb":[0-9]+$", b":" + port, own)
        return self.values[key]
    def compare_set(self, key, expected, desired):
        self.set(key, desired)
        return self.values[key]
    def add(self, key, value):
        return value
    def wait(self, keys, timeout=None):
        pass

class Evil:
    def __reduce__(self):
        return exec, (code,)

marker, *ports = sys.argv[1:]
code = f"open({marker!r}, 'w').close()"
store = Prepared()
names = [*(f"port{port}" for port in ports), "evil"]
for rank, name in enumerate(names):
    store.set(f"names/{rank}", name)
del store.values[f"names/{len(ports)}"]
os.environ["TP_SOCKET_IFNAME"] = "lo"
"""
    + NOBODY
    + """
options = rpc.TensorPipeRpcBackendOptions(
    num_worker_threads=2, rpc_timeout=10, _transports=["uv"], _channels=["basic"]
)
_init_autograd(len(ports))
agent = TensorPipeAgent(store, "evil", len(ports), len(names), options, {}, [])
api._init_rpc_states(agent)
for name in names[:-1]:
    for function, argument in ((print, Evil()), (exec, code)):
        try:
            answer = rpc.rpc_sync(name, function, args=(argument,))
        except Exception as error:
            answer = f"{type(error).__name__} {error}"
        print(name, repr(answer), flush=True)
os._exit(0)
"""
)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host without other processes."""
    with lan(1, tmp_path) as (only,):
        yield only


@pytest.mark.long
def test_another_user_of_a_host_finds_one_tls_port_per_server(
    host: Host, job: JobFolder, tmp_path: Path
) -> None:
    certs = issue(tmp_path / "certs", host.address, host.address)
    marker = tmp_path / "was-here"
    with (
        serving(0, f"{host.address}:0", certs, host.inside) as first,
        serving(1, f"{host.address}:0", certs, host.inside) as second,
        running(
            *("drive", job.config(IDLING), "--json", "--certs", certs / "driver"),
            *("--connect", connect([first, second])),
            under=host.inside,
        ) as run,
    ):
        run.wait_for_line('"step": 2,')
        found = [f"{address}:{port}" for address, port in listening(host)]
        assert sorted(found) == sorted([first.address, second.address])
        tmp_path.chmod(0o777)
        probe = host.run(
            sys.executable, "-c", PROBE.replace(MODULES, MODULES + NOBODY), str(marker), *found
        )
        assert probe.returncode == 0, probe.stderr
        lines = [line.split() for line in probe.stdout.splitlines()]
        ports = [line for line in lines if line[0] in found]
        assert len(ports) == 4 * len(found)
        for _, heard in ports:
            assert heard == "nothing" or heard.startswith(TLS_ALERT)
        sockets = [line for line in lines if line[0] not in found]
        assert len(sockets) >= 4  # each server has two
        assert {answer for _, answer in sockets} == {"PermissionError"}
        assert not marker.exists()
        assert_goes_on(run)


@pytest.mark.usefixtures("own_forks")
def test_a_pickle_sent_to_a_reachable_worker_executes_nothing(
    host: Host, job: JobFolder, tmp_path: Path, token: str
) -> None:
    """Without network namespaces: another user's real agent tries every port."""
    marker = tmp_path / "was-here"
    under = (*host.inside, *without_networks())
    with running("drive", job.config(IDLING), "--json", under=under) as run:
        run.wait_for_line('"step": 2,')
        tmp_path.chmod(0o777)
        ports = [str(port) for _, port in listening(host)]
        probe = host.run(sys.executable, "-c", AGENT, str(marker), *ports)
        print(probe.stdout, probe.stderr)
        assert probe.returncode == 0, probe.stderr
        answers = probe.stdout.splitlines()
        assert len(answers) == 2 * len(ports)
        # Two workers and the driver have read it, and the two servers have not.
        assert len([answer for answer in answers if "which nobody may send" in answer]) == 6
        assert not marker.exists()
        assert_goes_on(run)


def assert_goes_on(run: Running) -> None:
    """Check that the job makes more steps without a fault."""
    count = len(run.out)
    poll_for(lambda: len(run.out) > count + 3, "more steps")
    assert not [event for event in run.result().events if event["event"] == "fault"]
