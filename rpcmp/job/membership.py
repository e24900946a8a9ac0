"""Hosts that join and leave a run while it trains.

    rpcmp join NEW --to SERVER         SERVER ──Watch──> the run, which measures NEW meanwhile
    rpcmp drain --leave SERVER         SERVER ──Watch──> the run
    a server that does not come back   for `recovery.replace_after`, and there is no spare
                                            │ the run pauses after its running step
                                            v
    the next generation has a stage more, or less, and starts from the snapshots in memory, as one
    whose layers have moved does (`rpcmp.job.cuts`)

A stage keeps its name, by which snapshots go, and the number that its server's certificate is for,
wherever it stands by then. A new one gets a name and a number that none had before. It stands
before the last one: the first and the last read the batch, perhaps from their own disks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, RpcmpError, UnreachableError, one_line
from rpcmp.job.autobalance import stage_hosts
from rpcmp.job.cuts import with_stages
from rpcmp.job.moving_balance import Change, MovingBalance
from rpcmp.job.server_calls import describe, is_free_spare
from rpcmp.job.server_pool import ServerPlace, ServerPool
from rpcmp.observability.events import Event, WarningEvent
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.partition import StageHost, choose_balance, profile_seconds
from rpcmp.server.client import StageClient

REFUSED_SECONDS = 60.0
"""How long a server may not join with which the run could not go on."""


class Membership:
    """Plans the stages that a run goes on with when hosts join or leave it.

    Args:
        balance: of the run, which the changes are for.
        report: called with warnings.

    Attributes:
        requests: addresses of spares that have yet to be examined.
    """

    def __init__(
        self, balance: MovingBalance, pool: ServerPool, report: Callable[[Event], None]
    ) -> None:
        self._balance, self._pool, self._report = balance, pool, report
        self.requests: list[str] = []
        self._newcomers: dict[str, StageHost | None] = {}
        self._refused: dict[str, float] = {}
        self._is_warned = False

    def request(self, address: str) -> bool:
        """Note that a spare is to join; returns whether that is news."""
        is_new = address not in self.requests
        if is_new:
            self.requests.append(address)
        return is_new

    async def examine(self, address: str) -> None:
        """Let a spare be one of the next stages' hosts, or warn why it cannot.

        Args:
            address: one of `requests`, which it is no longer unless the generation ends meanwhile.
        """
        self.requests.remove(address)
        try:
            self._newcomers[address] = await self._examine(address)
        except asyncio.CancelledError:
            self.requests.append(address)
            raise
        except Exception as error:  # whatever that server answers
            self._refuse(address, str(error) if isinstance(error, RpcmpError) else one_line(error))

    def _refuse(self, address: str, why: str) -> None:
        self._report(WarningEvent(text=f"{address} cannot join the run: {why}"))

    async def _examine(self, address: str) -> StageHost | None:
        """Return the host of a spare; None: the hosts of the run were not measured either."""
        pool = self._pool
        if pool.is_local:
            raise ConfigError("the run has started its servers itself, on its own machine")
        if address in pool.addresses:
            raise ConfigError("it serves a stage of it already")
        if address in self._balance.config.recovery.spares:
            raise ConfigError("it is one of `recovery.spares`, and stays one")
        if time.monotonic() < self._refused.get(address, 0.0):
            raise ConfigError("it has just failed to; ask again in a minute")
        require_movable(self._balance.config)
        pool.dialer.security.require_allowed([address])
        name, number = self._new_stage([])
        server = await describe(StageClient(name, address, pool.dialer, number))
        if server is None:
            raise UnreachableError("no server answers there")
        if not is_free_spare(server):
            raise ConfigError("it is no spare that is free: start it by `rpcmp serve --spare`")
        if not self._balance.are_hosts_measured:
            return None
        # Only its layers count: it may be any one stage of the job.
        config = with_stages(self._balance.config, {name: sum(self._balance.balance)})
        recovery = config.recovery.model_copy(update={"spares": []})
        config = config.model_copy(update={"recovery": recovery, "planned_for": []})
        full = config.with_full_microbatches()
        (host,) = await stage_hosts(full, [address], pool.forks)
        return host

    def with_newcomers(self) -> Change | None:
        """Return the change by which spares that were examined serve further stages, if any."""
        change, joined, hosts = None, dict[str, ServerPlace](), self._hosts()
        for address, host in list(self._newcomers.items()):
            name, number = self._new_stage(joined)
            more = {**joined, name: ServerPlace(address, number)}
            known = hosts if host is None else {**hosts, name: host}
            try:
                change = self._with(more, known)
            except ConfigError as error:
                del self._newcomers[address]
                self._refuse(address, str(error))
            else:
                joined, hosts = more, known
        self._pool.add(joined)
        return change

    def _with(self, joined: Mapping[str, ServerPlace], hosts: Mapping[str, StageHost]) -> Change:
        *first, last = self._balance.config.stage_names
        names = [*first, *joined, last] if first else [last, *joined]
        if len(names) > sum(self._balance.balance):
            raise ConfigError("each stage has but one layer already")
        added = [f"{place.address} as stage {name!r}" for name, place in joined.items()]
        reason = _all_have(added, "joined")
        addresses = [place.address for place in joined.values()]
        return self._change(names, hosts, reason, joined=addresses)

    def forget(self, addresses: Sequence[str]) -> None:
        """Forget newcomers that the run tries to go on with."""
        for address in addresses:
            self._newcomers.pop(address, None)

    def undone(self, labels: Iterable[str]) -> None:
        """Note that the run could not go on with the servers of these stages."""
        until = time.monotonic() + REFUSED_SECONDS
        self._refused |= {self._pool.place(label).address: until for label in labels}

    def can_do_without(self, stages: Sequence[str]) -> bool:
        """Return whether the other stages can take over what these compute."""
        try:
            require_movable(self._balance.config)
            self.without(stages)
        except ConfigError as error:
            if self._balance.config.rebalance == "auto" and not self._is_warned:
                self._is_warned = True
                text = f"the others cannot take over stage {stages[-1]!r}: {error}"
                self._report(WarningEvent(text=text))
            return False
        return True

    def without(self, stages: Sequence[str]) -> Change:
        """Return the change by which the other stages take over what these compute.

        Raises ConfigError if they cannot.
        """
        config = self._balance.config
        names = [name for name in config.stage_names if name not in stages]
        if self._pool.is_local:
            raise ConfigError("the run starts its own servers again")
        if not self._balance.balance:
            raise ConfigError("the run has not begun")
        if not names:
            raise ConfigError("there is no other stage")
        if not config.recovery.mirror_every_steps:
            raise ConfigError("its snapshots are nowhere else, since mirror_every_steps = 0")
        if frozenset(names) in self._balance.failed:
            raise ConfigError("they have tried, and failed")
        left = [f"stage {name!r} at {self._pool.place(name).address}" for name in stages]
        return self._change(names, self._hosts(), _all_have(left, "left"), is_forced=True)

    def _change(
        self,
        names: Sequence[str],
        hosts: Mapping[str, StageHost],
        reason: str,
        joined: Sequence[str] = (),
        is_forced: bool = False,
    ) -> Change:
        """Return the change to stages of these names, each with the layers that suit its host.

        They fit into memory under the options that the run has now, or else under the config's own.
        """
        num_layers = sum(self._balance.balance)
        config = with_stages(self._balance.config, even(names, num_layers))
        if not hosts:
            return Change(config, reason, [], joined, is_forced)
        by_speed = sorted(hosts.values(), key=lambda host: profile_seconds(host.profile))
        typical = by_speed[len(by_speed) // 2]
        stages = [replace(hosts.get(name, typical), stage=name) for name in names]

        def chosen(options: ScheduleOptions) -> list[int]:
            job = options.on(config).with_full_microbatches()
            return choose_balance(cost_model.hosts_under(job, stages))

        try:
            balance, fits_options = chosen(self._balance.options), True
        except ConfigError:
            balance, fits_options = chosen(config.options), False
        return Change(config.with_balance(balance), reason, stages, joined, is_forced, fits_options)

    def _hosts(self) -> dict[str, StageHost]:
        return {host.stage: host for host in self._balance.hosts}

    def _new_stage(self, taken: Mapping[str, ServerPlace] | Sequence[str]) -> tuple[str, int]:
        """Return a name and a number that no stage has or had."""
        known = self._pool.known_places
        number = 1 + max(place.stage_index for place in known.values()) + len(taken)
        name = f"stage{number}"
        while name in known or name in taken:
            name += "x"
        return name, number


def require_movable(config: Config) -> None:
    """Raise ConfigError if no host can join or leave a job."""
    if config.rebalance != "auto":
        raise ConfigError('it needs rebalance = "auto"')
    if config.is_replicated:
        raise ConfigError("its stages have replicas")


def _all_have(who: Sequence[str], done: str) -> str:
    return f"{', '.join(who)} {'has' if len(who) == 1 else 'have'} {done}"


def even(names: Sequence[str], num_layers: int) -> dict[str, int]:
    """Return numbers of layers that differ by one at most."""
    each, more = divmod(num_layers, len(names))
    return {name: each + (index < more) for index, name in enumerate(names)}
