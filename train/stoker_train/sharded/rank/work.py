"""The work that the controller of a sharded job sends to its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_train.sharded.records import Spec

__all__ = ("Work",)


@dataclass(frozen=True)
class Work:
    """The work of all ranks of all gangs of a job."""

    job_id: str
    spec: Spec
    search_path: tuple[str, ...] = ()
    """Where the user's program finds its modules; a worker that was forked in advance has another."""
