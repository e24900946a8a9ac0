"""The stages as the driver sees them: one call for a train step, an evaluation or a prediction.

Whatever concerns the model as a whole is here: each stage has a part of it, and an answer of all of
them is put together as if there were one process. How micro-batches go through them is in `rounds`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER, Member
from rpcmp.data.batch_server import BatchServer
from rpcmp.data.batches import Loaded
from rpcmp.driver import replica_check
from rpcmp.driver.evaluation import Evaluation, mean
from rpcmp.driver.loss_scaler import LossScaler
from rpcmp.driver.metrics import Metrics
from rpcmp.driver.optimizer import DistributedOptimizer
from rpcmp.driver.rounds import Batch, RoundHandle, RoundScheduler
from rpcmp.driver.worker_refs import WorkerRefs
from rpcmp.errors import ConfigError, JobError, RpcmpError, one_line
from rpcmp.observability.events.event import Memory
from rpcmp.observability.trace.spans import Span
from rpcmp.pipelining import exact_sum, inflight, microbatch
from rpcmp.rpc import tensors
from rpcmp.rpc.messages import (
    AfterRound,
    BatchIndices,
    DatasetInfo,
    Evaluated,
    Mode,
    StageOutputs,
    StepReport,
    Trained,
)
from rpcmp.rpc.transport import Transport, result, results
from rpcmp.worker.stage import Stage


class StageGroup:
    """All stages of a job, after every process has joined.

    Train steps may overlap; everything else waits until no round is under way.

    Args:
        config: the job.
        source: what this process serves to the stages.
        peers: the stages' processes.
    """

    def __init__(self, config: Config, source: BatchServer, peers: Transport) -> None:
        self._config = config
        self._peers = peers
        self._workers = WorkerRefs.join(config.workers, peers)
        self._rounds = RoundScheduler(config, source, self._workers)
        graph = config.graph()
        self._readers = [worker for worker in config.workers if graph.parts(worker.stage)]
        self.optimizer = DistributedOptimizer(
            self._workers.parts(Stage.its_optimizer),
            self._sum_gradients,
            self._rounds.abort,
            None if config.loss_scaling is None else LossScaler(config.loss_scaling),
        )
        self._unsummed = 0
        self._unite()
        self._needed: dict[str, int] = {}
        if config.data is None or config.data.min_microbatch is None:
            self._needed = self._workers.on_firsts(Stage.smallest_microbatch)
            self._rounds.smallest = max(self._needed.values())

    def require_enough(self, samples: int) -> None:
        """Check that the smallest mini-batch of the run makes a micro-batch to train with.

        Args:
            samples: of that mini-batch.

        Raises:
            ConfigError: it does not.
        """
        least = self._rounds.smallest
        if samples >= least:
            return
        section = self._config.require_data("training")
        which, mend = "the last", "set data.drop_last = true, or change data.batch_size"
        if samples == section.batch_size:
            which, mend = "each", "raise data.batch_size"
        why, enough = "as data.min_microbatch says", ""
        if stage := next((name for name, its in self._needed.items() if its > samples), ""):
            why = f"since stage {stage!r} trains batch normalization"
            enough = ", if its maps have more than one value per channel"
        raise ConfigError(
            f"{which} mini-batch of an epoch has {samples} sample{'s' * (samples > 1)} "
            f"(data.batch_size = {section.batch_size}), and a micro-batch needs {least}, {why}: "
            f"{mend}, or set data.min_microbatch = {samples}{enough}"
        )

    def warnings(self) -> list[str]:
        """Return what the config could not know: how many micro-batches a step really has."""
        config, section = self._config, self._config.require_data("training")
        merged = section.model_copy(update={"min_microbatch": self._rounds.smallest})
        real = config.model_copy(update={"data": merged})
        count, wanted = real.num_full_microbatches, config.num_full_microbatches
        if count == wanted:
            return []
        fewer = (
            f"{section.batch_size} samples make {count} micro-batches of at least "
            f"{merged.min_microbatch}, and not {wanted}: a stage trains batch normalization; "
            "see data.min_microbatch"
        )
        return [fewer, *real.warnings]

    def reschedule(self, config: Config) -> None:
        """Go on under another setting, one that the plan foresaw; between two rounds.

        Args:
            config: the job with that setting.
        """
        self._rounds.reschedule(config)
        self._everywhere(Stage.reschedule, config.schedule, inflight.limits(config))
        self._config = config

    def start_step(
        self,
        batch: Batch,
        step: int,
        end: AfterRound,
        version: int = 0,
        save: bool = False,
    ) -> RoundHandle:
        """Begin a train step; `finish_step` waits for it.

        Up to STEPS_AHEAD may be under way; every stage works on them strictly in order.

        Args:
            batch: one that the stages load they must have heard of by `announce`.
            step: the optimizer step that this is for, counted from 1; seeds dropout. Called again
                for the same step, gradients add up and dropout goes on drawing.
            end: what the stages do by themselves afterwards.
            version: the number under which they keep what they are then; 0: they do not.
            save: whether that goes to their disks.
        """
        started = self._rounds.train(batch, step, end, version, save)
        self._unsummed = started.number if end is AfterRound.NOTHING else 0
        return started

    def finish_step(self, started: RoundHandle) -> Trained:
        """Wait for a train step, the earliest under way.

        Raises:
            StageError: the user's code raised at a stage.
            NonFiniteLossError: the loss is NaN or infinite, and not scaled.
        """
        try:
            trained: list[Trained] = self._rounds.finish(started)
        except JobError:
            self._let_go_of_gradients()
            raise
        reports = {name: report for part in trained for name, report in part.reports.items()}
        return Trained(exact_sum.exact_sum(part.loss for part in trained), reports)

    def forward_backward(self, batch: Batch, step: int) -> float:
        """Accumulate the gradients of a mini-batch and return its loss; see `start_step`."""
        return self.finish_step(self.start_step(batch, step, AfterRound.NOTHING)).loss

    def end_step(self, started: RoundHandle, loss: float) -> dict[str, StepReport]:
        """Let all stages step that hold a step, after its `finish_step`; what they report.

        Args:
            started: which one.
            loss: the step's, for schedulers that watch it.

        Raises:
            StageError: an optimizer raised.
            LossScaleError: the step was skipped, like so many before that the scale is of no use.
        """
        step = started.works[0].step
        watched = loss if self._config.steps_scheduler("step") else None
        try:
            self._sum_after(started.number)
            reports = self.optimizer.finish(self._config.max_grad_norm, watched)
        except Exception as error:  # no stage may be left that holds the round
            known = error if isinstance(error, RpcmpError) else _unexpected(error, step)
            cause = self._rounds.abort(known, started.number)
            self._let_go_of_gradients()
            raise cause from error
        if self.optimizer.scaler is not None:
            self.optimizer.scaler.require_useful(step)
        return reports

    def step(self) -> None:
        """Update the parameters with the gradients that have been accumulated, and clear these.

        Raises:
            StageError: an optimizer raised.
        """
        self.optimizer.step()
        self._rounds.discard()

    def zero_grad(self) -> None:
        """Clear the gradients that have been accumulated."""
        self._rounds.discard()
        self._unsummed = 0
        self.optimizer.zero_grad()

    def settle(self) -> dict[str, StepReport]:
        """Wait until all stages have done all that they were asked for; what they report.

        Raises:
            StageError: the last step failed in a weight gradient or an optimizer.
        """
        found = self._everywhere(Stage.settle)
        return {name: report for name, report in found.items() if report is not None}

    def keep(self, version: int) -> None:
        """Have all stages keep what they are, now that they have done all, as `version`.

        Raises:
            StageError: what a stage is cannot be stored.
        """
        self._everywhere(Stage.keep, version)

    def save(self, step: int) -> None:
        """Have all stages save what they were after `step`, the last one.

        Raises:
            StageError: what a stage is cannot be stored.
        """
        self._everywhere(Stage.save, step)

    def evaluate(self, batch: Batch, step: int, own: Metrics | None = None) -> Evaluation:
        """Loss and means of a mini-batch; parameters and gradients stay as they are.

        Args:
            batch: see `start_step`.
            step: the optimizer step that this follows.
            own: the driver's metrics, which take in every micro-batch, in order.
        """
        started = self._rounds.forward(Mode.EVALUATE, batch, step)
        found: list[Evaluated] = self._rounds.finish(started)
        if own is not None and own.names:
            parts = (
                microbatch.split(batch.targets, len(started.works))
                if isinstance(batch, Loaded)
                else [answer.targets for answer in found]
            )
            for answer, part in zip(found, parts, strict=True):
                own.update(answer.outputs, part)
        return mean(
            Evaluation(work.num_samples, answer.loss, answer.metrics)
            for work, answer in zip(started.works, found, strict=True)
        )

    def predict(self, inputs: Any, step: int) -> Any:
        """The last stage's outputs for `inputs`, joined again along the first dimension."""
        started = self._rounds.forward(Mode.PREDICT, Loaded(inputs), step)
        found: list[StageOutputs] = self._rounds.finish(started)
        return microbatch.join([answer.value for answer in found])

    def parameters_sha256(self) -> str:
        """The hash of `rpcmp.rpc.tensors` over the unsplit model.

        Raises:
            MismatchError: the replicas of a stage are not the same model.
        """
        if self._config.is_replicated:
            replica_check.require_equal(self._workers)
        lines: dict[str, str] = self._merge(Stage.digests)
        tied = self._config.tied_to.items()
        tied_lines = {name: tensors.renamed_line(lines[first], name) for name, first in tied}
        return tensors.combine_digests({**lines, **tied_lines})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the unsplit model, on the host; tied ones once."""
        return self._merge(Stage.state_dict)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the parameters and buffers of the unsplit model; each stage gets its own.

        Raises:
            ConfigError: a name is missing or unknown, or a shape differs.
        """
        state = {n: value for n, value in state.items() if n not in self._config.tied_to}
        names: dict[str, list[str]] = self._workers.on_firsts(Stage.state_names)
        known = {name for of_stage in names.values() for name in of_stage}
        if known != set(state):
            missing, unknown = sorted(known - set(state)), sorted(set(state) - known)
            raise ConfigError(f"the state misses {missing} and has unknown {unknown}")
        futures = [
            (
                w.label,
                self._workers.on(w, Stage.load_state_dict, {n: state[n] for n in names[w.stage]}),
            )
            for w in self._workers
        ]
        results(futures)
        self._unite()

    def holdings(self) -> dict[str, DatasetInfo]:
        """What the stages have built to load samples from, by name; of those that do so."""
        asked = [(each.label, self._workers.on(each, Stage.holding)) for each in self._readers]
        pairs = zip(self._readers, results(asked), strict=True)
        return {each.label: holding for each, holding in pairs if holding is not None}

    def order(self, epoch: int) -> torch.Tensor:
        """The indices of an epoch's samples by the config's sampler, from a stage that loads them.

        Args:
            epoch: counted from 0.

        Raises:
            ConfigError: the sampler cannot be used.
        """
        reader = self._readers[0]
        found: torch.Tensor = result(self._workers.on(reader, Stage.order, epoch), reader.label)
        return found

    def announce(self, drawn: Sequence[BatchIndices]) -> None:
        """Tell these stages which mini-batches they will be asked for, so that they load them."""
        for worker in self._readers:
            self._workers.on(worker, Stage.expect, list(drawn))

    def hosts(self) -> dict[str, dict[str, str]]:
        """What decides the bits of each stage's host; see rpcmp.pipelining.devices."""
        return self._everywhere(Stage.host)

    def trace(self, on: bool) -> dict[str, str]:
        """Let all stages record every action, or stop it; returns the names of their hosts."""
        return self._everywhere(Stage.trace, on)

    def take_spans(self) -> dict[str, list[Span]]:
        """What each stage has recorded next, at most `rpcmp.worker.executor.AT_ONCE` actions."""
        return self._everywhere(Stage.take_spans)

    def follow(self) -> dict[str, str]:
        """Let all stages keep what they did in their last steps; the names of their hosts."""
        return self._everywhere(Stage.follow)

    def ask_recent(self, step: int, count: int) -> Callable[[], dict[str, list[Span]]]:
        """Ask what each stage did in the last `count` steps up to `step`; what is returned waits
        for the answers."""
        asked = [(w.label, self._workers.on(w, Stage.recent, step, count)) for w in self._workers]

        def answers() -> dict[str, list[Span]]:
            found = results(asked)
            return {label: spans for (label, _), spans in zip(asked, found, strict=True)}

        return answers

    def clock(self, worker: Member) -> int:
        """A worker's `time.perf_counter_ns`, now."""
        now: int = result(self._workers.on(worker, Stage.clock), worker.label)
        return now

    def memory(self) -> dict[str, Memory]:
        """Each stage's bytes: "idle", when it had been built, and "peak"."""
        return self._everywhere(Stage.memory)

    def live_state(self) -> dict[str, dict[str, int]]:
        """For each stage and the driver, counts of what a step must not leave behind."""
        return {**self._everywhere(Stage.live_state), DRIVER: self._peers.live_state()}

    def close(self) -> None:
        """Tell all workers to leave the group, and let go of what lives there."""
        self._rounds.close()
        self._everywhere(Stage.finish)
        self.optimizer.release()
        self._workers.release()

    def _let_go_of_gradients(self) -> None:
        with contextlib.suppress(RpcmpError):  # a worker that is gone has no gradients
            self.zero_grad()

    def _unite(self) -> None:
        """Make equal what has to be, where several workers have the same parameters."""
        if self._config.sums_gradients or self._config.names_parameters:
            replica_check.require_fit(self._workers, self._config)
        if self._config.sums_gradients:
            replica_check.unite(self._workers)

    def _sum_gradients(self) -> None:
        """Have replicas sum what has added up, where they have not done so yet."""
        if self._unsummed:
            self._sum_after(self._unsummed)
            self._unsummed = 0

    def _sum_after(self, round_number: int) -> None:
        if self._config.sums_gradients:
            self._everywhere(Stage.sum, round_number)

    def _merge(self, method: Callable[..., Any]) -> dict[str, Any]:
        parts = self._workers.on_firsts(method).values()
        return {name: value for part in parts for name, value in part.items()}

    def _everywhere(self, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        return self._workers.everywhere(method, *args)


def _unexpected(error: Exception, step: int) -> JobError:
    text = "".join(traceback.format_exception(error))
    return JobError(f"the driver failed at the end of step {step}: {one_line(error)}\n{text}")
