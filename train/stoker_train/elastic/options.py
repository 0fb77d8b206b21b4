"""Options of an elastic trainer, what makes no sense in them, and the result of its run.

Made by the user, pickled to the controller and the replicas of the job. Needs no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from stoker.exceptions import BadRequestError, WrongTypeError

if TYPE_CHECKING:
    from types import UnionType

__all__ = ("Checkpoint", "Failure", "ResizeCost", "Result", "Scaling")

Adapt = Literal["batch+replicas", "replicas", "none"]
LrRuleName = Literal["adascale", "sqrt", "linear", "none"]
Hook = Callable[[float, float], float]
_SEEDS = 1 << 63


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
    """What rank 0's loop returned; up to 8 MiB of it, pickled."""
    value_problem: str = ""
    """Why ``value`` lacks what the loop returned: too large (its file is named), or it has no pickle."""
    costs: dict[str, float] = field(default_factory=dict)
    """Median seconds of each kind of resize."""


def check(scaling: Scaling, checkpoint: Checkpoint, failure: Failure, *, name: str) -> None:
    """Raise BadRequestError, with field and fix, for options that nothing can keep.

    WrongTypeError, which is one, where a value is of another type than is documented.
    """
    if not isinstance(scaling, Scaling):
        _wrong_type("scaling", scaling, "give a stoker.train.Scaling")
    _check_scaling(scaling)
    _check_batches(scaling)
    check_resources("scaling.resources", scaling.resources, "a replica")
    check_keeping(checkpoint, failure, name)


def check_keeping(checkpoint: Any, failure: Any, name: Any) -> None:
    """Raise BadRequestError for what the trainers have in common: checkpoints, failures and a name."""
    for field_, value, kind in (
        ("checkpoint", checkpoint, Checkpoint),
        ("failure", failure, Failure),
    ):
        if not isinstance(value, kind):
            _wrong_type(field_, value, f"give a stoker.train.{kind.__name__}")
    if checkpoint.path is not None and not isinstance(checkpoint.path, str | os.PathLike):
        _wrong_type("checkpoint.path", checkpoint.path, "give the name of a folder")
    if isinstance(checkpoint.path, str) and "\0" in checkpoint.path:
        refuse("checkpoint.path", "a zero byte is in it", "give the name of a folder")
    for option in ("every", "commit_every", "keep"):
        check_count(f"checkpoint.{option}", getattr(checkpoint, option))
    _check_flag("checkpoint.resume", checkpoint.resume)
    for option in ("hang_s", "collective_timeout_s", "start_s"):
        check_seconds(f"failure.{option}", getattr(failure, option))
    check_count("failure.retries", failure.retries, least=0)
    _check_flag("failure.rehearse", failure.rehearse)
    if not isinstance(name, str):
        _wrong_type("name", name, "give a text")
    if not name or len(name) > 80 or any(not (c.isalnum() or c in "-_.") for c in name):
        refuse(
            "name", f"{name!r:.90} is no name", "give up to 80 letters, digits, '-', '_' and '.'"
        )


def check_count(field_: str, value: Any, least: int = 1) -> None:
    """Raise BadRequestError unless ``value`` is a whole number of ``least`` or more."""
    fix = f"give a whole number, {least} or more"
    if not isinstance(value, int) or isinstance(value, bool):
        _wrong_type(field_, value, fix)
    if value < least:
        refuse(field_, f"{value} is too small", fix)


