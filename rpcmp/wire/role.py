"""What a certificate allows its holder to be: a stage, a spare, or the driver.

It stands in the certificate as a URI among the subject's alternative names, which any CA can put
there: rpcmp://stage/1, rpcmp://spare, rpcmp://driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_URI = re.compile(r"rpcmp://(?:stage/(\d{1,5})|(spare|driver))/?")


@dataclass(frozen=True)
class Role:
    """A role.

    Attributes:
        kind: "stage", "spare" or "driver".
        stage_index: which stage; None for the others.
    """

    kind: str
    stage_index: int | None = None

    @property
    def uri(self) -> str:
        """How it stands in a certificate."""
        number = "" if self.stage_index is None else f"/{self.stage_index}"
        return f"rpcmp://{self.kind}{number}"

    @property
    def is_driver(self) -> bool:
        """Whether its holder may drive."""
        return self.kind == "driver"

    def may_serve(self, stage_index: int | None) -> bool:
        """Whether its holder may be that stage; None: a spare, or any stage at all."""
        if stage_index is None:
            return not self.is_driver
        return self.kind == "spare" or self.stage_index == stage_index

    def __str__(self) -> str:
        return self.kind if self.stage_index is None else f"stage {self.stage_index}"


DRIVER, SPARE = Role("driver"), Role("spare")

STRANGER = Role("stranger")
"""In no certificate: a process that a server without certificates does not work for."""


def stage(index: int) -> Role:
    """The role of one stage's server."""
    return Role("stage", index)


def find(uris: Iterable[str]) -> Role | None:
    """The role that one of a certificate's URIs names; None where that is not exactly one."""
    found = [match for uri in uris if (match := _URI.fullmatch(uri))]
    if len(found) != 1:
        return None
    index, kind = found[0].groups()
    return Role(kind) if kind else stage(int(index))
