"""Whether the workers of a group have the memory to try other schedule options.

Options may let a stage hold the activations of more micro-batches. What each of them takes is known
from the steps so far: all that a worker has taken since it was built counts as activations.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from rpcmp.config.schema import Config
from rpcmp.driver.stage_group import StageGroup
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.setting_grid import MEMORY_SHARE
from rpcmp.worker.stage import Stage


class WorkerMemory(NamedTuple):
    """The memory of one worker.

    Attributes:
        place: equal for workers that share it.
        most: bytes of the worker so far, at its peak.
        used: those of them that it has taken since it was built.
    """

    place: str
    most: int
    used: int


class TrialMemory:
    """What steps under other options may take.

    Args:
        job: under the config's own options; what others need besides is shared out.
        first: under the options that the group starts with.
    """

    def __init__(self, group: StageGroup, job: Config, first: Config) -> None:
        self._group, self._job = group, job
        self._usual, self._held = cost_model.held(job), [cost_model.held(first)]
        self._workers: dict[str, WorkerMemory] = {}
        self._least_free: dict[str, int] = {}  # so far, by place

    def use(self, job: Config) -> None:
        """Note under which options the next steps are."""
        self._held.append(cost_model.held(job))

    def measure(self) -> None:
        """Ask every worker for its memory."""
        taken = self._group.workers.everywhere(Stage.memory)
        free = self._group.workers.everywhere(Stage.free_memory)
        for label, (place, bytes_left) in free.items():
            peak, idle = taken[label]["peak"], taken[label]["idle"]
            self._workers[label] = WorkerMemory(place, peak, peak - idle)
            left = bytes_left or 0  # None: it is not known
            self._least_free[place] = min(self._least_free.get(place, left), left)

    def fits(self, job: Config) -> bool:
        """Return whether every worker may hold as many micro-batches as a job's options let it.

        By what was measured last, within its stage's limit, and a part of what is free.
        """
        held = cost_model.held(job)
        more: defaultdict[str, float] = defaultdict(float)  # than under the config's own options
        for worker in self._job.workers:
            own, stage = self._workers[worker.label], worker.stage
            before = max(each[stage] for each in self._held)
            per_microbatch = own.used / before
            extra = per_microbatch * max(0, held[stage] - before)
            limit = self._job.stage(worker.stage_index).memory_bytes
            if limit is not None and extra and own.most + extra > limit:
                return False
            more[own.place] += per_microbatch * max(0, held[stage] - self._usual[stage])
        return all(extra <= MEMORY_SHARE * self._least_free[place] for place, extra in more.items())
