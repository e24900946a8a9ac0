"""Where the tests of a module are: a newcomer finds them by its path.

    rpcmp/worker/backward.py    tests/unit/worker/test_backward.py
    rpcmp/cli/health.py         tests/cli/test_health.py

A module that has none of its own is listed here, below the test that fails when it is wrong. The
list may only shrink: a new module brings its test. A test in tests/unit that is no one module's own
is listed as well, with what it is of.
"""

from __future__ import annotations

from tests.support.places import PACKAGE, TESTS

MOST = 261
"""Modules without a test of their own; to be lowered with their number, and never raised."""

ELSEWHERE = {
    "cli/test_completion.py": "cli/completing",
    "cli/test_doctor.py": """
        cli/findingtable doctor/checkup examination/host examination/process job/dialing
        server/doctor
    """,
    "cli/test_explain.py": "cli/explanation explain/explanation explain/gather",
    "cli/test_health.py": "control/probe",
    "cli/test_remedy.py": "cli/confidential cli/failed cli/options",
    "cli/test_report.py": "cli/runtable",
    "cli/test_trace.py": "cli/sharetable",
    "cluster/test_balance_auto.py": """
        errand job/balancing job/calls job/hostprofiles job/sharing job/visit
        profile/process server/profiling
    """,
    "cluster/test_believed.py": "job/outputs server/stream",
    "cluster/test_bench.py": """
        bench/peers/group bench/peers/oneprocess bench/peers/process bench/peers/stagetimes
        bench/peers/torchpipelining
    """,
    "cluster/test_drive.py": "cli/drive control/way driver/process job/drive store",
    "cluster/test_faults.py": "worker/process",
    "cluster/test_front.py": "server/doors",
    "cluster/test_hosts.py": """
        job/fleet job/localservers server/mirror server/saving server/snapshots server/vault
    """,
    "cluster/test_launch.py": "driver/calls job/background job/service",
    "cluster/test_leftovers.py": "job/beginning",
    "cluster/test_openmetrics.py": "openmetrics/server server/vitals",
    "cluster/test_output_lost.py": "process/signals",
    "cluster/test_recovery.py": "job/run process/heartbeat worker/snapshots",
    "cluster/test_resume.py": "job/begin job/checkpoints job/resume",
    "cluster/test_roles.py": "server/peers",
    "cluster/test_run_log.py": "job/heardlines",
    "cluster/test_secrets.py": "checkpoint/redaction",
    "cluster/test_segments.py": "job/segments",
    "cluster/test_servers.py": """
        cli/drain cli/serve cli/status cli/table control/storeproxy job/drain job/session
        job/stages job/status server/claim server/control server/rendezvous server/serve
        server/server
    """,
    "cluster/test_tunnel.py": "wire/tunnel",
    "cluster/test_verify.py": "cli/verify reference/process",
    "group/test_bits.py": """
        driver/group driver/planning driver/workers worker/conductor worker/inputs worker/stage
    """,
    "group/test_optimizers.py": "driver/optimizer",
    "group/test_replicas.py": "driver/replicas worker/replication worker/together",
    "group/test_ties.py": "worker/ties",
    "system/test_deploy.py": "server/notify",
    "system/test_examples.py": """
        examples/branches examples/encoder_decoder examples/hybrid_devices examples/llama
        examples/residual_ddp examples/resnet50 examples/stdlib_gpt examples/two_parts
        examples/two_towers examples/unet
    """,
    "system/test_page.py": "cli/ui",
    "test_readme.py": "configdoc",
    "unit/balance/test_balance.py": "balance/cuts balance/prediction balance/profile",
    "unit/bench/test_cases.py": """
        bench/lineup bench/models bench/peers/order bench/peers/part bench/pipeline
    """,
    "unit/bench/test_limits.py": "bench/benchmark bench/contestant",
    "unit/bench/test_rounds.py": "bench/report",
    "unit/bench/test_statistics.py": "bench/bound",
    "unit/checkpoint/test_checkpoint.py": "checkpoint/manifest checkpoint/runs",
    "unit/checkpoint/test_export.py": "checkpoint/ranges cli/export",
    "unit/checkpoint/test_inside.py": "checkpoint/files checkpoint/folder",
    "unit/cli/test_output.py": "cli/bestlines cli/terminal evaluated",
    "unit/doctor/test_diagnosis.py": """
        doctor/finding doctor/links doctor/orders doctor/seen examination/facts
        examination/folder
    """,
    "unit/driver/test_draws.py": "driver/datasets",
    "unit/driver/test_earlystopping.py": "direction driver/best",
    "unit/driver/test_evaluation.py": "sums",
    "unit/driver/test_progress.py": "driver/saves",
    "unit/driver/test_training.py": """
        driver/clocks driver/evaluator driver/rounds driver/stepevent driver/steps
        driver/tracer
    """,
    "unit/examination/test_code.py": "pythonfiles",
    "unit/explain/test_explain.py": """
        explain/files explain/memory explain/picture explain/stage explain/ways
    """,
    "unit/inventory/test_inventory.py": """
        inventory/count inventory/facts inventory/process profile/memory
    """,
    "unit/job/test_log.py": "process/channel",
    "unit/job/test_opening.py": "job/stamp",
    "unit/logs/test_logs.py": """
        logs/capture logs/display logs/entry logs/fold logs/line logs/receiver logs/sender
        logs/streams server/loglines
    """,
    "unit/observers/test_loggers.py": "cli/log cli/observing",
    "unit/observers/test_tensorboard.py": "observers/tensorboardfile",
    "unit/observers/test_watch.py": "observers/observer",
    "unit/openmetrics/test_run.py": "openmetrics/store openmetrics/tally",
    "unit/page/test_server.py": "page/app page/guard page/place",
    "unit/page/test_state.py": """
        cli/faultlines page/assets page/entries page/report page/series page/timeline
        page/values page/workers runfolder/tables
    """,
    "unit/process/test_activity.py": "process/pulse sealed",
    "unit/process/test_confinement.py": "process/capabilities process/landlock process/network",
    "unit/process/test_forking.py": "logs/output process/interpreter",
    "unit/process/test_traffic.py": "process/links process/tcp process/usage",
    "unit/profile/test_host.py": "profile/layer",
    "unit/reference/test_training.py": """
        reference/precision reference/replicas reference/ties verify
    """,
    "unit/runfolder/test_compare.py": "runfolder/figures runfolder/reader tablekeys",
    "unit/runfolder/test_writer.py": "runfolder/layout runfolder/thinning",
    "unit/server/test_codefolder.py": "scratch",
    "unit/snapshot/test_state.py": "snapshot/memory snapshot/writer",
    "unit/test_config.py": "sections",
    "unit/test_configfile.py": "configrules",
    "unit/test_factory.py": "kinds suggestion",
    "unit/test_handoff.py": "tensorfile",
    "unit/test_names.py": "weights",
    "unit/test_payload.py": "work",
    "unit/test_plan.py": "inflight setting",
    "unit/test_source.py": "members worker/slices",
    "unit/test_split.py": "additions",
    "unit/test_torch_contract.py": "process/listeners",
    "unit/test_unpickling.py": "worker/memory",
    "unit/test_visible.py": "cli/console",
    "unit/trace/test_bottleneck.py": "trace/causes trace/path",
    "unit/trace/test_chrome.py": "trace/elements trace/events trace/spans",
    "unit/trace/test_diagram.py": "trace/window",
    "unit/trace/test_shares.py": "trace/idle",
    "unit/trace/test_timeline.py": "driver/follower",
    "unit/tune/test_tune.py": """
        tune/curve tune/grid tune/halving tune/report tune/runner tune/series tune/sweep
    """,
    "unit/wire/test_budget.py": "process/descriptors",
    "unit/wire/test_inspection.py": "wire/rpcformat wire/rpcpickle",
    "unit/wire/test_localpeer.py": "process/holders wire/front wire/inner",
    "unit/wire/test_measure.py": "wire/end",
    "unit/wire/test_relay.py": "wire/dialer",
    "unit/wire/test_revocation.py": "wire/permits wire/record wire/watching",
    "unit/wire/test_security.py": """
        cli/certs wire/authority wire/certificate wire/role wire/safefile
    """,
    "unit/wire/test_splice.py": "wire/session",
    "unit/worker/test_backward.py": "worker/failure worker/missing",
    "unit/worker/test_feed.py": "worker/loaders worker/loading",
    "unit/worker/test_following.py": "worker/bits worker/board",
    "unit/worker/test_optimizerstate.py": """
        worker/hiddenstate worker/model worker/rehearsal worker/renewal
    """,
    "unit/worker/test_summing.py": "worker/buckets worker/readiness",
}
"""Modules without a test of their own, by the test that proves them."""

