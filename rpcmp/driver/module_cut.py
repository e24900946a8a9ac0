"""Cut the `module` of a [model] into layers, before a run: a task for a process of its own.

    first mini-batch ──two samples or so──> rpcmp.splitting ──> ModelCut, for the config

What the module is called with is known from the data. An export takes seconds and depends on the
code, the arguments, the versions of what is imported, and the sample: with the same it is done
once. The supervisor keeps it, see `rpcmp.job.cut_cache`: this process runs the job's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.config import files, importing
from rpcmp.config.job_sections import ModelConfig, ModelCut, Passing
from rpcmp.config.schema import Config
from rpcmp.config.types import COPY
from rpcmp.data.batches import Loaded
from rpcmp.data.loading import training_batches
from rpcmp.driver.module_proof import prove_cut
from rpcmp.errors import ConfigError, one_line, some_of, suggest
from rpcmp.pipelining import pytree
from rpcmp.pipelining.split_layers import build_skeleton, unpacked
from rpcmp.process.channel import Message
from rpcmp.splitting.building import names_in_init
from rpcmp.splitting.exporting import BY_HAND, as_returned, restore
from rpcmp.splitting.recording import recorded
from rpcmp.splitting.side_effects import OWN_FIELDS, is_users, users_modules
from rpcmp.splitting.split import Split, split_module
from rpcmp.splitting.weights import tensors_of
from rpcmp.worker.model import AUTOCAST_DTYPES

log = logging.getLogger(__name__)

SECONDS_OF_A_PROOF = 20.0
"""That a proof may take if the export has taken less; most take a tenth of an export's."""

LABELS = ("labels", "label", "label_ids")
"""Parts of a batch that a model could take, and would compute a loss of its own with."""

SAMPLES = (3, 5, 7, 2, 4, 6)
"""Numbers of samples to cut with: one that no other size has, which would be taken for the same."""


