"""What each host of a job will need, so what it is asked before a run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rpcmp.config import Config
from rpcmp.examination.facts import Order
from rpcmp.kinds import Factory


def of_stage(
    config: Config, index: int, marker: str, driver_metrics: Collection[str] = ()
) -> Order:
    """One stage's.

    Args:
        marker: name of the driver's file in the folder of checkpoints; empty: it is not shared.
        driver_metrics: config keys of the metrics that the driver computes instead of a stage.
    """
    sinks = {key: value for key, value in _metrics(config).items() if key not in driver_metrics}
    graph, name = config.graph(), config.stage_names[index]
    callables = _names(
        {
            **_own_or_jobs(config, index),
            **({"loss": config.loss, **sinks} if name == graph.sink else {}),
            **(_data(config, "stage") if graph.parts(name) else {}),
        }
    )
    devices = [config.stage(index).device]
    return _order(config, {**_model(config, index), **callables}, marker, devices)


def of_spare(config: Config, marker: str, driver_metrics: Collection[str] = ()) -> Order:
    """That of a server which may take any stage."""
    stages = [of_stage(config, i, marker, driver_metrics) for i in range(config.num_stages)]
    callables = {key: name for stage in stages for key, name in stage.callables.items()}
    devices = sorted({device for stage in stages for device in stage.devices})
    return _order(config, callables, marker, devices)


def of_driver(config: Config, marker: str) -> Order:
    """The driver's: it may load the data, reads the list of layers, and computes some metrics."""
    callables = _names({**_data(config, "driver"), "report": config.report})
    model = _model(config, 0) if config.model is not None else {}
    order = _order(config, {**model, **callables}, marker, ["cpu"])
    return order.model_copy(update={"metrics": _names(_metrics(config))})


def _model(config: Config, index: int) -> dict[str, str]:
    if config.model is not None:
        return {"model.layers": config.model.layers}
    module = config.stage(index).module
    return {} if module is None else {f"stages.{index}.module": module}


def _own_or_jobs(config: Config, index: int) -> dict[str, Factory | None]:
    """Optimizer and scheduler, by the key that names them."""
    stage, here = config.stage(index), f"stages.{index}."
    return {
        f"{here if isinstance(stage.optimizer, Factory) else ''}optimizer": (
            config.optimizer_of(index)
        ),
        f"{here if isinstance(stage.scheduler, Factory) else ''}scheduler": (
            config.scheduler_of(index)
        ),
    }


def _metrics(config: Config) -> dict[str, Factory]:
    return {f"metrics.{name}": metric for name, metric in config.metrics.items()}


def _data(config: Config, at: str) -> dict[str, Factory | None]:
    """The datasets, where they are loaded there."""
    data = config.data
    if data is None or data.at != at:
        return {}
    own = {"data.sampler": data.sampler, "data.collate": data.collate}
    return {"data.train": data.train, "data.test": data.test, **own}


def _names(factories: Mapping[str, Factory | None]) -> dict[str, str]:
    return {key: factory.callable for key, factory in factories.items() if factory is not None}


def _order(config: Config, callables: dict[str, str], marker: str, devices: list[str]) -> Order:
    return Order(
        callables=callables,
        devices=devices,
        folder=str(config.checkpoint_folder) if config.checkpoint is not None else "",
        marker=marker,
    )
