"""The manifest, which makes one checkpoint of the files of its stages.

It is written last, so if it exists, everything that it lists was written. It holds a hash of itself
besides the files' hashes: damage by a disk or a copy is detected before a checkpoint is used.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from rpcmp.config.types import Positive, Strict
from rpcmp.errors import MAX_LISTED, CheckpointError

FORMAT: Final = 1
"""The only format that there has been."""

Count = Annotated[int, Field(ge=0)]


class Cursor(Strict):
    """Position in the data: `batch` mini-batches of epoch `epoch` are done."""

    epoch: Positive
    batch: Count


class StageFile(Strict):
    """One stage's part of a checkpoint.

    Attributes:
        file: its name in the step folder; a bare name, so that no manifest leads elsewhere.
        sha256: of the file.
        size: of the file, in bytes.
        host: where the stage wrote it.
        state: learning rates and scheduler, JSON as the stage wrote it.
    """

    name: str
    layers: list[str]
    file: str = Field(pattern=r"^[A-Za-z0-9_-]+\.safetensors$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: Count
    host: str
    state: str


class BestMark(Strict):
    """Marks the best checkpoint of a run up to its step, by the value of a metric."""

    metric: str
    value: float


class Manifest(Strict):
    """A whole checkpoint.

    Attributes:
        format: the manifest's and the files'.
        run: the run's name, which it keeps when it is resumed.
        generation: counts the starts of the run's processes, from 1.
        best: marks the best checkpoint up to this step; the newest that is marked is the best.
        is_asked_for: whether the config asked for it; else the run made it because it had to end.
        rng: the run's seed and the version of the rules by which random numbers are derived (see
            rpcmp.pipelining.random_streams); no generator has a state.
        versions: rpcmp's, torch's and Python's.
        config: the job's, see rpcmp.config.files.
        written: time, in ISO format.
    """

    format: Literal[1] = FORMAT
    job: str
    run: str
    step: Count
    generation: Positive
    cursor: Cursor
    driver: dict[str, JsonValue]
    best: BestMark | None = None
    is_asked_for: bool = True
    rng: dict[str, JsonValue]
    versions: dict[str, str]
    config: dict[str, JsonValue]
    written: str
    stages: list[StageFile]

    @property
    def layers(self) -> list[str]:
        return [layer for stage in self.stages for layer in stage.layers]

    @property
    def files(self) -> list[str]:
        return [stage.file for stage in self.stages]

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        for values in ([stage.name for stage in self.stages], self.files):
            if twice := {value for value, count in Counter(values).items() if count > 1}:
                raise ValueError(f"two stages have {sorted(twice)[0]!r}")
        return self


def dumps(manifest: Manifest) -> str:
    """Return `manifest` as indented JSON, with a hash of itself."""
    data = manifest.model_dump()
    return json.dumps({**data, "sha256": _digest(data)}, indent=2) + "\n"


def loads(text: str | bytes, source: str | Path) -> Manifest:
    """Return the manifest that `dumps` wrote; CheckpointError if it is damaged."""
    data = _parse(text, source)
    # The format comes first: another one may well have another hash.
    if data.get("format") != FORMAT:
        found = data.get("format")
        raise CheckpointError(f"{source} has format {found!r}; this rpcmp reads format {FORMAT}")
    if data.pop("sha256", None) != _digest(data):
        raise CheckpointError(f"{source} is damaged: its content does not match its sha256")
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(map(_explain, error.errors()))
        raise CheckpointError(f"{source} is no manifest of this rpcmp: {problems}") from error


def check_model(manifest: Manifest, layers: Sequence[str]) -> None:
    """Raise CheckpointError unless a checkpoint has these layers, in this order."""
    theirs = manifest.layers
    common = set(theirs) & set(layers)
    differences = [
        *_named("it has no", [name for name in layers if name not in common]),
        *_named("the model has no", [name for name in theirs if name not in common]),
    ]
    if not differences:
        pairs = enumerate(itertools.zip_longest(theirs, layers), start=1)
        differences = [
            f"its layer {number} is {one!r}, the model's is {other!r}"
            for number, (one, other) in pairs
            if one != other
        ][:1]
    if differences:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} of job {manifest.job!r} is of another model: "
            + "; ".join(differences)
        )


def _parse(text: str | bytes, source: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is damaged or cut off, not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{source} is damaged: not a JSON object")
    return data


def _explain(details: ErrorDetails) -> str:
    place = ".".join(map(str, details["loc"]))
    is_unknown = details["type"] == "extra_forbidden"
    what = "unknown key" if is_unknown else details["msg"].removeprefix("Value error, ")
    return f"{place}: {what}" if place else what


def _digest(data: dict[str, Any]) -> str:
    """Return the SHA-256 of canonical JSON: sorted keys, no spaces, ASCII."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _named(what: str, layers: Sequence[str]) -> list[str]:
    names = ", ".join(map(repr, layers[:MAX_LISTED]))
    more = f" and {len(layers) - MAX_LISTED} more" if len(layers) > MAX_LISTED else ""
    return [f"{what} {names}{more}"] if layers else []
