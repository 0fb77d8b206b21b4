"""Options of an elastic trainer, what makes no sense in them, and the result of its run.

Made by the user, pickled to the controller and the replicas of the job. Needs no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

from stoker.exceptions import BadRequestError

__all__ = ("Checkpoint", "Failure", "ResizeCost", "Result", "Scaling")

Adapt = Literal["batch+replicas", "replicas", "none"]
LrRuleName = Literal["adascale", "sqrt", "linear", "none"]
Hook = Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class Scaling:
    """The limits within which the cluster may scale a job, and its batches in samples.

    ``base_batch`` is M0, for which the learning rate was tuned, ``max_batch`` the most that is still worth
    trying (default: the same), ``local_batch`` the least and the most samples of a replica in one pass. A
    replica has ``resources``, by default a GPU. ``adapt``: ``"batch+replicas"`` changes both, ``"replicas"``
    keeps the batch, ``"none"`` is a rigid gang of ``max_replicas``. ``lr`` is the rule for the learning rate
    when the batch is not M0: a name, or a function of ``M / M0`` and AdaScale's gain.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    resources: Mapping[str, float] = field(default_factory=lambda: {"GPU": 1.0})
    base_batch: int = 32
    max_batch: int | None = None
    local_batch: tuple[int, int] | None = None
    adapt: Adapt = "batch+replicas"
    lr: LrRuleName | Hook = "none"
    grace_s: float = 30.0
    """The longest that the job may take to leave replicas, before the cluster takes all of them."""
    interval_s: float = 30.0
    """The time between two looks at whether another batch would be better."""
    reuse_measurements: bool = False
    """Begin with what earlier jobs of the same loop measured, in this namespace, and leave them yours."""

    @property
    def most_in_batch(self) -> int:
        """The largest batch: M0 where none was given, or where the batch is fixed."""
        if self.max_batch is None or self.adapt != "batch+replicas":
            return self.base_batch
        return self.max_batch

    @property
    def locals(self) -> tuple[int, int]:
        """The least and the most samples of a replica in one pass."""
        return self.local_batch or (1, self.base_batch)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The places and intervals of commits and checkpoints.

    In memory every ``commit_every`` steps, on disk every ``every`` steps in the folder ``path``, which all
    nodes share (default: ``runs/NAME`` of the program that calls ``fit``), ``keep`` of them. ``resume``:
    go on from what the folder has.
    """

    path: str | None = None
    every: int = 100
    commit_every: int = 10
    keep: int = 3
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The times after which something counts as failed, and what is done then; in seconds."""

    hang_s: float = 15.0
    """A replica that says nothing for so long is ended: its process hangs, or its node."""
    collective_timeout_s: float = 60.0
    """The longest that a step waits for a rank."""
    start_s: float = 180.0
    """The longest that a replica takes from its start to its first batch."""
    retries: int = 3
    """Attempts of the controller after the first: each begins from the newest durable checkpoint."""
    rehearse: bool = True
    """Newcomers run one batch by themselves first, so that imports and compilation pause nobody."""


@dataclass(frozen=True, slots=True)
class ResizeCost:
    """One change of the membership, and what it cost the survivors.

    ``kind`` is ``"memory"``, ``"restore"`` (after a loss) or ``"checkpoint"``; ``pause_s`` the longest that a
    survivor did not train for it.
    """

    kind: str
    generation: int
    before: int
    after: int
    pause_s: float
    step: int


@dataclass(slots=True)
class Result:
    """The outcome of a run: ``error`` is empty if it went well."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """The last values: loss, step, epoch, and what the loop reported by ``ctx.report``."""
    checkpoint: str = ""
    """The newest durable checkpoint's file."""
    generations: int = 0
    resizes: list[ResizeCost] = field(default_factory=list)
    ledger_ok: bool | None = False
    """Whether each sample of each epoch was used once; None where no sample came from ``ctx.loader``."""
    ledger_problems: list[str] = field(default_factory=list)
    steps: int = 0
    skipped_steps: int = 0
    """Steps whose loss or gradient was not finite: counted, and not taken."""
    error: str = ""
    error_kind: str = ""
    job_id: str = ""
    value: Any = None
    """What rank 0's loop returned."""
    costs: dict[str, float] = field(default_factory=dict)
    """Median seconds of each kind of resize."""


