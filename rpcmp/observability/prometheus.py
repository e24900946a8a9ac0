"""Metrics for Prometheus: families, their values, and the endpoint that serves them.

Values are written as things happen, and read by scrapes on another thread. A value that is not
known yet is absent rather than 0.

The endpoint serves HTTP on loopback, and elsewhere TLS with certificates on both sides, or HTTP
with `--insecure`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, make_asgi_app
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rpcmp.config import addresses
from rpcmp.config.importing import explain_error
from rpcmp.errors import ConfigError, one_line
from rpcmp.net.connection_limits import BoundedListener, ConnectionLimit, descriptor_limit
from rpcmp.net.security import Security, is_loopback
from rpcmp.observability.web_server import HostCheck, WebServer, listen

log = logging.getLogger(__name__)

SCRAPE_SECONDS = 10.0
"""Seconds that a connection may last, for one scrape; also Prometheus' own default timeout."""

MOST = 16
"""Connections at once. The limit is lower if there are few file descriptors."""

Value = float | Callable[[], float]
"""A number, or a function that returns it at a scrape."""


class Family(NamedTuple):
    """Metrics with one name.

    Attributes:
        name: without the "_total" of a counter and the "_info" of an info.
        kind: a counter only ever grows; an info is constant, and all in its labels.
        help: the description for Prometheus.
        labels: names of the labels.
    """

    name: str
    kind: Literal["gauge", "counter", "info"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def sample(self) -> str:
        """The name of its samples, which queries use."""
        return self.name + {"gauge": "", "counter": "_total", "info": "_info"}[self.kind]


class Store(Collector):
    """The values of some families; any thread may read and write them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = {family.name: family for family in families}
        self._values: dict[str, dict[tuple[str, ...], Value]] = {n: {} for n in self._families}
        self._sources: dict[tuple[str, tuple[str, ...]], tuple[object, float, float]] = {}
        self._lock = threading.Lock()

    def set(self, name: str, value: Value | None, *labels: str) -> None:
        """Set the value of one metric, unless it is None; the value of an info is 1."""
        if value is None:
            return
        if len(labels) != len(self._families[name].labels):
            raise ValueError(f"{name} has the labels {self._families[name].labels}, not {labels}")
        with self._lock:
            self._values[name][labels] = value

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter, which starts at 0."""
        value = self._values[name].get(labels, 0.0)
        self.set(name, (value() if callable(value) else value) + amount, *labels)

    def count(self, name: str, source: object, count: float, *labels: str) -> None:
        """Set a counter to the total of its sources, which restart at zero; it never falls.

            process 1    0 ── 5 ── 9 |                  counted
            process 2                | 0 ── 3 ── 4
            counter      0 ── 5 ── 9 ── 9 ── 12 ── 13   served

        Args:
            source: identifies the present source, such as a process id.
            count: the count of that source so far.
        """
        last_source, before, last = self._sources.get((name, labels), (source, 0.0, 0.0))
        if last_source != source:
            before, last = before + last, 0.0
        last = max(last, count)
        self._sources[name, labels] = source, before, last
        self.set(name, before + last, *labels)

    def clear(self, name: str) -> None:
        """Remove all values of a family."""
        with self._lock:
            self._values[name].clear()

    def collect(self) -> Iterator[Metric]:
        """Yield all families that have values; see prometheus_client."""
        with self._lock:
            copies = {name: dict(values) for name, values in self._values.items() if values}
        for name, values in copies.items():
            yield _metric(self._families[name], values)


def _metric(family: Family, values: dict[tuple[str, ...], Value]) -> Metric:
    if family.kind == "info":
        info = InfoMetricFamily(family.name, family.help)
        for labels in values:
            info.add_metric([], dict(zip(family.labels, labels, strict=True)))
        return info
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric: CounterMetricFamily | GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in values.items():
        metric.add_metric(labels, value() if callable(value) else value)
    return metric


class OneScrape:
    """Gives each connection one scrape by `app`; logs why a scrape fails."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                closes = (b"connection", b"close")  # connections may last SCRAPE_SECONDS
                message = {**message, "headers": [*message["headers"], closes]}
            await send(message)

        app = self._app
        if scope["method"] not in ("GET", "HEAD"):
            app = PlainTextResponse("405: GET the metrics\n", 405, {"Allow": "GET, HEAD"})
        try:
            await app(scope, receive, send_last)
        except Exception as error:
            log.error("a scrape failed: %s", explain_error(error))
            raise


@contextlib.contextmanager
def serving(collector: Collector, address: str, security: Security) -> Iterator[str]:
    """Serve `collector`, and metrics of this process, until the block is left.

    Args:
        collector: collected at every scrape, on another thread.
        address: HOST:PORT; port 0 takes a free one.
        security: the security options of this process.

    Yields:
        the URL.

    Raises:
        ConfigError: the address is in use or invalid, or other machines could reach it without a
            certificate.
    """
    host, port = addresses.parse(address)
    credentials = None if is_loopback(host) else security.credentials
    if not is_loopback(host) and credentials is None and not security.insecure:
        raise ConfigError(
            f"--metrics {address} is not a loopback address: whoever reaches it reads what the job "
            "does. Give --certs DIR, which `rpcmp certs issue` makes, so that it takes TLS and a "
            "certificate of the same authority; or --insecure, where nobody else is on the network"
        )
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    app: ASGIApp = OneScrape(make_asgi_app(registry))
    try:
        listener = listen(host, port)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--metrics: cannot listen on {address}: {reason}") from error
    port = listener.getsockname()[1]
    most = descriptor_limit(32, MOST)
    limit = ConnectionLimit(most, most, seconds=SCRAPE_SECONDS)
    server = WebServer(
        HostCheck(app, host) if is_loopback(host) else app,
        BoundedListener(listener, limit),
        limit,
        None if credentials is None else credentials.metrics,
        "rpcmp-metrics",
        lambda error: log.error("the metrics are not served any more: %s", one_line(error)),
    )
    try:
        scheme = "http" if credentials is None else "https"
        yield f"{scheme}://{addresses.format_address(host, port)}/metrics"
    finally:
        limit.end_all()  # no client waits for a last message
        server.close()
