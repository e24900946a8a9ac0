"""What members have answered each other, however it travels."""

from __future__ import annotations

import pytest
import torch

from rpcmp.payload import Payload
from rpcmp.process.traffic import Way
from rpcmp.work import Outputs
from tests.support.processes import JobFolder, poll_for, running
from tests.support.scraping import HERE, scrape, url_of, value

WIDTH = 100_000
MICROBATCH_BYTES = 3 * WIDTH * 4  # samples of the first of four, float32

CONFIG = """
    steps = 100000
    [optimizer]
    callable = "torch.optim:SGD"
    kwargs = { lr = 1e-9 }
    [model]
    layers = "zoo:wide"
    balance = [1, 1]
"""


def test_answers_add_up_by_member_and_gradients_go_back_for_what_requires_them() -> None:
    payload = Payload()
    trained = torch.zeros(10, requires_grad=True)
    payload.note("a:0", [Outputs((trained, torch.zeros(3, dtype=torch.int64)))])
    payload.note("a:0", {"weight": torch.zeros(2, 2, dtype=torch.float16)})
    payload.note("b:0", torch.zeros(1))
    payload.note("c:0", {"loss": 0.5})  # no tensors: not worth a mention
    assert payload.read() == [Way("a:0", 40, 40 + 24 + 8, 0.0), Way("b:0", 0, 4, 0.0)]


@pytest.mark.usefixtures("own_forks")  # the width is in the environment
def test_links_count_tensors_that_go_through_memory(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", str(WIDTH))
    with running("drive", job.config(CONFIG), "--metrics", f"{HERE}:0") as run:
        url = url_of(run)

        def flows() -> tuple[float, float] | None:
            found = scrape(url)
            there, back = (
                value(found, "rpcmp_link_bytes_total", source=a, target=b) or 0
                for a, b in (("stage0", "stage1"), ("stage1", "stage0"))
            )
            return (there, back) if min(there, back) > 100 * MICROBATCH_BYTES else None

        there, back = poll_for(flows, "a hundred micro-batches")
    assert there == pytest.approx(back, rel=0.05)  # each activation's gradient has its shape
