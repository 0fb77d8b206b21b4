"""Agreement of all ranks of a gang on what is done at one step, though users ask only one of them.

Each rank says in each step what it was asked for, and hears one step later what any of them said: so nobody
waits for a message that has not had a whole step of time. Called by the context, at the end of each step.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ("ASKS", "Agreement")

ASKS = ("checkpoint", "stop")
"""What can be asked for."""


class Agreement:
    """The asks of all ranks. Every rank makes it at the same place; each exchange ends by ``timeout_s``."""

    def __init__(self, asked: set[str], timeout_s: float) -> None:
        self._asked = asked
        self._alone = dist.get_world_size() == 1
        self._group = (
            None
            if self._alone
            else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        )
        self._flight: tuple[torch.Tensor, dist.Work] | None = None

    def exchange(self) -> frozenset[str]:
        """Say what this rank was asked for, and return what any rank had said one step before."""
        said = {one for one in ASKS if one in self._asked}
        self._asked -= said
        if self._alone:
            return frozenset(said)
        agreed = self.settle()
        flags = torch.tensor([float(one in said) for one in ASKS])
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._flight = flags, work
        return agreed

    def settle(self) -> frozenset[str]:
        """Wait for the exchange that is under way, and return what was said in it."""
        if self._flight is None:
            return frozenset()
        flags, work = self._flight
        self._flight = None
        work.wait()
        return frozenset(one for one, flag in zip(ASKS, flags.tolist(), strict=True) if flag)
