"""The JobSet is valid to the last key, as restricted as pods can be, and consistent."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pydantic
import pytest
import yaml
from cloudcoil.models.cert_manager import v1 as cert_manager
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

import rpcmp
from rpcmp.config.addresses import default_port, parse
from rpcmp.net import identity
from rpcmp.net.identity import KEY, require_private
from rpcmp.server.stage_server import DRAIN_SECONDS
from tests.support.commandlines import config_of, instructions, parsed
from tests.support.places import DEPLOY

MANIFEST = DEPLOY / "kubernetes.yaml"

VERSION = "1.37"

STAGES = ("stage0", "stage1", "stage2")

Resource = dict[str, Any]

MODELS: dict[str, type[pydantic.BaseModel]] = {
    "jobset.x-k8s.io/v1alpha2": JobsetV1alpha2JobSet,
    "cert-manager.io/v1 Issuer": cert_manager.Issuer,
    "cert-manager.io/v1 Certificate": cert_manager.Certificate,
}
"""Kinds that are not part of Kubernetes itself."""

REJECTIONS = (kubernetes_validate.ValidationError, pydantic.ValidationError)


def load() -> list[Resource]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def validate(resource: Resource) -> None:
    """Check a manifest as the API server does, which rejects unknown keys.

    Raises:
        REJECTIONS: it is rejected.
    """
    version, kind = resource["apiVersion"], resource["kind"]
    model = MODELS.get(version) or MODELS.get(f"{version} {kind}")
    if model is None:
        kubernetes_validate.validate(resource, VERSION, strict=True)
        return
    rest = copy.deepcopy(resource)
    if kind == "JobSet":  # Kubernetes' own schemas check the contents of its templates
        for one in rest["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}}
            kubernetes_validate.validate({**job, **one.pop("template")}, VERSION, strict=True)
            one["template"] = {}
    model.model_validate(rest, extra="forbid", by_alias=True, by_name=False)


RESOURCES = load()


def named(kind: str) -> dict[str, Resource]:
    """Return all resources of a kind by name."""
    return {one["metadata"]["name"]: one for one in RESOURCES if one["kind"] == kind}


@pytest.fixture
def job_set() -> Resource:
    (found,) = named("JobSet").values()
    return found


def jobs(job_set: Resource) -> dict[str, Resource]:
    """Return the specs of a JobSet's jobs by name."""
    return {one["name"]: one["template"]["spec"] for one in job_set["spec"]["replicatedJobs"]}


def pods(job_set: Resource) -> dict[str, Resource]:
    """Return the templates of a JobSet's pods by job."""
    return {name: job["template"] for name, job in jobs(job_set).items()}


def container(pod: Resource) -> Resource:
    (found,) = pod["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def host(job_set: Resource, stage: str) -> str:
    """Return the host name of a job's pod."""
    assert job_set["spec"]["network"]["enableDNSHostnames"] is True
    return f"{job_set['metadata']['name']}-{stage}-0-0.{job_set['spec']['network']['subdomain']}"


def fits(selector: Resource, labels: dict[str, str]) -> bool:
    assert set(selector) == {"matchLabels"}
    return bool(selector["matchLabels"].items() <= labels.items())


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda one: one["metadata"]["name"])
def test_every_resource_is_valid(resource: Resource) -> None:
    """With an unknown key it is refused."""
    validate(resource)
    is_in = resource["metadata"].get("namespace", resource["metadata"]["name"])
    assert is_in in named("Namespace")
    with pytest.raises(REJECTIONS):
        validate({**resource, "specs": {}})


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one["spec"].update(sucessPolicy={}),
        lambda one: one["spec"]["replicatedJobs"][0].update(replica=1),
        lambda one: one["spec"]["replicatedJobs"][0]["template"]["spec"].update(backofLimit=1),
        lambda one: container(pods(one)["stage0"]).update(livenesProbe={}),
    ],
)
def test_a_misspelled_key_of_a_job_set_is_detected(
    job_set: Resource, change: Callable[[Resource], None]
) -> None:
    broken = copy.deepcopy(job_set)
    change(broken)
    with pytest.raises(REJECTIONS):
        validate(broken)


