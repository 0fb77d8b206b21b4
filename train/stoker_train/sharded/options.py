"""Options of a sharded trainer, what makes no sense in them, and the result of its run.

Made by the user's program, pickled to the controller and the ranks. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from stoker.exceptions import BadRequestError
from stoker_train.elastic.options import (
    Checkpoint,
    check_count,
    check_keeping,
    check_resources,
    check_types,
    refuse,
)
from stoker_train.planning.plans import Plan
from stoker_train.planning.strategy import Recompute, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("Planning", "ShardedResult", "check", "with_batch")

AUTO: Literal["auto"] = "auto"
_ZERO_STAGES = (0, 1, 2, 3)
_COUNTS = (
    "data",
    "tensor",
    "pipeline",
    "expert",
    "micro_batch",
    "micro_batches",
    "interleave",
)


@dataclass(frozen=True, slots=True)
class Planning:
    """The arguments for the planner, as ``plan_training`` takes them; None where none was given."""

    model: Any = None
    batch: int | None = None
    seq_len: int | None = None
    cluster: Any = None
    profile: Any = None


@dataclass(slots=True)
class ShardedResult:
    """The outcome of a run: ``error`` is empty if it went well."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """The last values: loss, step, epoch, and what the loop reported by ``ctx.report``."""
    checkpoint: str = ""
    """The folder of checkpoints; the newest of it is the end of the run."""
    steps: int = 0
    restarts: int = 0
    """How often a gang was begun anew, in the last attempt of the controller."""
    error: str = ""
    error_kind: str = ""
    """``"loop"``: it raised. ``"lost"``: ranks died too often. ``"start"``, ``"fenced"``."""
    job_id: str = ""
    value: Any = None
    """What rank 0's loop returned; up to 8 MiB of it, pickled."""
    value_problem: str = ""
    """Why ``value`` lacks what the loop returned: too large (its file is named), or it has no pickle."""


def check(
    plan: Any, planning: Planning, resources: Any, checkpoint: Any, failure: Any, name: str
) -> None:
    """Raise BadRequestError, with field and fix, for options that nothing can keep."""
    fix = 'give a stoker.train.Strategy, a Plan of stoker.plan_training(), or "auto"'
    check_types(plan=(plan, Plan | Strategy | str, fix))
    check_keeping(checkpoint, failure, name)
    if checkpoint.commit_every != Checkpoint().commit_every:
        refuse(
            "checkpoint.commit_every",
            "sharded jobs keep nothing in memory",
            "give checkpoint.every, the steps between two checkpoints",
        )
    check_resources("resources", resources, "a rank")
    for option in ("batch", "seq_len"):
        value = getattr(planning, option)
        if value is not None:
            check_count(option, value)
    if isinstance(plan, str):
        _check_auto(plan, planning)
    else:
        _check_strategy(plan.strategy if isinstance(plan, Plan) else plan)


def with_batch(plan: Plan | Strategy, batch: int | None) -> Plan | Strategy:
    """Return the plan with micro-batches of such a size that a step has ``batch`` sequences.

    BadRequestError where that is no whole number.
    """
    strategy = plan.strategy if isinstance(plan, Plan) else plan
    if batch is None or strategy.batch == batch:
        return plan
    passes = strategy.data * strategy.micro_batches
    if batch % passes:
        refuse(
            "batch",
            f"{batch} sequences do not go over {strategy.data} data-parallel ranks with "
            f"{strategy.micro_batches} micro-batches each",
            f"give a multiple of {passes}",
        )
    changed = replace(strategy, micro_batch=batch // passes)
    return replace(plan, strategy=changed) if isinstance(plan, Plan) else changed


def _check_auto(plan: str, planning: Planning) -> None:
    if plan != AUTO:
        fix = 'give a Strategy, a Plan or "auto"'
        refuse("plan", f"{plan!r:.80} is none", fix)
    needs = {
        "model": "the model, its config or a ModelShape",
        "batch": "the sequences of a step over all ranks",
        "seq_len": "the tokens of a sequence",
    }
    missing = [one for one in needs if getattr(planning, one) is None]
    if missing:
        what = "; ".join(f"{one}=: {needs[one]}" for one in missing)
        raise BadRequestError(
            f'{missing[0]} is missing for plan="auto"\ngive {what}', field=missing[0]
        )


def _check_strategy(strategy: Strategy) -> None:
    for option in _COUNTS:
        check_count(f"plan.{option}", getattr(strategy, option))
    if strategy.zero not in _ZERO_STAGES or isinstance(strategy.zero, bool):
        refuse("plan.zero", f"{strategy.zero!r:.80} is no stage of ZeRO", "give 0, 1, 2 or 3")
    for one in fields(strategy):
        value = getattr(strategy, one.name)
        if one.type == "bool":
            check_types(**{f"plan.{one.name}": (value, bool, "give True or False")})
    check_types(**{"plan.recompute": (strategy.recompute, Recompute, "give a Recompute")})
    if strategy.expert > 1:
        refuse("plan.expert", "sharded jobs do not cut experts", "take a plan with expert=1")
    if strategy.sequence and strategy.tensor == 1:
        refuse("plan.sequence", "it needs tensor parallelism", "give tensor=2 or more, or leave it")
    if strategy.interleave > 1 and strategy.pipeline == 1:
        refuse("plan.interleave", "it needs a pipeline", "give pipeline=2 or more, or leave it")


def amounts(resources: Mapping[str, float], times: int) -> dict[str, float]:
    """Return the resources of so many ranks on one node."""
    return {name: amount * times for name, amount in resources.items() if amount}
