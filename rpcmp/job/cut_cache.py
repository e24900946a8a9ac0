"""Cuts of modules that this user's jobs have made before, so that a second run exports nothing.

    supervisor ──order, and the cut that is kept of this code──> the process that cuts
               <──the key of what it has built, and its cut─────

That process runs the job's code: it neither reads nor writes here, and what it sends is kept for
the same code only. A file counts if it carries this user's MAC, whose key lies elsewhere: others
may be able to write to the folder. Both may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import platform
import secrets
import stat
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from rpcmp.config.files import python_files, read_bytes
from rpcmp.config.schema import Config
from rpcmp.errors import one_line

log = logging.getLogger(__name__)

MAX_KEPT = 64
"""Cuts that are kept; the oldest goes first."""

MAX_BYTES = 48 * 2**20
"""Of a cut: it has to fit into a message to the process that cuts."""

KEY_BYTES = 32
_MAC = hashlib.sha256().digest_size


class CutCache:
    """What is kept for one job's code.

    Args:
        config: names the module, the data, and the code.
    """

    def __init__(self, config: Config) -> None:
        self._name = _code_of(config)
        self._kept: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """Return the key and the cut that were written last; None: there are none to rely on."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            path = self._path()
            data = read_bytes(path, MAX_BYTES)
            mac, text = data[:_MAC], data[_MAC:]
            if hmac.compare_digest(mac, self._mac(text, own_key())):
                os.utime(path)  # it is in use
                self._kept = json.loads(text)
        return self._kept

    def write(self, key: dict[str, Any], cut: dict[str, Any]) -> None:
        """Keep a cut; a folder that cannot be written to costs the next run an export."""
        if self._kept is not None and self._kept["key"] == key:
            return
        text = json.dumps({"key": key, "cut": cut}).encode()
        try:
            path = self._path()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(self._mac(text, own_key()) + text)
            os.replace(file.name, path)
            for old in _by_age(path.parent)[:-MAX_KEPT]:
                old.unlink()
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            log.warning("how the module is cut is not kept for the next run: %s", one_line(error))

    def _path(self) -> Path:
        return _folder("XDG_CACHE_HOME", ".cache") / "cuts" / self._name

    def _mac(self, text: bytes, key: bytes) -> bytes:
        return hmac.digest(key, self._name.encode() + text, "sha256")


def key_file() -> Path:
    """Return where the key of the MACs lies; raises RuntimeError if this user has no home."""
    return _folder("XDG_STATE_HOME", ".local/state") / "cuts.key"


def own_key() -> bytes:
    """Return this user's key, made when it is needed first.

    Raises:
        OSError: it cannot be made or read, or others can read it.
    """
    path = key_file()
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # for this user alone
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            with contextlib.suppress(FileExistsError):  # of another process, and whole
                os.link(file.name, path)
    with path.open("rb") as own:
        status = os.fstat(own.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{path} is not this user's alone: remove it")
        if len(key := own.read()) != KEY_BYTES:
            raise OSError(f"{path} is no key: remove it")
    return key


def _folder(variable: str, below_home: str) -> Path:
    """Return one of the user's folders; raises RuntimeError if this user has no home."""
    given = os.environ.get(variable)
    return (Path(given) if given else Path.home() / below_home) / "rpcmp"


def _code_of(config: Config) -> str:
    """Return a name for the code that a cut is made by, as far as it is known without running it.

    So a job's code cannot leave anything for another's.
    """
    model, data = config.model, config.data
    own = sorted(python_files(config.folder, config.modules))
    known = {
        "versions": [platform.python_version(), *map(metadata.version, ("rpcmp", "torch"))],
        "model": None if model is None else model.model_dump(include={"module", "kwargs", "split"}),
        "data": None if data is None else data.model_dump(include={"train", "collate"}),
        "files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in own],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime)
