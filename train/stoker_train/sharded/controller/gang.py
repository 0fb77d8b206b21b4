"""The gang of a sharded job: its placement group, and the actors of its ranks.

Called by the controller. One placement group serves all gangs of an attempt; a node that is lost has its
bundles placed elsewhere, and the next gang waits for that.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import stoker
from stoker.api.placement_groups import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from stoker.exceptions import NotFoundError, StokerError
from stoker.runtime import current
from stoker.runtime.options.strategies import PlacementGroupSchedulingStrategy
from stoker_train.reporting_actors import ReportingActors, preloaded
from stoker_train.sharded.controller.places import bundles_of, in_order
from stoker_train.sharded.rank.actor import Rank
from stoker_train.sharded.rank.reports import Died
from stoker_train.sharded.rank.work import Work
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.control import Explanation

if TYPE_CHECKING:
    from stoker_train.sharded.records import Spec

__all__ = ("Gang",)

_log = logging.getLogger(__name__)
_CONCURRENCY = 4
_EXPLAIN_S = 5.0
_PRELOAD = (
    "torch",
    "torch.distributed.nn.functional",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "stoker_train.sharded.rank.context",
    "stoker_train.sharded.pipelining.executor",
)
"""Imported once per node, so that a rank is there in a moment."""
_OF_PIPELINES = ("stoker_train.sharded.pipelining.splitting",)


class Gang(ReportingActors):
    """The ranks of a job. ``put`` takes what they report, from any thread."""

    def __init__(self, job_id: str, spec: Spec, put: Callable[[Any], None]) -> None:
        super().__init__("rank", put, partial(_died, 0))
        self._spec = spec
        self._work = stoker.put(Work(job_id, spec, tuple(sys.path)))
        self.nodes: list[str] = []
        """The node of each rank."""
        name = f"sharded-{job_id}"
        with contextlib.suppress(NotFoundError):
            remove_placement_group(get_placement_group(name))  # of an attempt before
        totals = [
            dict(one.get("resources", {}))
            for one in stoker.nodes()
            if one.get("state") == NodeState.ALIVE
        ]
        self._bundles = bundles_of(spec.strategy, spec.resources, totals)
        self._group = placement_group(
            [self._bundles.resources] * self._bundles.count, strategy="PACK", name=name
        )

    def is_placed(self, wait_s: float) -> bool:
        """Return whether all bundles are reserved, now or within ``wait_s``."""
        return self._group.wait(wait_s)

    def reason(self) -> str:
        """Return why the bundles are not reserved and what could be done; empty if that is not known."""
        runtime = current.runtime()
        path = f"/v1/placement-groups/{self._group.id}/explain"
        call = runtime.clients.gcs.call("GET", path, reply=Explanation, timeout_s=_EXPLAIN_S)
        try:
            why = runtime.io.run(call, _EXPLAIN_S + 1.0)
        except StokerError as error:
            _log.info("why the gang waits is not known: %s", error)
            return ""
        return f"{why.summary}; {why.remedy}" if why.remedy else why.summary

    def start(self, number: int) -> None:
        """Start all ranks, as gang ``number``, which fences what an earlier one writes.

        The bundles are reserved.
        """
        self._died = partial(_died, number)
        placements = placement_group_table(self._group)["placements"]
        nodes = [
            str((placements.get(n) or placements[str(n)])["node_id"])
            for n in range(self._bundles.count)
        ]
        order = in_order(nodes)
        self.nodes = [nodes[one] for one in order for _ in range(self._bundles.ranks)]
        needs = dict(self._spec.resources)
        of_triton = _OF_PIPELINES if self._spec.strategy.pipeline > 1 else ()
        options: dict[str, Any] = {
            "num_cpus": needs.pop("CPU", 0),
            "num_gpus": needs.pop("GPU", 0),
            "memory": needs.pop("memory", None),
            "resources": needs or None,
            "max_concurrency": _CONCURRENCY,
            "runtime_env": {"preload": preloaded(*_PRELOAD, of_triton=of_triton)},
        }
        for rank in range(self._spec.strategy.gpus):
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=order[rank // self._bundles.ranks]
            )
            actor = stoker.remote(Rank).options(**options, scheduling_strategy=strategy)
            self.add(rank, actor.remote(self._work, rank, number))

    def close(self) -> None:
        """End all ranks, and give the bundles back."""
        self.kill_all()
        try:
            remove_placement_group(self._group)
        except StokerError as error:
            _log.info("the placement group had ended: %s", error)


def _died(gang: int, rank: int, why: str) -> Died:
    return Died(rank, gang, why)
