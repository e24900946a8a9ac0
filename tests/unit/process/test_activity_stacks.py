"""Stack dumps, which a child writes and its supervisor reads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from rpcmp.process.activity import DUMP_SIGNAL, FORCED_DUMP_SIGNAL, MAX_STACKS, Stacks
from tests.support.processes import poll_for

WAITING = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/{file}", line 324 in wait
  File "/job/my_model.py", line 5 in forward"""

BUSY = """Thread 0x00007f00000000{number:02} (most recent call first):
  File "/job/{file}", line 7 in forward
  File "/usr/lib/python3.11/threading.py", line 324 in run"""


def read(text: str | bytes) -> str:
    """Return the stacks that a supervisor reads after a child has written `text`."""
    stacks = Stacks()
    os.write(stacks.fd, text if isinstance(text, bytes) else text.encode())
    return stacks.read()


def test_stacks_of_a_child_without_dumps_are_empty() -> None:
    stacks = Stacks()
    assert (stacks.size, stacks.read()) == (0, "")


@pytest.mark.parametrize(
    "file",
    ["threading.py", "selectors.py", "socket.py", "queue.py", "concurrent/futures/thread.py"],
)
def test_waiting_threads_come_after_working_ones(file: str) -> None:
    waiting = WAITING.format(file=file)
    first, second = BUSY.format(number=2, file="a.py"), BUSY.format(number=3, file="b.py")
    assert read("\n".join([waiting, first, waiting, second])) == "\n".join(
        [first, second, waiting, waiting]
    )


@pytest.mark.parametrize("file", ["my_threading.py", "threading.py.backup", "socketserver.py"])
def test_similar_file_names_are_user_code(file: str) -> None:
    busy, waiting = BUSY.format(number=2, file=file), WAITING.format(file="queue.py")
    assert read(f"{waiting}\n{busy}") == f"{busy}\n{waiting}"


def test_a_fatal_error_comes_before_the_stacks() -> None:
    waiting, busy = WAITING.format(file="queue.py"), BUSY.format(number=2, file="a.py")
    current = busy.replace("Thread 0x", "Current thread 0x")
    text = f"Fatal Python error: Segmentation fault\n\n{waiting}\n\n{current}\n"
    assert read(text) == f"Fatal Python error: Segmentation fault\n\n{current}\n\n{waiting}"


def test_stacks_return_the_last_bytes() -> None:
    busy = BUSY.format(number=2, file="a.py")
    text = "x" * MAX_STACKS + "\n" + WAITING.format(file="queue.py") + "\n" + busy
    found = read(text)
    assert len(found) == MAX_STACKS
    assert found.startswith("xxx")
    assert found.index(busy) < found.index(WAITING.format(file="queue.py"))


def test_stacks_replace_a_character_that_is_cut_in_two() -> None:
    snowmen = "\N{SNOWMAN}" * MAX_STACKS
    found = read(snowmen + "end")
    assert found.endswith("\N{SNOWMAN}end")
    assert found.strip("\N{SNOWMAN}\N{REPLACEMENT CHARACTER}") == "end"


TWO_THREADS = """
import faulthandler, threading
from rpcmp.process.activity import Stacks

def main():
    stacks, condition, begun = Stacks(), threading.Condition(), threading.Event()

    def wait_for_it():
        with condition:
            begun.set()
            condition.wait()

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    assert begun.wait(30)
    with condition:  # which is free since the thread waits
        faulthandler.dump_traceback(stacks.fd, all_threads=True)
        condition.notify()
    waiting.join(30)
    assert stacks.size > 0
    print(stacks.read())

main()
"""


def test_stacks_show_real_threads() -> None:
    """It runs in its own process: this one may have more threads than a dump shows."""
    command = [sys.executable, "-c", TWO_THREADS]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert text.index("in main") < text.index("in wait_for_it")


ASKED = """
import ctypes, sys, threading
from rpcmp.process.activity import enable_stack_dumps

def rest():
    threading.Event().wait()

def hold():
    while True:
        ctypes.PyDLL(None).pause()  # does not let go of the interpreter's lock

enable_stack_dumps(int(sys.argv[1]))
print("asked from now on", flush=True)
{"rest": rest, "hold": hold}[sys.argv[2]]()
"""


@pytest.mark.parametrize(
    ("how", "by"),
    [("rest", DUMP_SIGNAL), ("rest", FORCED_DUMP_SIGNAL), ("hold", FORCED_DUMP_SIGNAL)],
)
def test_a_child_dumps_its_stacks_on_a_signal(how: str, by: signal.Signals) -> None:
    stacks = Stacks()
    with subprocess.Popen(
        [sys.executable, "-c", ASKED, str(stacks.fd), how],
        stdout=subprocess.PIPE,
        pass_fds=[stacks.fd],
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline()

            def writes() -> bool:  # repeats the signal: the child may not be there yet
                child.send_signal(by)
                return bool(re.search(rf"in {how}\n(.*\n)*.* in <module>", stacks.read()))

            poll_for(writes, "its stacks")
        finally:
            child.kill()
    innermost = next(line for line in stacks.read().splitlines() if "File" in line)
    assert "in _write" not in innermost  # the dump excludes the function that writes it