def cut(message: Message) -> Iterator[Message]:
    """Task: cut the module."""
    folder = Path(message["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(message["config"]).with_folder(folder)
    with read_environment() as read:
        key, cut = cut_module(config, message["kept"])
    yield {"event": "cut", "key": {"code": key, "environment": read}, "cut": cut.model_dump()}


def cut_module(config: Config, kept: Mapping[str, Any] | None = None) -> tuple[str, ModelCut]:
    """Cut the config's module; returns what the cut depends on, as a hash, and the cut.

    Args:
        kept: the "key" and the "cut" that the task has answered with before; the same is returned
            for the same code and environment.

    Raises:
        ConfigError: it cannot be built or cut, or does not take the batch.
    """
    model = config.model
    assert model is not None
    batches = training_batches(config, "cutting the model's `module`")
    try:
        loaded = batches.first()
    finally:
        batches.close()
    module = build_skeleton(config)
    inputs = inputs_of(module, model, loaded)
    count = _sample_count(inputs)
    sample = few_samples(inputs, count)
    key = _key(config, model, module, sample)
    cut = None if kept is None or not _is_of(kept["key"], key) else _known(kept["cut"])
    if cut is None:
        autocast, started = AUTOCAST_DTYPES.get(config.autocast or ""), time.monotonic()
        with recorded(module) as recording:
            split = _split(module, sample, model, autocast)
        took = max(time.monotonic() - started, SECONDS_OF_A_PROOF)
        samples = [sample, few_samples(inputs, count, start=count)]
        uncompared = prove_cut(config, module, split, recording, samples, took)
        cut = as_cut(split, module).model_copy(update={"uncompared": uncompared})
    if cut.uncompared:
        log.warning(
            "too large, or not to be called alone, to be compared with how they are cut: %s; that "
            "they train alike is not proven",
            some_of(cut.uncompared),
        )
    require_loss(config, unpacked(cut), few_samples(loaded.targets, count))
    return key, cut


def _is_of(kept: Mapping[str, Any], code: str) -> bool:
    """Whether the key of a kept cut is that of this code, in this environment."""
    variables = kept["environment"].items()
    return kept["code"] == code and all(os.environ.get(name) == value for name, value in variables)


@contextlib.contextmanager
def read_environment() -> Iterator[dict[str, str | None]]:
    """Note which variables of the environment the user's code reads here, and what they are."""
    read: dict[str, str | None] = {}
    plain = type(os.environ)

    class Noting(plain):  # type: ignore[misc, valid-type]  # its class is no constant
        def __getitem__(self, name: str) -> str:
            is_asked = _is_asked_by_user()
            if is_asked:
                read[name] = None  # if there is none
            value: str = super().__getitem__(name)
            if is_asked:
                read[name] = value
            return value

    os.environ.__class__ = Noting
    try:
        yield read
    finally:
        os.environ.__class__ = plain


def _is_asked_by_user() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen ", __file__)):
        frame = frame.f_back  # of os.environ, and what is above it
    return frame is not None and is_users(frame.f_code.co_filename)


def require_loss(config: Config, split: Split, targets: Any) -> None:
    """Check that the loss takes what the module returns, by shapes alone.

    A loss that needs numbers, or has tensors of its own, is first called in the first step.

    Args:
        targets: of the samples that the module was cut with.

    Raises:
        ConfigError: the loss wants something else.
    """
    returned = [
        sizes[0]
        if dtype == "size"
        else torch.empty(sizes, dtype=getattr(torch, dtype), device="meta")
        for dtype, sizes in split.outputs
    ]
    outputs = as_returned(split.structures[0], restore(split.structures[0], returned))
    loss = importing.load_function(config.loss, "loss")
    try:
        loss(outputs, pytree.map_tensors(lambda tensor: tensor.to("meta"), targets))
    except (NotImplementedError, AssertionError):  # it needs numbers
        return
    except (TypeError, LookupError, AttributeError, ValueError, RuntimeError) as error:
        if re.search(r"\bmeta\b|device", str(error)):
            return
        raise ConfigError(
            f"loss = {config.loss.callable!r} does not take what the module returns, "
            f"{pytree.describe(outputs)}, with the targets {pytree.describe(targets)}: "
            f"{importing.explain_error(error)}"
        ) from error


def as_cut(split: Split, module: nn.Module) -> ModelCut:
    """Return how a module is cut, for a config."""
    tensors = tensors_of(module)
    held = {name for layer in split.layers for name in layer.tensors if COPY not in name}
    in_init = {name: names for name in sorted(held) if (names := names_in_init(tensors[name]))}
    frozen = (
        n for n in in_init if isinstance(t := tensors[n], nn.Parameter) and not t.requires_grad
    )
    return ModelCut(
        in_init=in_init,
        base=list(frozen),
        layers=[layer.name for layer in split.layers],
        passing=[
            Passing(values=layer.receives, sample_bytes=layer.received_bytes)
            for layer in split.layers[1:]
        ],
        tied=split.tied,
        aliases=split.aliases,
        split=split.pack(),
    )


def inputs_of(module: nn.Module, model: ModelConfig, loaded: Loaded) -> Any:
    """Return what the module is called with: of a dict, the parts that its forward takes.

    Raises:
        ConfigError: the batch lacks a part, or has one that the forward does not take.
    """
    inputs = loaded.inputs
    if not isinstance(inputs, Mapping):
        if model.inputs is not None:
            raise ConfigError(
                f"model.inputs names parts of a dict, but the batch is {pytree.describe(inputs)}"
            )
        return inputs
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    names = model.inputs
    if names is None:
        # A batch that is a dict and no pair is inputs and targets at once.
        is_both = loaded.inputs is loaded.targets
        names = [name for name in inputs if not (is_both and name in LABELS)]
        if is_both and not takes_any:
            names = [name for name in names if name in parameters]
    for name in names:
        if name not in inputs:
            raise ConfigError(f"the batch has no {name!r}{suggest(name, inputs)}")
        if not takes_any and name not in parameters:
            raise ConfigError(
                f"{model.source}: forward takes no {name!r}, which the batch has"
                f"{suggest(name, parameters)}; name what it takes in model.inputs"
            )
    return {name: inputs[name] for name in names}


def _sample_count(inputs: Any) -> int:
    sizes = {size for tensor in pytree.tensors(inputs) for size in tensor.shape[1:]}
    return next((each for each in SAMPLES if each not in sizes), SAMPLES[0])


def _split(
    module: nn.Module, sample: Any, model: ModelConfig, autocast: torch.dtype | None
) -> Split:
    """Cut a module for any length, also if the first mini-batch has sequences of length one.

    To torch.export a size of one is no size but a constant.
    """
    if (longer := lengthened(sample)) is not None:
        with contextlib.suppress(ConfigError):  # then it is not a length
            return split_module(module, longer, model.split or (), autocast)
    try:
        return split_module(module, sample, model.split or (), autocast)
    except NotImplementedError as error:  # a graph within a graph, as of torch.func
        raise ConfigError(
            f"{type(module).__name__} does what no cut can follow: {one_line(error)}\n{BY_HAND}"
        ) from error


def lengthened(inputs: Any, length: int = 9) -> Any:
    """Return inputs with longer sequences in place of those of one token; None: there are none."""
    tensors = pytree.tensors(inputs)
    if not any(each.shape[1:] == (1,) and not each.is_floating_point() for each in tensors):
        return None

    def longer(tensor: Tensor) -> Tensor:
        is_short = tensor.dim() > 1 and tensor.shape[1] == 1
        return torch.cat([tensor] * length, 1) if is_short else tensor

    return pytree.map_tensors(longer, inputs)


def few_samples(batch: Any, count: int, start: int = 0) -> Any:
    """Return `count` samples of a mini-batch from one on, repeated if it has less."""

    def few(tensor: Tensor) -> Tensor:
        rows = torch.arange(start, start + count) % max(1, tensor.shape[0])
        return tensor[rows] if tensor.dim() else tensor

    return pytree.map_tensors(few, batch)


def _key(config: Config, model: ModelConfig, module: nn.Module, sample: Any) -> str:
    """Return a hash of all that a cut depends on.

    The module has been built: what it is made of counts, wherever that comes from.
    """
    shapes = [(path, pytree.describe(leaf)) for path, leaf in pytree.leaves_with_path(sample)]
    own = sorted(files.python_files(config.folder, config.modules))
    known = {
        "versions": [torch.__version__, platform.python_version(), _own_version()],
        "code": files.code_versions({model.source.partition(":")[0], *_packages()}),
        "files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in own],
        "model": [model.source, model.kwargs, model.split],
        "module": _described(module),
        "precision": config.autocast,
        "parts": config.has_equal_parts,
        "sample": shapes,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


PLAIN = (str, int, float, bool, type(None))
SEVERAL = (list, tuple, set, frozenset)


def _described(module: nn.Module) -> list[Any]:
    """Return the settings of a module's parts and the code of their classes."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    sources = {inspect.getsourcefile(kind) for kind in kinds if kind.__module__ != "builtins"}
    settings: dict[str, Any] = getattr(
        getattr(module, "config", None), "to_dict", dict
    )()  # of transformers
    parts = [
        (
            name,
            type(part).__qualname__,
            sorted((k, _text(v)) for k, v in vars(part).items() if k not in OWN_FIELDS),
        )
        for name, part in module.named_modules()
    ]
    tensors = [
        (name, str(tensor.dtype), list(tensor.shape), tensor.requires_grad)
        for name, tensor in tensors_of(module).items()
    ]
    sources |= {sys.modules[name].__file__ for name in users_modules()}  # what these import
    hashes = [
        hashlib.sha256(Path(source).read_bytes()).hexdigest()
        for source in sorted(filter(None, sources))
    ]
    return [repr(sorted(settings.items())), parts, tensors, hashes]


def _text(value: Any, depth: int = 3) -> str:
    """Return the numbers and texts that a value has, in lists, dicts and objects as well."""
    if isinstance(value, PLAIN):
        return repr(value)
    if not depth or callable(value):
        return type(value).__name__
    if isinstance(value, SEVERAL):
        parts = [_text(each, depth - 1) for each in value]
        return repr(sorted(parts) if isinstance(value, set | frozenset) else parts)
    inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    # An object's own business may differ from process to process, such as a hash of itself.
    public = (key for key in inner if isinstance(value, Mapping) or not key.startswith("_"))
    texts = sorted((str(key), _text(inner[key], depth - 1)) for key in public)
    return f"{type(value).__name__}{texts}"


def _own_version() -> str:
    return files.sha256_of("rpcmp")


def _packages() -> set[str]:
    """Return the installed packages with models that a module may be made of."""
    return {"transformers", "timm", "peft", "torchvision"} & {*sys.modules}


def _known(cut: Mapping[str, Any]) -> ModelCut | None:
    try:
        found = ModelCut.model_validate(cut)
        unpacked(found)
    except ValueError:  # it is of another version of rpcmp, which has the same number
        return None
    return found
