"""Private keys and secrets of configs: they stay where they are, and appear nowhere else.

The job uses every feature and has faults, so that there are errors and tracebacks as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rpcmp.config.stored import redacted
from rpcmp.net.authority import CA_KEY
from rpcmp.net.identity import KEY
from tests.support.faults import Faults
from tests.support.lan import issue, serving
from tests.support.processes import FORKS, JobFolder, rpcmp, running
from tests.support.sharedforks import children_of

HERE = "127.0.0.1"

WINDOW = 24
"""Number of consecutive characters of a key that must not appear."""

COMMON = 48
"""Number of characters at the start that are the same in all keys of this kind."""


VAULT = """
import zoo

def data(token):
    return zoo.regression(10)

def broken(token):
    raise PermissionError("the token is no good")
"""

CHECKPOINT = """
[checkpoint]
dir = "saved"
every_steps = 2
"""


@dataclass
class Collected:
    """The data that a job makes visible to others.

    Attributes:
        found: the bytes, by the place that they were found at.
    """

    found: dict[str, bytes] = field(default_factory=dict)

    def add(self, where: str, content: bytes) -> None:
        """Add bytes found at a place."""
        self.found[where] = self.found.get(where, b"") + content

    def where(self, part: bytes) -> list[str]:
        """Return the places that contain `part`."""
        return [where for where, content in self.found.items() if part in content]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue(tmp_path_factory.mktemp("certs"), HERE, HERE)


@contextlib.contextmanager
def watching(collected: Collected) -> Iterator[None]:
    """Collect command lines, titles and environments of all started processes until the end."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            for pid in _beneath(os.getpid()):
                _look_at(pid, collected)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _beneath(pid: int) -> Iterator[int]:
    """Yield the ids of a process's descendants."""
    with contextlib.suppress(OSError):  # it has ended
        for child in children_of(pid):
            yield child.pid
            yield from _beneath(child.pid)


def _look_at(pid: int, collected: Collected) -> None:
    for what in ("cmdline", "environ", "comm"):
        with contextlib.suppress(OSError):
            content = Path(f"/proc/{pid}/{what}").read_bytes()
            if content not in collected.found.get(f"{what} of {pid}", b"\n"):
                collected.add(f"{what} of {pid}", content)


def parts_of(path: Path) -> list[bytes]:
    """Return every string that reveals the content of a private key."""
    text = path.read_bytes()
    body = b"".join(text.splitlines()[1:-1])
    key = serialization.load_pem_private_key(text, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    number = key.private_numbers().private_value
    raw = number.to_bytes(32, "big")
    windows = [body[at : at + WINDOW] for at in range(COMMON, len(body) - WINDOW + 1)]
    return [*windows, raw[:16], raw[16:], raw.hex().encode(), str(number).encode()]


@pytest.fixture(scope="module")
def secret() -> str:
    """Return a secret of the config for its own code, such as a token to download data."""
    return secrets.token_urlsafe(30)


@pytest.mark.cluster
def test_a_job_with_a_fault_leaks_no_secret(
    certs: Path,
    job: JobFolder,
    secret: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All output and files are searched for keys and for secrets of the config.

    The first run starts a fork server of its own, so that its arguments are searched as well.
    """
    faults = Faults(job).fail_at(1, 3, "SIGKILL", "backward").fail_at(0, 4, "exception", "forward")
    config = faults.config(stages=2)
    test = f'test = {{ callable = "snapshot_store:data", kwargs = {{ token = "{secret}" }} }}'
    config.write_text(f"{config.read_text()}\n{test}\n{CHECKPOINT}")
    (job.folder / "snapshot_store.py").write_text(VAULT)
    collected = Collected()
    trace = tmp_path / "trace.json"
    free = ["--no-confine"]  # a fault writes a marker file
    with (
        watching(collected),
        serving(0, f"{HERE}:0", certs, options=free) as first,
        serving(1, f"{HERE}:0", certs, options=free) as second,
    ):
        where = ("--connect", f"{first.address},{second.address}", "--certs", certs / "driver")
        with monkeypatch.context() as patch:
            patch.setattr(FORKS, "in_use", False)
            with running("drive", config, *where, "--json", "--trace", trace) as run:
                whole = run.wait()
        for command, result in {
            "drive": whole,
            "drive on": rpcmp("drive", config, *where, "-v", "--resume"),
            "status": rpcmp("status", config, *where),
        }.items():
            assert result.code == 0, result.err
            collected.add(f"output of {command}", (result.out + result.err).encode())
        assert len(faults.triggered) == 2
    for server in (first, second):
        output = "".join([*server.run.out, *server.run.err])
        collected.add(f"output of the server at {server.address}", output.encode())
    collected.add("trace", trace.read_bytes())
    for manifest in job.folder.glob("saved/**/*"):
        if manifest.is_file():
            collected.add(str(manifest), manifest.read_bytes())
    assert_complete(collected)
    keys = [certs / CA_KEY, *(certs / name / KEY for name in ("stage0", "stage1", "driver"))]
    for part in (*(part for key in keys for part in parts_of(key)), secret.encode()):
        assert collected.where(part) == []


def assert_complete(collected: Collected) -> None:
    """Check that every place contains data, without which the search would prove nothing."""
    for kind in ("rpcmp.worker", "rpcmp.driver", "rpcmp.process", "serve", "drive"):
        assert [where for where in collected.where(kind.encode()) if "cmdline" in where], kind
    assert collected.where(b"planted")
    assert [where for where in collected.found if where.endswith("manifest.json")]
    assert json.loads(collected.found["trace"])


def test_an_error_of_user_code_does_not_repeat_its_arguments(job: JobFolder, secret: str) -> None:
    (job.folder / "snapshot_store.py").write_text(VAULT)
    config = job.config(f"""
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        [data]
        train = {{ callable = "snapshot_store:broken", kwargs = {{ token = "{secret}" }} }}
    """)
    result = rpcmp("drive", config, "-v")
    assert result.code == 2
    assert "the token is no good" in result.err
    assert secret not in result.out + result.err


def test_a_manifest_holds_only_hashes_of_arguments() -> None:
    given = {
        "name": "job",
        "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.1, "mode": "secret"}},
        "stages": [
            {"device": "cpu", "optimizer": {"mode": "secret"}, "scheduler": {"key": "secret"}},
            {"optimizer": {"callable": "m:Own", "kwargs": {"mode": "secret"}}},
        ],
    }
    hashed = redacted(given)
    assert "secret" not in str(hashed)
    assert (hashed["name"], hashed["optimizer"]["callable"]) == ("job", "torch.optim:SGD")
    assert hashed["stages"][0]["device"] == "cpu"
    assert hashed["optimizer"]["kwargs"]["mode"] == hashed["stages"][0]["optimizer"]["mode"]
    assert hashed["stages"][1]["optimizer"]["callable"] == "m:Own"
    assert redacted(hashed) == hashed
