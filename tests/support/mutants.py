"""Find out which tests catch which fault: plant one-line mutations of rpcmp one by one.

    python -m tests.support.mutants --seed 1 --count 40 > mutants.jsonl

This draws mutants from the modules that matter most; the same seed and tree give the same mutants.
Each mutant is planted in a copy of the repository. The tests that import the module or are named
after it run first, then all others, up to the first failure. If all pass, either the mutant is no
fault or a test is missing. mutants.md has the results.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.support.places import ROOT

AREAS = {
    "schedules": ("pipelining/schedule.py", "pipelining/simulation.py", "pipelining/cost_model.py"),
    "boundary": ("worker/boundary.py", "worker/forward.py", "worker/requests.py"),
    "backward": ("worker/backward.py", "worker/weight_grad.py"),
    "summing": (
        "worker/bucket_allreduce.py",
        "worker/buckets.py",
        "worker/mailbox.py",
    ),
    "snapshots": (
        "checkpoint/slots.py",
        "checkpoint/stage_state.py",
    ),
    "recovery": ("job/recovery.py", "job/restore_point.py"),
    "checkpoints": ("checkpoint/folder.py", "checkpoint/files.py", "checkpoint/manifest.py"),
    "unpickler": ("rpc/unpickler.py", "net/rpc_pickle.py", "net/rpc_inspection.py"),
    "roles": ("net/identity.py", "net/security.py"),
    "config": (
        "config/cross_checks.py",
        "config/schema.py",
        "config/loader.py",
        "config/job_sections.py",
    ),
    "planning": (
        "pipelining/partition.py",
        "pipelining/calibration.py",
        "pipelining/chain_search.py",
        "pipelining/chain_limits.py",
        "pipelining/replacements.py",
        "pipelining/planner.py",
    ),
    "splitting": (
        "splitting/split.py",
        "splitting/cutting.py",
        "splitting/regions.py",
        "splitting/guards.py",
        "splitting/aliasing.py",
    ),
    "truth": (
        "splitting/proof.py",
        "splitting/side_effects.py",
        "splitting/comparison.py",
        "splitting/sample_proof.py",
        "driver/proof_in_parts.py",
        "driver/sample_check.py",
        "worker/checks/objective.py",
        "worker/state/forward_state.py",
        "worker/checks/inner_gradients.py",
    ),
    "elasticity": (
        "job/membership.py",
        "job/moving_balance.py",
        "job/cuts.py",
        "job/takeover.py",
        "pipelining/rebalancing.py",
    ),
    "devices": (
        "config/device_places.py",
        "server/device_claims.py",
        "pipelining/devices.py",
        "worker/copies.py",
    ),
    "streams": (
        "data/streams.py",
        "data/stream_shares.py",
        "driver/remote_stream.py",
        "driver/step_stream.py",
    ),
    "exit codes": ("cli/hints.py", "cli/progress_output.py", "errors.py"),
    "page": (
        "observability/dashboard/state.py",
        "observability/dashboard/history.py",
    ),
}
"""The modules of rpcmp that are mutated, by subject."""

NEAR_SECONDS = 300.0
"""Seconds for the tests near a module."""

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclass(frozen=True)
class Mutant:
    """A change of one line of one module."""

    area: str
    path: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Verdict:
    """The first test that failed; empty if all passed, or if the mutant was not planted."""

    mutant: Mutant
    caught_by: str
    seconds: float


def mutants_of(area: str, path: Path) -> list[Mutant]:
    """Return all mutants of one module."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found = []
    for node, new in _replacements(ast.parse(source)):
        number, end = node.lineno, node.end_lineno
        if number != end:
            continue
        raw = lines[number - 1].encode()
        changed = (raw[: node.col_offset] + new.encode() + raw[node.end_col_offset :]).decode()
        before = lines[number - 1]
        if before.strip() != changed.strip():
            name = str(path.relative_to(ROOT))
            found.append(Mutant(area, name, number, before.strip(), changed.strip()))
    return found


