"""A C++ compiler for tests that keeps what it makes: torch's headers take it 12 s of CPU each time.

    CXX=FOLDER/g++ ──> python keptobjects.py FOLDER /usr/bin/g++ ARGUMENTS...
                         ├─ the first time  g++ writes the output, and a copy goes to FOLDER
                         └─ again           the copy is the output

It is again if all options and the contents of all files among the arguments are equal, whatever
the output is called: each job has a folder of its own. So a stage that compiles other code than the
process that it is compared with does not get its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

NAME = "g++"  # torch goes by its name


def install(folder: Path) -> None:
    """Let this process and its children compile by it, unless they have a compiler of their own.

    Args:
        folder: where the compiler is written, and what it makes is kept.
    """
    compiler = shutil.which(NAME)
    if compiler is None or "CXX" in os.environ:
        return
    script = folder / NAME
    command = f'"{sys.executable}" -I -S "{__file__}" "{folder}" "{compiler}"'
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    os.environ["CXX"] = str(script)


def key_of(command: Sequence[str], output: Path) -> str:
    """Return a hash of what the content of a command's output depends on."""
    words = [Path(word) for word in command if word != str(output)]
    parts = [word.read_bytes() if word.is_file() else bytes(word) for word in words]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time make a file."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def output_of(command: Sequence[str]) -> Path | None:
    """Return the file that a command writes, or None if there is none to keep."""
    if "-o" not in command[:-1]:
        return None
    return Path(command[command.index("-o") + 1])


def compile_once(folder: Path, command: Sequence[str], output: Path) -> int:
    """Run a command, or copy what it made before; return its exit code."""
    kept = folder / f"{key_of(command, output)}.o"
    with locked(kept.with_suffix(".lock")):
        if not kept.exists():
            if code := subprocess.run(command).returncode:
                return code
            shutil.copy(output, folder / f"{kept.name}.part")
            (folder / f"{kept.name}.part").rename(kept)  # whole, even if this process is killed
        else:
            shutil.copy(kept, output)
    return 0


def main() -> None:
    """Compile; a confined process, which may not write to the folder, does so by itself."""
    folder, *command = sys.argv[1:]
    output = output_of(command)
    if output is not None:
        with contextlib.suppress(PermissionError):
            raise SystemExit(compile_once(Path(folder), command, output))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
