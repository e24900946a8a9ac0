"""Metrics, read as Prometheus does."""

from __future__ import annotations

import re
import ssl
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.processes import Running, RunningHere, poll_for

HERE = "127.0.0.1"
ACCEPT = {"Accept": "application/openmetrics-text; version=1.0.0"}

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]


def scrape(url: str, context: ssl.SSLContext | None = None) -> Samples:
    """Return all samples by name and labels, or fail if the text is not OpenMetrics."""
    request = urllib.request.Request(url, headers=ACCEPT)
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def of(samples: Samples, name: str, *keys: str) -> dict[tuple[str, ...], float]:
    """Return the values of a family by the values of some labels."""
    found = ((dict(labels), v) for (n, labels), v in samples.items() if n == name)
    return {tuple(labels[key] for key in keys): v for labels, v in found}


def url_of(run: Running | RunningHere) -> str:
    """Return the address of the metrics from a command's output."""

    def found() -> str | None:
        output = "".join(run.err) if isinstance(run, Running) else run.err.getvalue()
        urls = re.findall(r"metrics at (\S+)", output)
        return urls[0] if urls else None

    url: str = poll_for(found, "the address of the metrics")
    return url


def port_of(url: str) -> int:
    return int(re.findall(r":(\d+)/", url)[0])
