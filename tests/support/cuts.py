"""Modules that are cut in this process, and kept as by the supervisor: an export takes seconds."""

from __future__ import annotations

from rpcmp.config.schema import Config
from rpcmp.driver.module_cut import cut_module
from rpcmp.job.cut_cache import CutCache


def cut_here(config: Config) -> Config:
    """Return the job with the layers of its model's `module`, if it has one."""
    if not config.is_to_be_cut:
        return config
    cache = CutCache(config)
    key, cut = cut_module(config, cache.read())
    cache.write({"code": key, "environment": {}}, cut.model_dump())
    return config.with_cut(cut)