def _replacements(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield expressions and statements, each with a replacement."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                yield node, _text(left, COMPARISONS[type(op)], right)
            case ast.BoolOp(op=op, values=[left, right]):
                yield node, _text(left, "or" if isinstance(op, ast.And) else "and", right)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, ast.unparse(operand)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield node, _text(left, "-", right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                yield node, _text(left, "+", right)
            case ast.Constant(value=bool(value)):
                yield node, str(not value)
            case ast.Constant(value=int(value)):
                yield node, str(value + 1)
            case ast.IfExp(test=test, body=body, orelse=other):
                swapped = ast.IfExp(test=test, body=other, orelse=body)
                yield node, f"({ast.unparse(swapped)})"
            case ast.Expr(value=ast.Call()):
                yield node, "pass"
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=args) if len(args) > 1:
                yield node.func, "max" if name == "min" else "min"


def _text(left: ast.expr, op: str, right: ast.expr) -> str:
    return f"({ast.unparse(left)} {op} {ast.unparse(right)})"


def drawn(seed: int, count: int) -> list[Mutant]:
    """Draw `count` mutants, equally many per area; the same for the same seed and tree."""
    draw = random.Random(seed)
    by_area = {
        area: [mutant for name in names for mutant in mutants_of(area, ROOT / "rpcmp" / name)]
        for area, names in AREAS.items()
    }
    areas = [area for area in by_area if by_area[area]]
    taken: list[Mutant] = []
    while len(taken) < count:
        pool = [each for each in by_area[areas[len(taken) % len(areas)]] if each not in taken]
        taken.append(draw.choice(pool))
    return taken


def tests_near(module: str, folder: Path) -> list[str]:
    """Return test files that are named after a module, then those that import it."""
    dotted = ".".join(("rpcmp", *Path(module).with_suffix("").parts))
    package, _, name = dotted.rpartition(".")
    imports = re.compile(
        rf"(from {re.escape(dotted)} |import {re.escape(dotted)}\b"
        rf"|from {re.escape(package)} import [^\n]*\b{name}\b)"
    )
    named, importing = [], []
    for path in sorted(folder.rglob("test_*.py")):
        if f"{path.stem}_".startswith(f"test_{name}_"):
            named.append(str(path))
        elif imports.search(text := path.read_text(encoding="utf-8")):
            importing.append(
                ("processes" in text, str(path))
            )  # tests that start processes come last
    return named + [found for _, found in sorted(importing)]


def tried(mutant: Mutant, copy: Path, options: Sequence[str], limit: float) -> Verdict:
    """Plant a mutant in `copy`, run the tests, and remove it again.

    A test that also fails in `copy` without the mutant does not catch it; its name then ends so.
    """
    path = copy / mutant.path
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    alike = [index for index, line in enumerate(lines) if line.strip() == mutant.before]
    if not alike:
        return Verdict(mutant, "", 0.0)
    index = min(alike, key=lambda index: abs(index + 1 - mutant.line))  # the line may have moved
    lines[index] = lines[index].replace(mutant.before, mutant.after)
    path.write_text("".join(lines), encoding="utf-8")
    started = time.monotonic()
    try:
        near = tests_near(mutant.path.removeprefix("rpcmp/"), copy / "tests")
        caught = _failed(copy, [*options, *near, "-n", "0"], NEAR_SECONDS) if near else ""
        if limit and not caught:
            caught = _failed(copy, options, limit)
    finally:
        path.write_text(whole, encoding="utf-8")
    if "::" in caught and _failed(copy, [*options, caught, "-n", "0"], NEAR_SECONDS):
        caught += ", which fails without it"
    return Verdict(mutant, caught, round(time.monotonic() - started, 1))


def _failed(copy: Path, options: Sequence[str], limit: float) -> str:
    """Return the first test that fails, or an empty string if all pass."""
    plugin = ["-p", "tests.support.mutants"]
    command = [sys.executable, "-m", "pytest", *plugin, "-x", "-q", "--timeout", "60", *options]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            output, _ = run.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            output, _ = run.communicate()
            return _first(output) or f"not ended after {limit:.0f} s"
    return _first(output) or ("" if run.returncode in (0, 5) else f"exit code {run.returncode}")


def _first(output: str) -> str:
    """Return the first failed test in the output of pytest."""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.M)
    return failed[1] if failed else ""


def pytest_unconfigure(config: pytest.Config) -> None:
    """Exit once a test has failed: a thread that waits forever would block the exit."""
    session = config.pluginmanager.get_plugin("session")
    if session is not None and session.testsfailed and not hasattr(config, "workerinput"):
        sys.stdout.flush()
        os._exit(1)


def main() -> None:
    """Print one line of JSON per mutant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--limit", type=float, default=1200, help="seconds for all tests; 0: none")
    parser.add_argument("--mutants", type=Path, help="lines of an earlier run, instead of a draw")
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    arguments = parser.parse_args()
    chosen = drawn(arguments.seed, arguments.count)
    if arguments.mutants:
        lines = arguments.mutants.read_text(encoding="utf-8").splitlines()
        chosen = [Mutant(**json.loads(line)["mutant"]) for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rpcmp"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        for mutant in chosen:
            print(
                json.dumps(asdict(tried(mutant, copy, arguments.options, arguments.limit))),
                flush=True,
            )


if __name__ == "__main__":
    main()