def check_seconds(field_: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise BadRequestError unless ``value`` is a time in seconds: finite, and above 0 (or 0)."""
    if not _is_number(value):
        _wrong_type(field_, value, "give seconds, a number above 0")
    if not (math.isfinite(value) and (value > 0 or (or_zero and value == 0))):
        refuse(field_, f"{value} is no time", "give seconds above 0")


def check_seed(value: Any) -> None:
    """Raise BadRequestError unless ``value`` is a whole number from 0, and below 2**63."""
    fix = "give a whole number from 0, and below 2**63"
    if not isinstance(value, int) or isinstance(value, bool):
        _wrong_type("seed", value, fix)
    if not 0 <= value < _SEEDS:
        refuse("seed", f"{value} is out of range", fix)


def check_types(**options: tuple[Any, type | UnionType, str]) -> None:
    """Raise WrongTypeError for the first of some values that is not of its type: (value, type, fix)."""
    for field_, (value, kind, fix) in options.items():
        if not isinstance(value, kind):
            _wrong_type(field_, value, fix)


def _check_scaling(scaling: Scaling) -> None:
    for option in ("min_replicas", "max_replicas", "base_batch"):
        check_count(f"scaling.{option}", getattr(scaling, option))
    if scaling.min_replicas > scaling.max_replicas:
        refuse(
            "scaling.min_replicas",
            f"{scaling.min_replicas} is more than max_replicas, {scaling.max_replicas}",
            "exchange them",
        )
    if scaling.adapt not in get_args(Adapt):
        refuse("scaling.adapt", f"{scaling.adapt!r:.80} is none", f"use one of {get_args(Adapt)}")
    if not callable(scaling.lr) and scaling.lr not in get_args(LrRuleName):
        refuse(
            "scaling.lr",
            f"{scaling.lr!r:.80} is none",
            f"use one of {get_args(LrRuleName)}, or a function",
        )
    check_seconds("scaling.grace_s", scaling.grace_s)
    check_seconds("scaling.interval_s", scaling.interval_s)
    _check_flag("scaling.reuse_measurements", scaling.reuse_measurements)


def _check_batches(scaling: Scaling) -> None:
    if scaling.max_batch is not None:
        check_count("scaling.max_batch", scaling.max_batch)
        if scaling.base_batch > scaling.max_batch:
            refuse(
                "scaling.base_batch",
                f"{scaling.base_batch} is more than max_batch, {scaling.max_batch}",
                "raise max_batch, or leave it out",
            )
    local: Any = scaling.local_batch
    if local is not None and (not isinstance(local, tuple | list) or len(local) != 2):
        fix = "give the least and the most samples of a pass, as (1, 8)"
        _wrong_type("scaling.local_batch", local, fix)
    low, high = scaling.locals
    check_count("scaling.local_batch", low)
    check_count("scaling.local_batch", high)
    if low > high:
        refuse("scaling.local_batch", f"({low}, {high}) begins with the larger", "exchange them")
    if low * scaling.min_replicas > scaling.most_in_batch or low > scaling.base_batch:
        refuse(
            "scaling.local_batch",
            f"{scaling.min_replicas} replicas with at least {low} samples cannot make a batch of "
            f"{scaling.base_batch}",
            "lower its first number, or raise base_batch",
        )


def check_resources(field_: str, resources: Any, worker: str) -> None:
    """Raise BadRequestError for what cannot be the resources of ``worker``, as "a replica"."""
    fix = 'give {"GPU": 1} or {"CPU": 1}'
    if not isinstance(resources, Mapping):
        _wrong_type(field_, resources, fix)
    for name, amount in resources.items():
        if not isinstance(name, str) or not _is_number(amount):
            _wrong_type(field_, {name: amount}, fix)
        if not name or not math.isfinite(amount) or amount < 0:
            refuse(field_, f"{name!r:.80} has the amount {amount}", fix)
    if not any(amount > 0 for amount in resources.values()):
        refuse(field_, f"{worker} needs some", fix)
    if resources.get("GPU", 0.0) not in (0.0, 1.0):
        refuse(field_, f"{worker} has one GPU or none", 'give {"GPU": 1}')


def _check_flag(field_: str, value: Any) -> None:
    if not isinstance(value, bool):
        _wrong_type(field_, value, "give True or False")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_folder(checkpoint: Checkpoint, path: str) -> None:
    """Raise BadRequestError if the folder has checkpoints of another run that is not to be resumed."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        refuse("checkpoint.path", f"{path} cannot be read: {error}", "give another folder")
    if not checkpoint.resume and any(name.startswith("checkpoint-") for name in names):
        refuse(
            "checkpoint.path",
            f"{path} has checkpoints of an earlier run",
            "give another folder, or Checkpoint(resume=True) to go on from them",
        )


def _wrong_type(field_: str, value: Any, fix: str) -> NoReturn:
    raise WrongTypeError(f"{field_} is of the wrong type\n{value!r:.80}: {fix}", field=field_)


def refuse(field_: str, problem: str, fix: str) -> NoReturn:
    """Raise BadRequestError for an option that makes no sense."""
    raise BadRequestError(f"{field_} makes no sense\n{problem}: {fix}", field=field_)