def test_the_pods_meet_the_restricted_standard(job_set: Resource) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    (namespace,) = named("Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    allowed = {"emptyDir", "persistentVolumeClaim", "secret"}
    user = dict(instructions(DEPLOY / "Dockerfile"))["USER"]
    for pod in pods(job_set).values():
        spec, one = pod["spec"], container(pod)
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert all(set(volume) - {"name"} <= allowed for volume in spec["volumes"])
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is False
        assert {"cpu", "memory"} <= set(one["resources"]["requests"])
        assert "memory" in one["resources"]["limits"]
        assert one["image"] == f"rpcmp:{rpcmp.__version__}"


def test_the_driver_reaches_three_stages_at_the_default_port(job_set: Resource) -> None:
    drive = parsed(container(pods(job_set)["driver"])["args"])
    config = config_of(drive)
    port = default_port(0)
    assert config.num_stages == len(STAGES)
    assert [parse(address) for address in drive["connect"].split(",")] == [
        (host(job_set, stage), port) for stage in STAGES
    ]
    for index, stage in enumerate(STAGES):
        one = container(pods(job_set)[stage])
        serve = parsed(one["args"])
        assert (serve["command"], int(serve["stage"])) == ("serve", index)
        assert parse(serve["listen"]) == ("0.0.0.0", port)
        assert [exposed["containerPort"] for exposed in one["ports"]] == [port]


def test_probes_present_the_pods_certificate_and_know_its_name(job_set: Resource) -> None:
    for stage in STAGES:
        one = container(pods(job_set)[stage])
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            program, *command = one[kind]["exec"]["command"]
            health = parsed(command)
            assert (program, health["command"]) == ("rpcmp", "health")
            assert health["server_name"] == host(job_set, stage)
            assert health["certs"] == parsed(one["args"])["certs"]
            assert one[kind]["timeoutSeconds"] > 2, "it has to outlive the command's own limit"
        alive = one["livenessProbe"]
        assert alive["periodSeconds"] * alive["failureThreshold"] > DRAIN_SECONDS
        assert pods(job_set)[stage]["spec"]["terminationGracePeriodSeconds"] > DRAIN_SECONDS


def test_each_pod_has_its_own_certificate_and_no_other(job_set: Resource) -> None:
    certificates, issuers = named("Certificate"), named("Issuer")
    for name, pod in pods(job_set).items():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {one["mountPath"]: volumes[one["name"]] for one in container(pod)["volumeMounts"]}
        (secret,) = [volume["secret"] for volume in volumes.values() if "secret" in volume]
        assert mounts[parsed(container(pod)["args"])["certs"]]["secret"] == secret
        (spec,) = [
            one["spec"]
            for one in certificates.values()
            if one["spec"]["secretName"] == secret["secretName"]
        ]
        found = identity.find(spec["uris"])
        assert found == (
            identity.DRIVER if name == "driver" else identity.stage(STAGES.index(name))
        )
        assert spec.get("dnsNames", []) == ([] if name == "driver" else [host(job_set, name)])
        assert {"server auth", "client auth"} <= set(spec["usages"])
        assert (spec["privateKey"]["algorithm"], spec["privateKey"]["size"]) == ("ECDSA", 256)
        authority = issuers[spec["issuerRef"]["name"]]["spec"]["ca"]["secretName"]
        (root,) = [one["spec"] for one in certificates.values() if one["spec"].get("isCA")]
        assert root["secretName"] == authority
        assert "selfSigned" in issuers[root["issuerRef"]["name"]]["spec"]


def test_rpcmp_accepts_the_mounted_keys(
    job_set: Resource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / KEY
    key.write_text("")
    for pod in pods(job_set).values():
        spec = pod["spec"]
        (secret,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        key.chmod(secret["defaultMode"])
        assert secret["defaultMode"] & 0o040, "the group has to read it"
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
        user = spec["securityContext"]["runAsUser"]
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        require_private(key)  # root's, as this test


def test_only_the_job_reaches_the_stages_and_nothing_the_driver(job_set: Resource) -> None:
    policies = [one["spec"] for one in named("NetworkPolicy").values()]
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(job_set).items()}
    for name in labels:
        mine = [one for one in policies if fits(one["podSelector"], labels[name])]
        assert {kind for one in mine for kind in one["policyTypes"]} == {"Ingress", "Egress"}
        let_in = [rule for one in mine for rule in one.get("ingress", [])]
        if name == "driver":
            assert let_in == []
            continue
        (rule,) = let_in
        assert rule["ports"] == [{"protocol": "TCP", "port": default_port(0)}]
        (source,) = rule["from"]
        assert set(source) == {"podSelector"}, "pods of other namespaces are not of this job"
        assert all(fits(source["podSelector"], other) for other in labels.values())
        assert not fits(source["podSelector"], {"app.kubernetes.io/name": "rpcmp"})


def test_pods_may_reach_the_stages_and_dns(job_set: Resource) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(job_set).items()}
    rules = [
        rule for one in named("NetworkPolicy").values() for rule in one["spec"].get("egress", [])
    ]
    to_pods = [rule for rule in rules if "to" in rule]
    (to,) = to_pods[0]["to"]
    assert [name for name in labels if fits(to["podSelector"], labels[name])] == list(STAGES)
    assert to_pods[0]["ports"] == [{"protocol": "TCP", "port": default_port(0)}]
    (names,) = [rule for rule in rules if "to" not in rule]
    assert {port["port"] for port in names["ports"]} == {53}


def test_a_lost_stage_returns_under_its_name_and_the_job_ends_with_its_driver(
    job_set: Resource,
) -> None:
    spec = job_set["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["driver"]}
    order = [one["name"] for one in spec["replicatedJobs"]]
    assert order == [*STAGES, "driver"]
    for before, one in zip(order, spec["replicatedJobs"][1:], strict=False):
        assert one["dependsOn"] == [{"name": before, "status": "Ready"}]
    for name, job in jobs(job_set).items():
        assert (job["parallelism"], job["completions"]) == (1, 1), "its pod is number 0"
        restarts = "Never" if name == "driver" else "OnFailure"
        assert job["template"]["spec"]["restartPolicy"] == restarts
    rules = jobs(job_set)["driver"]["podFailurePolicy"]["rules"]
    (final,) = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"]
    assert final == [1, 2], "75 and what a signal ends are tried again"
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["targetReplicatedJobs"] == ["driver"]


def test_checkpoints_are_on_a_volume_that_all_pods_write_to(job_set: Resource) -> None:
    config = config_of(parsed(container(pods(job_set)["driver"])["args"]))
    assert config.checkpoint is not None
    assert config.checkpoint.shared
    ((claim, volume),) = named("PersistentVolumeClaim").items()
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(job_set).values():
        paths = {one["name"]: one["mountPath"] for one in container(pod)["volumeMounts"]}
        assert "/tmp" in paths.values()
        (name,) = [
            one["name"]
            for one in pod["spec"]["volumes"]
            if one.get("persistentVolumeClaim") == {"claimName": claim}
        ]
        assert Path(config.checkpoint.dir).is_relative_to(paths[name])
