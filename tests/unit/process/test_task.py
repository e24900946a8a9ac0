"""Tasks: processes that compute a single result."""

from __future__ import annotations

import asyncio
import importlib
import inspect

import pytest

from rpcmp.errors import JobError
from rpcmp.process.task import TASKS, run_task


@pytest.mark.parametrize("op", TASKS)
def test_every_task_is_a_generator_function(op: str) -> None:
    module, _, function = TASKS[op].partition(":")
    assert inspect.isgeneratorfunction(getattr(importlib.import_module(module), function))


def test_a_failed_task_raises_its_error_in_the_supervisor() -> None:
    with pytest.raises(JobError, match="KeyError: 'folder'"):
        asyncio.run(run_task({"op": "sample"}, {}, None, None))


def test_an_unknown_op_starts_no_process() -> None:
    with pytest.raises(KeyError, match="no task"):
        asyncio.run(run_task({"op": "no task"}, {}, None, None))
