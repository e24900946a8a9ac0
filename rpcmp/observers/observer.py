"""What looks at a run."""

from __future__ import annotations

from typing import Protocol

from rpcmp.process.channel import Message


class Observer(Protocol):
    """Is told what happens in a run; see `rpcmp.job.drive` for the events.

    Both methods are called on a thread of the observer's own. What they raise ends the observer,
    not the run.
    """

    @property
    def name(self) -> str:
        """What a warning calls it: "the run folder", "logger 'my_logs:wandb'"."""

    def tell(self, event: Message) -> None:
        """Take an event, in order, and leave it as it is: others are told of the same object."""

    def close(self) -> None:
        """Finish; called once, after the last event, or after `tell` has raised."""
