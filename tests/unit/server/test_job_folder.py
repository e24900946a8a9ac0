"""The folder of what a server keeps of a job."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from rpcmp.errors import ConfigError, UnreachableError
from rpcmp.server.job_folder import JobFolder
from rpcmp.v1 import control_pb2 as pb
from tests.support.eventloops import in_event_loop


def test_a_job_has_one_folder_and_no_other_job_has_it() -> None:
    jobs = JobFolder()
    first = jobs.open("one")
    (first.compiled / "code").touch()
    first.weights_key = "key"
    assert jobs.open("one") == first
    assert (first.compiled / "code").exists()
    second = jobs.open("two")
    assert second.folder != first.folder
    assert not first.folder.exists()
    assert second.weights_key == ""
    assert not list(second.compiled.iterdir())
    assert second.weights.is_dir()
    jobs.clear()
    assert not second.folder.exists()
    jobs.clear()
    again = jobs.open("two")
    assert again.compiled.is_dir()
    jobs.clear()


@in_event_loop
async def test_weights_count_once_all_of_them_have_arrived() -> None:
    async def data(*parts: bytes) -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    def file(path: str) -> pb.CheckpointFile:
        return pb.CheckpointFile(path=path, size=4)

    jobs = JobFolder()
    try:
        files = jobs.open("one")
        await files.receive_weights(file("config.json"), data(b"{", b"  }"))
        await files.receive_weights(file("model.safetensors"), data(b"abcd"))
        files.weights_key = "key"
        with pytest.raises(UnreachableError, match="only 2 of 4 bytes"):
            await files.receive_weights(file("model.safetensors"), data(b"ab"))
        assert files.weights_key == ""
        assert sorted(os.listdir(files.weights)) == ["config.json", "model.safetensors"]
        await files.receive_weights(pb.CheckpointFile(path="config.json"), data())
        assert os.listdir(files.weights) == ["model.safetensors"]
        for path in ("../x", "", "other.json"):
            with pytest.raises(ConfigError, match="is no file of weights"):
                await files.receive_weights(file(path), data(b"abcd"))
    finally:
        jobs.clear()
