"""The protection of a user's servers against a job's code, which runs as the same user."""

from __future__ import annotations

import grpc
import psutil
import pytest

from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub
from tests.support.processes import (
    JobFolder,
    connect,
    describe,
    rpcmp,
    running,
    running_servers,
    runs,
)

HERE = "127.0.0.1"


CALLING = """
import grpc, torch, zoo
from torch import nn
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub

class Calling(nn.Module):
    def __init__(self, address):
        super().__init__()
        with grpc.insecure_channel(address) as channel:
            for call, request in (("Describe", pb.DescribeRequest()), ("Drain", pb.DrainRequest())):
                try:
                    answer = getattr(ControlStub(channel), call)(request, timeout=10)
                    print("CALLED", call, answer.supervisor_pid, flush=True)
                except grpc.RpcError as error:
                    print("CALLED", call, error.code().name, flush=True)

    def forward(self, x):
        return x

def layers(address):
    return [*zoo.mlp(), ("calling", lambda: Calling(address))]
"""


def test_a_server_refuses_calls_from_a_jobs_code(job: JobFolder) -> None:
    """The code could otherwise use other servers of the same user."""
    (job.folder / "calling.py").write_text(CALLING)
    with running_servers(2) as servers, running_servers(1) as (other,):
        config = job.config(
            f"""
            steps = 2
            [model]
            layers = "calling:layers"
            kwargs = {{ address = "{other.address}" }}
            balance = [2, 3]
            """
        )
        result = rpcmp("drive", config, "--json", "--connect", connect(servers))
        assert result.code == 0, result.err
        logged = [event["text"] for event in result.events if event["event"] == "log"]
        assert "CALLED Describe 0" in logged  # only what the health check reveals
        assert "CALLED Drain PERMISSION_DENIED" in logged
        assert describe(other).supervisor_pid == other.run.process.pid


LONG = """
steps = 100000
[model]
layers = "zoo:mlp"
balance = [2, 2]
"""


@pytest.mark.cluster
def test_servers_of_a_job_accept_only_the_process_that_started_them(job: JobFolder) -> None:
    with running("drive", job.config(LONG), "--json") as run:
        run.wait_for_line('"event": "step"')
        servers = [p for p in psutil.Process(run.process.pid).children() if runs(p, "serve")]
        (port, *_) = (c.laddr.port for c in servers[0].net_connections() if c.status == "LISTEN")
        with grpc.insecure_channel(f"{HERE}:{port}") as channel:
            stub = ControlStub(channel)
            assert stub.Describe(pb.DescribeRequest(), timeout=10).job == ""
            with pytest.raises(grpc.RpcError, match="does not let that process call"):
                stub.Drain(pb.DrainRequest(), timeout=10)
