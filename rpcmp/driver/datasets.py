"""What a job trains and evaluates on."""

from __future__ import annotations

from dataclasses import dataclass

from rpcmp import data
from rpcmp.config import Config
from rpcmp.data import Batches
from rpcmp.errors import ConfigError
from rpcmp.sections import DataConfig


@dataclass(frozen=True)
class Datasets:
    """The datasets of `[data]`.

    Attributes:
        train: what it trains on.
        test: what it evaluates on; None: it does not.
    """

    train: Batches
    test: Batches | None

    @classmethod
    def load(cls, config: Config) -> Datasets:
        """Those of a config.

        Raises:
            ConfigError: there is no `[data]`, or a dataset cannot be used.
        """
        section = config.data
        if section is None:
            raise ConfigError("the config has no [data] section, which training from it needs")
        train = data.load(section.train, "data.train", section, config.seed, training=True)
        return cls(train, cls._load_test(section, config.seed))

    def close(self) -> None:
        """End the processes that load samples, where there are any."""
        for batches in (self.train, self.test):
            if batches is not None:
                batches.close()

    @staticmethod
    def _load_test(section: DataConfig, seed: int) -> Batches | None:
        if section.test is None:
            return None
        return data.load(section.test, "data.test", section, seed, training=False)