PROVED_BY = {module: test for test, names in ELSEWHERE.items() for module in names.split()}


def all_modules() -> list[str]:
    """Those of rpcmp that need a test, as "worker/backward"."""
    return [
        str(path.relative_to(PACKAGE).with_suffix(""))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
        and not {"v1", "starter"} & {part.name for part in path.parents}
    ]


def own_test(module: str) -> str:
    """Where a module's test would be; of a command it is beside those of other commands."""
    folder, _, name = module.rpartition("/")
    if folder == "cli" and (TESTS / "cli" / f"test_{name}.py").exists():
        return f"cli/test_{name}.py"
    return "/".join(("unit", *folder.split("/"), f"test_{name}.py")).replace("//", "/")


def test_every_module_has_its_test_or_is_listed() -> None:
    without = [m for m in all_modules() if not (TESTS / own_test(m)).exists()]
    assert sorted(without) == sorted(PROVED_BY), "see ELSEWHERE: it may only shrink"
    assert len(PROVED_BY) <= MOST


def test_every_module_is_listed_once_below_a_test_that_exists() -> None:
    listed = [module for names in ELSEWHERE.values() for module in names.split()]
    assert len(listed) == len(set(listed))
    assert [test for test in ELSEWHERE if not (TESTS / test).exists()] == []


OF_SEVERAL = {
    "balance/test_balance.py": "a balance as a whole: how it is measured, predicted and chosen",
    "checkpoint/test_checkpoint.py": "a checkpoint on disk, which its modules write together",
    "explain/test_explain.py": "what the modules of rpcmp/explain say in one picture",
    "inventory/test_inventory.py": "what is counted, against the model that is built",
    "logs/test_logs.py": "a line of text on its way through the modules of rpcmp/logs",
    "openmetrics/test_grafana.py": "the dashboard in deploy/, which is no module",
    "test_torch_contract.py": "what rpcmp relies on in torch, which is no module of ours",
    "tune/test_tune.py": "a search as a whole, for which the modules of rpcmp/tune work together",
}
"""Tests in tests/unit that are not called like a module of rpcmp in their place, and of what."""


def test_unit_mirrors_the_package() -> None:
    found = {path.relative_to(TESTS / "unit") for path in TESTS.glob("unit/**/test_*.py")}
    of_one = {own_test(module).removeprefix("unit/") for module in all_modules()}
    assert {str(path) for path in found} - of_one == set(OF_SEVERAL), "see OF_SEVERAL"
    assert [path for path in found if not (PACKAGE / path.parent).is_dir()] == []
