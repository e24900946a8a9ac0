"""No process of a test outlives it, even if the tests themselves are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import psutil

from tests.support.places import TESTS
from tests.support.processes import poll_for, with_token
from tests.support.reaper import TOKEN

RUNS_TESTS = """
import subprocess, sys, time
from tests.support.reaper import reaping
sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
with reaping(sys.argv[1]):
    print(subprocess.Popen(sleeping, start_new_session=True).pid, flush=True)
    time.sleep(600)
"""


def test_children_of_killed_tests_are_killed() -> None:
    token = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", RUNS_TESTS, token],
        cwd=TESTS.parent,
        env={**os.environ, TOKEN: f"{token}-1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as tests:
        try:
            assert tests.stdout is not None
            left = psutil.Process(int(tests.stdout.readline()))
            poll_for(lambda: left in with_token(token), "its environment to be readable")
        finally:
            tests.kill()
    poll_for(lambda: not with_token(token), "what they have started to be killed")
