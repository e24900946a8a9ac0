"""The pipeline that `rpcmp.launch` returns, with its group in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar, TypeVarTuple

from rpcmp.config.schema import Config
from rpcmp.driver.operations import Operations, answer_call
from rpcmp.errors import from_wire
from rpcmp.job.pipeline import Pipeline, PipelineOptimizer
from tests.support.localgroup import local_group

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class LocalPipeline(Pipeline):
    """A pipeline that answers calls as a driver process does, encoded errors included."""

    def __init__(self, config: Config, operations: Operations) -> None:
        self.optimizer = PipelineOptimizer(self)
        self._other_names = config.other_names
        self._operations = operations
        self._version = 0
        self._closed = True  # there is nothing to close

    def _call(
        self, operation: Callable[[Operations, *Arguments], Result], *arguments: *Arguments
    ) -> Result:
        self._version += 1
        self._operations.version = self._version
        answer = answer_call(self._operations, operation.__name__, list(arguments))
        if "error" in answer:
            raise from_wire(answer["error"])
        result: Result = answer["result"]
        return result


@contextlib.contextmanager
def local_pipeline(config: Config) -> Iterator[LocalPipeline]:
    """Open a job's pipeline; the caller supplies the mini-batches."""
    config = config.model_copy(update={"checkpoint": None})
    with local_group(config, load_data=False) as local:
        yield LocalPipeline(config, Operations(config, local.group, metrics=local.metrics))
