"""The ranks that save and load together: objects sent between them, with a deadline.

A process group of their own (gloo), so that a thread may use it while others train. Called by the store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ("Ranks",)


class Ranks:
    """The ranks of a process group (the default one), or this process alone where there is none.

    Every rank makes it at the same place. An exchange that takes longer than ``timeout_s`` is an error of
    ``torch.distributed``, and so are all later ones.
    """

    def __init__(self, timeout_s: float, group: Any = None) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1
        self._group = None
        if self.size > 1:
            self._group = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="gloo",
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=group is not None,
            )

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process alone, also where there is a process group."""
        made = cls.__new__(cls)
        made.rank, made.size, made._group = 0, 1, None
        return made

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, an empty list on the others."""
        if self._group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, group=self._group, group_dst=0)
        return found or []

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def scatter(self, values: list[Any]) -> Any:
        """Return rank 0's value for this rank; ``values`` counts on rank 0 alone."""
        if self._group is None:
            return values[0]
        found: list[Any] = [None]
        given = values if self.rank == 0 else None
        dist.scatter_object_list(found, given, group=self._group, group_src=0)
        return found[0]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        if self._group is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, group=self._group, group_src=0)
        return held[0]

    def close(self) -> None:
        """End the group; nobody may be in an exchange."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None
