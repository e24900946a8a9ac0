"""Who hears of each addition to a parameter's gradient, by autograd or by `rpcmp.split` later on.

A hook of the user's own keeps a parameter from being split. This one need not: `rpcmp.split` says
when a backward leaves its gradient for later, and calls it when that has come.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Additions:
    """A hook of one parameter; on the thread that differentiates.

    Args:
        parameter: whose gradient it is.
        added: called after something has been added to it.
    """

    def __init__(self, parameter: Tensor, added: Callable[[], None]) -> None:
        self._added = added
        self._left_for_later = 0
        parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, _: Tensor) -> None:
        """Hear from autograd, which calls its hooks for a gradient of None as well."""
        if self._left_for_later:
            self._left_for_later -= 1
        else:
            self._added()

    def leave(self) -> None:
        """The backward that runs gives None: what it would have added comes later."""
        self._left_for_later += 1

    def reset(self) -> None:
        """Forget backwards that have failed halfway."""
        self._left_for_later = 0
