"""The request to each host of a job."""

from __future__ import annotations

from rpcmp.tools import job_hosts
from tests.support.findings import examined


def test_a_request_has_all_callables_that_the_host_will_build() -> None:
    job = examined(checkpoint={"dir": "/data"})
    first, last, home = (
        job_hosts.stage_request(job, 0, ""),
        job_hosts.stage_request(job, 1, "m"),
        job_hosts.driver_request(job, ""),
    )
    assert set(first.callables) == {"model.layers", "optimizer"}
    assert set(last.callables) == {"model.layers", "optimizer", "loss", "metrics.accuracy"}
    assert set(home.callables) == {"model.layers", "data.train"}
    assert home.metrics == {"metrics.accuracy": "my_metrics:accuracy"}  # the driver may compute it
    without = job_hosts.stage_request(job, 1, "m", ["metrics.accuracy"])
    assert set(last.callables) - set(without.callables) == {"metrics.accuracy"}
    assert (last.folder, last.marker) == ("/data", "m")
    assert set(job_hosts.spare_request(job, "").callables) == set(last.callables)


def test_a_request_has_the_datasets_if_the_host_loads_them() -> None:
    data = {"train": "m:train", "test": "m:test", "at": "stage"}
    job = examined(model={"layers": "m:layers", "balance": [1, 1, 1]}, data=data)
    first, middle, last = (job_hosts.stage_request(job, index, "") for index in range(3))
    asked = [{"data.train", "data.test"} <= set(each.callables) for each in (first, middle, last)]
    assert asked == [True, False, True]
    assert set(job_hosts.driver_request(job, "").callables) == {"model.layers"}


def test_a_request_has_the_stages_own_optimizer_and_scheduler() -> None:
    own = {"optimizer": "m:Own", "scheduler": "m:Rate"}
    found = job_hosts.stage_request(
        examined(model={"layers": "m:layers"}, stages=[own, {}]), 0, ""
    ).callables
    assert (found["stages.0.optimizer"], found["stages.0.scheduler"]) == ("m:Own", "m:Rate")
    assert "optimizer" not in found
