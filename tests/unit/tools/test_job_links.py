"""The links between processes, and which end listens."""

from __future__ import annotations

from collections.abc import Sequence

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.tools.job_links import (
    Link,
    Listener,
    StageLink,
    Whereabouts,
    job_links,
    job_listeners,
    stage_links,
)
from tests.support.graphs import chain_of


def test_links_follow_the_graph_the_snapshots_and_the_rendezvous() -> None:
    inputs = {"image": ["input.image"], "text": ["input.text"], "head": ["image", "text"]}
    stages = [{"name": name, "module": "m:M", "inputs": of} for name, of in inputs.items()]
    config: Config = parse_config({"loss": "m:loss", "stages": stages})
    links = {(link.one, link.other): set(link.carries) for link in job_links(config, [1, 2, 0])}
    assert links == {
        ("driver", "image"): {"batches"},
        ("driver", "text"): {"batches"},
        ("driver", "head"): {"batches"},
        ("image", "head"): {"activations", "snapshots", "rendezvous"},
        ("text", "head"): {"activations", "snapshots"},
        ("image", "text"): {"snapshots", "rendezvous"},
    }


def test_a_stage_in_the_middle_gets_no_batches() -> None:
    model = {"layers": "m:layers", "balance": [1, 1, 1]}
    links = job_links(chain_of(3, model=model), [None] * 3)
    assert Link("driver", "stage1", ("control",)) in links
    assert not Link("driver", "stage1", ("control",)).has_tensors
    assert Link("stage0", "stage2", ("rendezvous",)) in links


def test_a_driver_sends_no_batches_if_stages_load_their_samples() -> None:
    links = job_links(chain_of(2, data={"train": "m:train", "at": "stage"}), [None] * 2)
    assert [link.carries for link in links if link.one == "driver"] == [("control",)] * 2


def here(label: str, address: str = "", machine: str = "m") -> Whereabouts:
    return Whereabouts(address, "host", machine, f"of {label}" if address else "shared", "")


LABELS = ("driver", "stage0", "stage1")


def dials(found: Sequence[StageLink]) -> dict[tuple[str, str], tuple[tuple[str, str], ...]]:
    return {(way.one, way.other): way.dials for way in found}


def test_on_one_machine_only_the_driver_and_the_rendezvous_need_connections() -> None:
    found = stage_links(chain_of(2), {label: here(label) for label in LABELS})
    assert dials(found) == {
        ("driver", "stage0"): (("driver", "stage0"),),
        ("driver", "stage1"): (("driver", "stage1"),),
        ("stage0", "stage1"): (("stage1", "stage0"),),
    }
    assert not any(way.crosses_hosts or way.is_encrypted for way in found)
    (first, _) = job_listeners(chain_of(2), {label: here(label) for label in LABELS})
    assert first == Listener("stage0", None, "host", "you and root, on this machine", "")


def test_workers_on_two_hosts_dial_each_other_by_tls() -> None:
    config = chain_of(2, security={"certs": "certs"})
    places = {
        label: here(label, f"{label}:1" if label != "driver" else "", machine=label)
        for label in LABELS
    }
    found = stage_links(config, places)
    assert dials(found)["stage0", "stage1"] == (("stage0", "stage1"), ("stage1", "stage0"))
    assert all(way.crosses_hosts and way.is_encrypted for way in found)
    assert {one.admits for one in job_listeners(config, places)} == {
        "who has a certificate of the authority, by TLS 1.3"
    }
    clear = chain_of(2, security={"insecure": True})
    assert not any(way.is_encrypted for way in stage_links(clear, places))
    assert "anybody who reaches the port" in job_listeners(clear, places)[0].admits


def test_stages_that_share_a_parameter_have_a_link() -> None:
    labels = ("driver", "stage0", "stage1", "stage2")
    places = {
        label: here(label, f"127.0.0.1:{index}" if index else "")
        for index, label in enumerate(labels)
    }
    model = {"layers": "m:layers", "balance": [1, 1, 1]}
    config = chain_of(3, model=model, recovery={"enabled": False})
    free = dials(stage_links(config, places))
    assert free["stage0", "stage2"] == (("stage2", "stage0"),)  # for the rendezvous only
    tied = stage_links(config, places, [["stage0", "stage2"]])
    (link,) = [way for way in tied if (way.one, way.other) == ("stage0", "stage2")]
    assert link.carries == ("gradients", "rendezvous")
    assert link.dials == (("stage0", "stage2"), ("stage2", "stage0"))
