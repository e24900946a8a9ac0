"""What a job is made of, counted; travels as JSON."""

from __future__ import annotations

from rpcmp.kinds import Strict


class LayerFacts(Strict):
    """One layer.

    Attributes:
        name: the layer's.
        parameters: how many numbers it has to be trained by, tied and frozen ones too.
    """

    name: str
    parameters: int


class StageFacts(Strict):
    """One stage; bytes are those of its tensors.

    Attributes:
        layers: in order; for a stage with a module of its own, that one.
        parameters: of all layers, those that lie in several of them once.
        trained: of these, how many its optimizer steps.
        foreign: names of parameters that are tied to another one, whose stage steps it.
        foreign_parameters: how many numbers those are.
        parameter_bytes, buffer_bytes: of its modules.
        foreign_bytes: of the foreign ones among the parameters.
        gradient_bytes: of all that is trained, foreign ones too.
        optimizer_bytes: of the optimizer's state after a step; None: only a real step can tell.
    """

    layers: list[LayerFacts]
    parameters: int
    trained: int
    foreign: list[str]
    foreign_parameters: int
    parameter_bytes: int
    buffer_bytes: int
    foreign_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None


class Inventory(Strict):
    """A job.

    Attributes:
        stages: in the config's order.
        parameters: of the whole model, tied ones once.
        tied: stages that have a parameter in common, its owner first.
        batches: mini-batches of each dataset, "train" and "test"; empty where they are not to be
            had here.
        steps: optimizer steps of the whole run; None where the datasets' sizes are not known.
        unknown: why datasets are not known; empty: they are.
        available_bytes: memory of this host for all processes; None where nobody knows.
    """

    stages: list[StageFacts]
    parameters: int
    tied: list[list[str]]
    batches: dict[str, int]
    steps: int | None
    unknown: str
    available_bytes: int | None
