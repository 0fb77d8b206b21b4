"""Adaptation policies: hooks that see what training measures, and ask for changes of it.

After KungFu (Mai et al., OSDI 2020). The replica of rank 0 calls the hooks and sends what they asked for to
the controller, whose orders every rank applies at one step. A policy touches no model and no process group;
what it keeps between hooks is in ``state_dict`` and survives resizes and restarts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from stoker_train.elastic.sync import Strategy

RequestKind = Literal["resize", "set_batch_size", "set_lr", "set_sync", "set_shares", "stop"]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Numbers of training, as of the last step that all ranks were in touch at; NaN where nothing is known.

    Tuples are by rank. Times are in seconds, batches in samples.
    """

    step: int = 0
    """Steps committed."""
    epoch: int = 0
    elapsed_s: float = 0.0
    gpu_hours: float = 0.0
    """The sum over time of the replicas, in hours."""
    replicas: int = 1
    nodes: int = 1
    batch: int = 0
    """M, the samples of a step."""
    base_batch: int = 0
    lr: float = math.nan
    loss: float = math.nan
    """The mean over the batch."""
    gns: float = math.nan
    """phi = tr(Sigma) / |G|^2, in samples."""
    grad_variance: float = math.nan
    """Of the gradient of M0 samples."""
    grad_square: float = math.nan
    """|G|^2."""
    gain: float = 1.0
    """AdaScale's, of a step at this batch."""
    goodput: float = math.nan
    """Samples of M0's worth per second, by the model."""
    step_s: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()
    sync_s: tuple[float, ...] = ()
    data_s: tuple[float, ...] = ()
    memory_nbytes: tuple[float, ...] = ()
    sync: str = "all_reduce"
    """The strategy's name."""
    latency_s: tuple[tuple[float, ...], ...] = ()
    """From each rank to each, as last measured; see :mod:`stoker_train.elastic.sync.links`."""
    bandwidth: tuple[tuple[float, ...], ...] = ()
    """Bytes per second from each rank to each."""
    slow_ranks: tuple[int, ...] = ()
    slow_nodes: tuple[str, ...] = ()
    suggested_shares: tuple[float, ...] = ()
    """With which all ranks would end a step together; empty where unknown."""


@dataclass(frozen=True, slots=True)
class Request:
    """One change that was asked for: plain values, which travel in an order."""

    kind: RequestKind
    value: Any
    reason: str


@dataclass(slots=True)
class Actions:
    """The changes that policies ask for in a hook. Of one kind the last counts; :meth:`take` empties it."""

    requests: dict[RequestKind, Request] = field(default_factory=dict)

    def resize(self, replicas: int, reason: str = "") -> None:
        """Ask for so many replicas: the scheduler gives them as it can, within the job's limits."""
        self._add("resize", _at_least_1("replicas", replicas), reason)

    def set_batch_size(self, batch: int, reason: str = "") -> None:
        """Ask for M = ``batch`` samples per step; it is kept within the job's limits."""
        self._add("set_batch_size", _at_least_1("batch", batch), reason)

    def set_lr(self, factor: float, reason: str = "") -> None:
        """Ask for ``factor`` times the learning rate of schedule and rule, until it is set again."""
        factor = float(factor)
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"factor is {factor}: it must be a number above 0")
        self._add("set_lr", factor, reason)

    def set_sync(self, strategy: Strategy | str | Mapping[str, Any], reason: str = "") -> None:
        """Ask for another strategy, by name, options with ``"name"``, or as an object."""
        from stoker_train.elastic.sync import make_strategy

        self._add("set_sync", make_strategy(strategy).spec(), reason)

    def set_shares(self, weights: tuple[float, ...], reason: str = "") -> None:
        """Ask for a split of each batch by these weights of the ranks, of this membership only."""
        if not weights or not all(math.isfinite(one) and one >= 0 for one in weights):
            raise ValueError(f"weights are {weights}: there must be a number for each rank, from 0")
        if sum(weights) <= 0:
            raise ValueError("weights are all 0: one rank at least must have samples")
        self._add("set_shares", tuple(map(float, weights)), reason)

    def request_stop(self, reason: str = "") -> None:
        """Ask for the end of training, after the step that is running; the job has then succeeded."""
        self._add("stop", None, reason)

    def take(self) -> tuple[Request, ...]:
        """Return what was asked for since the last time, and forget it."""
        taken = tuple(self.requests.values())
        self.requests.clear()
        return taken

    def _add(self, kind: RequestKind, value: Any, reason: str) -> None:
        self.requests.pop(kind, None)
        self.requests[kind] = Request(kind, value, reason)


class Policy:
    """The hooks of a policy; each does nothing here.

    They run on rank 0, between steps: what they take, each step takes longer. An error in one ends the job.
    """

    def before_train(self, metrics: Metrics, actions: Actions) -> None:
        """See the job before its first step, and again when it was restored from a checkpoint."""

    def before_epoch(self, metrics: Metrics, actions: Actions) -> None:
        """See the job before an epoch."""

    def before_step(self, metrics: Metrics, actions: Actions) -> None:
        """See the job before a step."""

    def after_step(self, metrics: Metrics, actions: Actions) -> None:
        """See the job after a step at whose end all ranks were in touch."""

    def after_epoch(self, metrics: Metrics, actions: Actions) -> None:
        """See the job after an epoch."""

    def after_train(self, metrics: Metrics, actions: Actions) -> None:
        """See the job after its last step; requests come too late."""

    def state_dict(self) -> dict[str, Any]:
        """Return what its decisions depend on: its attributes, unless a class says otherwise."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


def _at_least_1(name: str, value: int) -> int:
    if value != int(value) or value < 1:
        raise ValueError(f"{name} is {value}: it must be a whole number, 1 or more")
    return int(value)
