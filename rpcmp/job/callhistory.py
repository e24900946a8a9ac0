"""The calls that a pipeline has made: those that a group which is formed again has to repeat.

kept:      1     3     5              what all stages have kept (`Calls.kept`)
calls:     1  2  3  4  5  6  7        6 and 7 would be repeated; or 4 to 7, where a host is gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rpcmp import tree
from rpcmp.errors import JobError

CHANGING = {
    "train_step",
    "forward_backward",
    "load_state_dict",
    "optimizer_step",
    "zero_grad",
    "clip_grad_norm_",
    "step_scheduler",
    "load_optimizer_state_dict",
}
"""Calls after which model, gradients or optimizers are not what they were."""

DIFFERENTIATING = {"train_step", "forward_backward"}
"""Calls that clear all gradients where they fail; others then change nothing."""

KEPT = 3
"""How many of the newest kept versions a group may have to go back to; see `snapshot.slots`."""


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        version: its number among those that change something; 0: it changes nothing.
        name, arguments: as in rpcmp.driver.calls.
    """

    version: int
    name: str
    arguments: tuple[Any, ...]


class CallHistory:
    """The calls since the oldest version that a group may have to go back to.

    Args:
        is_kept: whether any call will ever be repeated.
    """

    def __init__(self, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self._version = 0
        self._calls: deque[Call] = deque()
        self._kept: deque[int] = deque([0], maxlen=KEPT)
        self._states: dict[int, dict[str, Any]] = {0: {}}
        self._is_new = False

    @property
    def known(self) -> dict[int, dict[str, Any]]:
        """What the driver was at each version that a group can go on from."""
        return {version: self._states[version] for version in self._kept}

    def new(self, name: str, arguments: tuple[Any, ...]) -> Call:
        """A call that is about to be made.

        Its tensors are copied where it may have to be repeated: the caller may use theirs again.
        """
        if name not in CHANGING:
            return Call(0, name, arguments)
        if self._is_kept:
            arguments = tree.map_tensors(lambda tensor: tensor.detach().clone(), arguments)
        return Call(self._version + 1, name, arguments)

    def take_is_new(self) -> bool:
        """Whether a call has ended since this was last asked."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def since(self, version: int) -> Iterator[Call]:
        """The calls that a group which begins at `version` has not seen.

        Raises:
            JobError: too much was lost to repeat them.
        """
        if version < self._kept[0]:
            raise JobError(f"the group begins at call {version}, of which too much is forgotten")
        return iter([call for call in self._calls if call.version > version])

    def note_done(self, call: Call, state: dict[str, Any], kept: int) -> None:
        """Note that a call has been answered.

        Args:
            state: what the driver is now, as plain values.
            kept: the newest version that all stages have kept.
        """
        is_repeated = 0 < call.version <= self._version
        self._is_new |= not is_repeated
        if is_repeated or call.version == 0:
            return
        self._version = call.version
        if not self._is_kept:
            return
        self._calls.append(call)
        if kept == call.version:
            self._kept.append(kept)
            self._states[kept] = state
        self._forget()

    def note_failed(self, call: Call) -> None:
        """Note that a call has failed in the user's code; of a step no gradients are left."""
        if call.version > self._version and call.name in DIFFERENTIATING:
            self._version = call.version
            if self._is_kept:
                self._calls.append(Call(call.version, "zero_grad", ()))

    def _forget(self) -> None:
        oldest = self._kept[0]
        while self._calls and self._calls[0].version <= oldest:
            self._calls.popleft()
        self._states = {version: self._states[version] for version in self._kept}