def check(scaling: Scaling, checkpoint: Checkpoint, failure: Failure, *, name: str) -> None:
    """Raise BadRequestError, with field and fix, for options that nothing can keep."""
    _whole("scaling.min_replicas", scaling.min_replicas)
    _whole("scaling.max_replicas", scaling.max_replicas)
    _whole("scaling.base_batch", scaling.base_batch)
    if scaling.min_replicas > scaling.max_replicas:
        _refuse(
            "scaling.min_replicas",
            f"{scaling.min_replicas} is more than max_replicas, {scaling.max_replicas}",
            "exchange them",
        )
    if scaling.max_batch is not None:
        _whole("scaling.max_batch", scaling.max_batch)
        if scaling.base_batch > scaling.max_batch:
            _refuse(
                "scaling.base_batch",
                f"{scaling.base_batch} is more than max_batch, {scaling.max_batch}",
                "raise max_batch, or leave it out",
            )
    if scaling.adapt not in get_args(Adapt):
        _refuse("scaling.adapt", f"{scaling.adapt!r} is none", f"use one of {get_args(Adapt)}")
    if not callable(scaling.lr) and scaling.lr not in get_args(LrRuleName):
        _refuse(
            "scaling.lr",
            f"{scaling.lr!r} is none",
            f"use one of {get_args(LrRuleName)}, or a function",
        )
    low, high = scaling.locals
    _whole("scaling.local_batch", low)
    _whole("scaling.local_batch", high)
    if low > high:
        _refuse("scaling.local_batch", f"({low}, {high}) begins with the larger", "exchange them")
    if low * scaling.min_replicas > scaling.most_in_batch or low > scaling.base_batch:
        _refuse(
            "scaling.local_batch",
            f"{scaling.min_replicas} replicas with at least {low} samples cannot make a batch of "
            f"{scaling.base_batch}",
            "lower its first number, or raise base_batch",
        )
    if not any(amount > 0 for amount in scaling.resources.values()):
        _refuse("scaling.resources", "a replica needs some", 'give {"GPU": 1} or {"CPU": 1}')
    if scaling.resources.get("GPU", 0.0) not in (0.0, 1.0):
        _refuse("scaling.resources", "a replica has one GPU or none", 'give {"GPU": 1}')
    for field_, value in (
        ("checkpoint.every", checkpoint.every),
        ("checkpoint.commit_every", checkpoint.commit_every),
        ("checkpoint.keep", checkpoint.keep),
    ):
        _whole(field_, value)
    for field_, value_s in (
        ("failure.hang_s", failure.hang_s),
        ("failure.collective_timeout_s", failure.collective_timeout_s),
        ("failure.start_s", failure.start_s),
        ("scaling.grace_s", scaling.grace_s),
        ("scaling.interval_s", scaling.interval_s),
    ):
        if not (math.isfinite(value_s) and value_s > 0):
            _refuse(field_, f"{value_s} is no time", "give seconds above 0")
    if failure.retries < 0:
        _refuse("failure.retries", f"{failure.retries} is negative", "give 0 or more")
    if not name or len(name) > 80 or any(not (c.isalnum() or c in "-_.") for c in name):
        _refuse(
            "name", f"{name!r:.90} is no name", "give up to 80 letters, digits, '-', '_' and '.'"
        )


def check_folder(checkpoint: Checkpoint, path: str) -> None:
    """Raise BadRequestError if the folder has checkpoints of another run that is not to be resumed."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _refuse("checkpoint.path", f"{path} cannot be read: {error}", "give another folder")
    if not checkpoint.resume and any(name.startswith("checkpoint-") for name in names):
        _refuse(
            "checkpoint.path",
            f"{path} has checkpoints of an earlier run",
            "give another folder, or Checkpoint(resume=True) to go on from them",
        )


def _whole(field_: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(field_, f"{value!r} is no count", "give a whole number, 1 or more")


def _refuse(field_: str, problem: str, fix: str) -> NoReturn:
    raise BadRequestError(f"{field_} makes no sense\n{problem}: {fix}", field=field_)
