"""Memory of another process: found by its name, opened for a child, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.process.memory_access import (
    MemoryAddress,
    MemoryFinder,
    MemoryLender,
    create_memory,
    is_of,
    open_memory,
)
from tests.support.eventloops import in_event_loop

CONTENT = b"tensors"


@pytest.fixture
def other() -> Iterator[MemoryAddress]:
    """Return the address of another process's memory, which holds CONTENT."""
    code = (
        "import os, sys; from rpcmp.process.memory_access import create_memory\n"
        f"address = create_memory('stage1:0'); os.write(address.fd, {CONTENT!r})\n"
        "print(address, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield MemoryAddress.parse(process.stdout.readline())
        process.kill()


def content_of(fd: int | None) -> bytes:
    assert fd is not None
    with open(fd, "rb") as file:
        return file.read()


def test_memory_is_found_by_its_address(other: MemoryAddress) -> None:
    assert other.name.startswith("rpcmp-tensors-stage1:0-")
    assert content_of(open_memory(str(other))) == CONTENT


def test_no_other_memory_and_no_file_is_opened(other: MemoryAddress, tmp_path: Path) -> None:
    guessed = "rpcmp-tensors-stage1:0-" + "0" * 32
    wrong = [
        other._replace(name=guessed),
        other._replace(fd=0),
        other._replace(pid=2**22 + 1),
        other._replace(name=""),
        other._replace(name=f"{other.name}\0"),
    ]
    with open(tmp_path / "file", "w") as file:
        wrong.append(MemoryAddress(os.getpid(), file.fileno(), str(tmp_path / "file")))
        assert [open_memory(str(address)) for address in wrong] == [None] * len(wrong)


@pytest.mark.parametrize("name", ["rpcmp-tensors-unsealed", "of-another-program"])
def test_memory_that_is_not_ours_or_may_shrink_is_not_opened(name: str) -> None:
    fd = os.memfd_create(name)
    try:
        assert open_memory(str(MemoryAddress(os.getpid(), fd, name))) is None
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "text", ["", "[" * 1000, "{", "[]", "[1, 2]", '["1", 2, "x"]', "[1, 2, 3]", "null"]
)
def test_what_is_no_address_is_not_found(text: str) -> None:
    assert open_memory(text) is None


def test_memory_cannot_shrink_under_its_readers() -> None:
    address = create_memory("a:0")
    os.ftruncate(address.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(address.fd, 0)
    os.close(address.fd)


@in_event_loop
async def test_a_child_has_memory_opened_by_its_supervisor(other: MemoryAddress) -> None:
    lender = MemoryLender()
    child = MemoryFinder(os.dup(lender.fd))
    lender.start()
    first, *nonsense, second = [
        await asyncio.to_thread(child.find, address)
        for address in (str(other), "", "nonsense" * 1000, "[" * 1000, str(other))
    ]
    lender.close()
    assert await asyncio.to_thread(child.find, str(other)) is None  # the supervisor is gone
    assert nonsense == [None, None, None]
    assert content_of(first) == CONTENT
    assert second is not None
    os.close(second)


@in_event_loop
async def test_a_lender_ends_with_its_child() -> None:

    lender = MemoryLender()
    child = os.dup(lender.fd)
    lender.start()
    os.close(child)
    await asyncio.sleep(0)
    lender.close()
    lender.close()


@pytest.mark.parametrize("owner", ["stage1:0", "stage1", "stage1:0-", ""])
def test_memory_says_whose_it_is(owner: str) -> None:
    made = create_memory("stage1:0")
    os.close(made.fd)
    assert is_of(str(made), owner) is (owner == "stage1:0")
    for other in ("", "[]", "[" * 100_000, str(made._replace(name=f"{made.name}0"))):
        assert not is_of(other, owner)
