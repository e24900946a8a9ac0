"""rpcmp: train one PyTorch model across several machines, by RPC.

    import rpcmp

    config = rpcmp.load_config("config.toml")
    with rpcmp.launch(config) as pipeline:
        loss = pipeline.train_step(inputs, targets)

Importing this package does not import torch: the command line and the supervisors start in
milliseconds. Names that need it are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpcmp.config.loader import load_config as load_config
    from rpcmp.config.schema import Config
    from rpcmp.driver.evaluation import Evaluation
    from rpcmp.errors import RpcmpError
    from rpcmp.job.pipeline import Pipeline, launch
    from rpcmp.rpc.tensors import parameters_sha256
    from rpcmp.splitting.building import from_init, init_path
    from rpcmp.worker.weight_grad import splittable

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Evaluation",
    "Pipeline",
    "RpcmpError",
    "from_init",
    "init_path",
    "launch",
    "load_config",
    "parameters_sha256",
    "splittable",
]

_HOME = {
    "Config": ("rpcmp.config.schema", "Config"),
    "Evaluation": ("rpcmp.driver.evaluation", "Evaluation"),
    "Pipeline": ("rpcmp.job.pipeline", "Pipeline"),
    "RpcmpError": ("rpcmp.errors", "RpcmpError"),
    "from_init": ("rpcmp.splitting.building", "from_init"),
    "init_path": ("rpcmp.splitting.building", "init_path"),
    "launch": ("rpcmp.job.pipeline", "launch"),
    "load_config": ("rpcmp.config.loader", "load_config"),
    "parameters_sha256": ("rpcmp.rpc.tensors", "parameters_sha256"),
    "splittable": ("rpcmp.worker.weight_grad", "splittable"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rpcmp' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
