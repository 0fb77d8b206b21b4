"""The hooks of adaptation policies in a replica: what they see, and how what they ask for gets out.

Rank 0 runs them; what they keep is a part of the state, so that another rank 0 goes on as they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stoker_train.elastic.optimization.stragglers import Stragglers
from stoker_train.elastic.policies.policy import Actions, Metrics, Policy
from stoker_train.elastic.replica.reports import Wish

if TYPE_CHECKING:
    from stoker_train.elastic.data.cursor import Cursor
    from stoker_train.elastic.options import Scaling
    from stoker_train.elastic.replica.engine import Engine
    from stoker_train.elastic.replica.settings import Settings
    from stoker_train.elastic.replica.steps import Steps

__all__ = ("Advice",)


class Advice:
    """The policies of a job, and the metrics that they see."""

    def __init__(self, policies: tuple[Policy, ...], scaling: Scaling) -> None:
        self.policies, self._scaling = policies, scaling
        self._began_s = time.monotonic()
        self._before_s = 0.0
        self._replica_s = 0.0
        self._seen_s = self._began_s
        self._stragglers: tuple[tuple[str, ...], Stragglers] | None = None
        self._table: Any = None

    def hook(self, name: str, context: Any) -> None:
        """Call a hook of all policies on rank 0, and send what they ask for."""
        if not self.policies or context.rank != 0:
            return
        actions = Actions()
        metrics = context.metrics
        for policy in self.policies:
            getattr(policy, name)(metrics, actions)
        requests = actions.take()
        if requests:
            link = context._engine.link
            link.report(Wish(link.worker, context.generation, requests), urgent=True)

    def metrics(
        self, steps: Steps | None, engine: Engine, settings: Settings, cursor: Cursor
    ) -> Metrics:
        """Return the numbers of training as of the last step at which all ranks were in touch."""
        now_s = time.monotonic()
        self._replica_s += (now_s - self._seen_s) * engine.world_size
        self._seen_s = now_s
        elapsed_s = self._before_s + now_s - self._began_s
        values: dict[str, Any] = {
            "step": cursor.step,
            "epoch": cursor.epoch,
            "elapsed_s": elapsed_s,
            "gpu_hours": self._replica_s / 3600.0,
            "replicas": engine.world_size,
            "nodes": len(engine.membership.nodes) if engine.membership else 1,
            "batch": settings.batch,
            "base_batch": self._scaling.base_batch,
        }
        if steps is None:
            return Metrics(**values)
        noise = steps.noise.noise
        values |= {
            "lr": steps.lr,
            "gain": steps.noise.gain_at(settings.batch),
            "gns": steps.noise.noise_scale,
            "grad_variance": noise.var if noise is not None else math.nan,
            "grad_square": noise.sqr if noise is not None else math.nan,
            "sync": steps.kind.strategy.name,
        }
        if steps.links is not None:
            values["latency_s"] = tuple(map(tuple, steps.links.latency_s.tolist()))
            values["bandwidth"] = tuple(map(tuple, steps.links.bandwidth.tolist()))
        table = steps.table
        if table is not None:
            self._look(table, engine)
            compute, exchange, data = (
                tuple(table.column(name).tolist()) for name in ("compute_s", "exchange_s", "data_s")
            )
            values |= {
                "loss": table.loss,
                "compute_s": compute,
                "sync_s": exchange,
                "data_s": data,
                "step_s": tuple(map(sum, zip(compute, exchange, data, strict=True))),
                "memory_nbytes": tuple(table.column("memory_nbytes").tolist()),
                "slow_ranks": self._slow[0],
                "slow_nodes": self._slow[1],
                "suggested_shares": self._suggested(engine),
            }
        return Metrics(**values)

    def _look(self, table: Any, engine: Engine) -> None:
        if table is self._table or engine.membership is None:
            return
        self._table = table
        nodes = tuple(one.node_id for one in engine.membership.members)
        if table.replicas != len(nodes):
            return
        if self._stragglers is None or self._stragglers[0] != nodes:
            self._stragglers = nodes, Stragglers(nodes)
        self._stragglers[1].add(table)

    @property
    def _slow(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The ranks and nodes that are slow now."""
        found = () if self._stragglers is None else self._stragglers[1].slow
        ranks = tuple(rank for one in found if one.kind == "rank" for rank in one.ranks)
        return ranks, tuple(one.node for one in found if one.kind == "node")

    def _suggested(self, engine: Engine) -> tuple[float, ...]:
        if self._stragglers is None or len(self._stragglers[0]) != engine.world_size:
            return ()
        return self._stragglers[1].weights() or ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each policy, and the time that was spent."""
        return {
            "policies": [dict(one.state_dict()) for one in self.policies],
            "elapsed_s": self._before_s + time.monotonic() - self._began_s,
            "replica_s": self._replica_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for policy, one in zip(self.policies, state["policies"], strict=False):
            policy.load_state_dict(one)
        self._before_s, self._began_s = float(state["elapsed_s"]), time.monotonic()
        self._replica_s, self._seen_s = float(state["replica_s"]), time.monotonic()
