"""What `rpcmp.launch` returns, whose group is in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rpcmp.config.schema import Config
from rpcmp.driver import calls
from rpcmp.driver.calls import Calls
from rpcmp.errors import from_wire
from rpcmp.job.pipeline import Pipeline, PipelineOptimizer
from tests.support.localgroup import local_group


class LocalPipeline(Pipeline):
    """Its calls are answered as a driver process answers them, with errors as they travel."""

    def __init__(self, config: Config, answers: Calls) -> None:
        self.optimizer = PipelineOptimizer(self)
        self._tied_to = config.tied_to
        self._calls = answers
        self._version = 0
        self._closed = True  # there is nothing to close

    def _call(self, name: str, *arguments: Any) -> Any:
        self._version += 1
        self._calls.version = self._version
        answer = calls._answer(calls._METHODS[name], self._calls, list(arguments))
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["result"]


@contextlib.contextmanager
def local_pipeline(config: Config) -> Iterator[LocalPipeline]:
    """A job's pipeline; the caller brings the mini-batches."""
    config = config.model_copy(update={"checkpoint": None})
    with local_group(config, load_data=False) as local:
        yield LocalPipeline(config, Calls(config, local.group, metrics=local.metrics))
