"""A checkpoint's model as one file that plain torch loads, without rpcmp.

The tensors' bytes are copied from the stages' files as they are: the model may be larger than
memory, and nothing here needs torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rpcmp.checkpoint import safetensors_header
from rpcmp.checkpoint.files import check, write_durably
from rpcmp.checkpoint.folder import MANIFEST, FoundCheckpoint, look, newest_in, step_of
from rpcmp.checkpoint.manifest import Manifest, StageFile
from rpcmp.checkpoint.safetensors_header import Header, TensorRange
from rpcmp.config.types import COPY
from rpcmp.errors import CheckpointError, ConfigError

MODEL = "model."
"""Prefix of the model's tensors in a stage's file."""


@dataclass(frozen=True)
class ExportSummary:
    """The result of `export`; `skipped` are problems of newer checkpoints, a line each."""

    step: int
    num_tensors: int
    num_elements: int
    size: int
    manifest: Manifest
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor, and the open file that it lies in."""

    stage: str
    path: Path
    file: BinaryIO
    tensor: TensorRange


def export(
    source: Path, target: Path, best: bool = False, tied_once: bool = False
) -> ExportSummary:
    """Write the model of a checkpoint to `target`, all or nothing.

    Args:
        source: a checkpoint folder, a run's folder in it, or one step folder. The newest checkpoint
            of the run that wrote last is taken, if it is whole and all of its files are here;
            otherwise the one before it.
        target: the safetensors file to write.
        best: take the checkpoint that is marked as the best; if it is damaged, take no other.
        tied_once: write tied parameters under their first name alone, with the other names in the
            metadata as `safetensors.torch.save_model` does; else under each name.

    Raises:
        CheckpointError: there is no such checkpoint; names the problem of each that was found.
        ConfigError: `target` cannot be written.
    """
    _require_valid_target(target)
    skipped: list[str] = []
    for found in _best(source) if best else _candidates(source):
        problems = [found.problem] if found.manifest is None else verify(found.path, found.manifest)
        if found.manifest and not problems:
            return _export(found.path, found.manifest, target, tuple(skipped), tied_once)
        skipped += problems
    raise CheckpointError("\n  ".join([f"no checkpoint in {source} can be exported:", *skipped]))


def verify(step_folder: Path, manifest: Manifest) -> list[str]:
    """Return the problems of a checkpoint's files, a line each; reads all of them."""
    return [line for stage in manifest.stages if (line := _verify(step_folder / stage.file, stage))]


def _verify(path: Path, stage: StageFile) -> str:
    try:
        state = check(path, stage.sha256, stage.size)
    except OSError as error:
        return f"{path} of stage {stage.name!r} cannot be read: {error.strerror}"
    if state == "missing":
        return (
            f"{path} is missing: stage {stage.name!r} wrote it on host {stage.host}; copy it here "
            "first"
        )
    return f"{path} of stage {stage.name!r} is damaged" if state == "damaged" else ""


def _require_valid_target(target: Path) -> None:
    """Fail before the files are read and hashed, not after."""
    if not target.parent.is_dir():
        raise ConfigError(f"cannot write {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise ConfigError(f"cannot write {target}: it is a folder")
    if (target.parent / MANIFEST).exists():
        raise ConfigError(f"cannot write {target}: {target.parent} is a checkpoint; leave it whole")


def _candidates(source: Path) -> list[FoundCheckpoint]:
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}")
    # A copy of a step folder may have any name.
    found = look(source)
    if found is None and step_of(source.resolve()) is not None:
        raise CheckpointError(f"{source} has no {MANIFEST}: the checkpoint was never completed")
    if found is not None:
        return [found]
    run = newest_in(source)
    if run is None:
        raise CheckpointError(f"{source} holds no checkpoint")
    return run.found


def _best(source: Path) -> list[FoundCheckpoint]:
    for found in _candidates(source):
        if found.manifest is None:
            raise CheckpointError(f"{found.problem}; it may have been the best: remove it")
        if found.manifest.best is not None:
            return [found]
    raise CheckpointError(
        f"no checkpoint in {source} is marked as the best: set `best` in [checkpoint] for that"
    )


def _export(
    step_folder: Path,
    manifest: Manifest,
    target: Path,
    skipped: tuple[str, ...],
    tied_once: bool,
) -> ExportSummary:
    with contextlib.ExitStack() as stack:
        sources: dict[str, _StoredTensor] = {}
        for stage in manifest.stages:
            for name, tensor in _tensors(step_folder / stage.file, stage.name, stack):
                if name in sources:
                    names = f"{sources[name].stage!r} and {stage.name!r}"
                    raise CheckpointError(f"{step_folder}: stages {names} both have {name!r}")
                sources[name] = tensor
        metadata = {"format": "pt", "step": str(manifest.step)}
        tied = _tied_to(manifest, sources)
        if tied_once:
            metadata |= tied
        else:
            sources |= {name: sources[first] for name, first in tied.items()}
        ordered = safetensors_header.aligned(
            {name: source.tensor for name, source in sources.items()}
        )
        chunks = _chunks(Header(ordered).encode(metadata), [sources[name] for name in ordered])
        try:
            written = write_durably(target, chunks, mode=0o666)  # its user named it
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    return ExportSummary(
        step=manifest.step,
        num_tensors=len(ordered),
        num_elements=sum(tensor.num_elements for tensor in ordered.values()),
        size=written.size,
        manifest=manifest,
        skipped=skipped,
    )


def _tied_to(manifest: Manifest, sources: Mapping[str, _StoredTensor]) -> dict[str, str]:
    tied = manifest.config.get("tied")
    groups = tied if isinstance(tied, list) else []
    found: dict[str, str] = {}
    for group in groups:
        names = [name for name in group if isinstance(name, str)] if isinstance(group, list) else []
        found |= {name: names[0] for name in names[1:] if names[0] in sources}
    found |= {n: own for n, own in _aliases(manifest, found).items() if own in sources}
    return {n: first for n, first in found.items() if n not in sources and COPY not in n}


def _aliases(manifest: Manifest, tied: Mapping[str, str]) -> dict[str, str]:
    """Return the stored name of what a `module` has by further names, which no layer has."""
    cut = manifest.config.get("cut")
    aliases = cut.get("aliases") if isinstance(cut, dict) else None
    found: dict[str, str] = {}
    for own, names in (aliases if isinstance(aliases, dict) else {}).items():
        given = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        found |= dict.fromkeys(given, tied.get(own, own))
    return found


def _tensors(
    path: Path, stage: str, stack: contextlib.ExitStack
) -> Iterator[tuple[str, _StoredTensor]]:
    """Yield the model's tensors in a stage's file, which stays open as long as `stack`.

    An open file can be read to its end even if a run that goes on removes the checkpoint.
    """
    try:
        file = stack.enter_context(path.open("rb"))
        tensors = safetensors_header.read_ranges(file, path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    for name, tensor in tensors.items():
        if name.startswith(MODEL):
            yield name.removeprefix(MODEL), _StoredTensor(stage, path, file, tensor)


def _chunks(header: bytes, sources: list[_StoredTensor]) -> Iterator[bytes]:
    yield header
    for source in sources:
        yield from safetensors_header.blocks(source.file, source.tensor, source.path)
