"""``ShardedTrainer``: submit the training of a model that is cut over many ranks, and follow it.

It runs in the user's program, which may end meanwhile: the job is the cluster's, and ``attach(name)`` finds
it again. It does not import torch, but where ``model`` is a module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker_train.elastic.options import (
    Checkpoint,
    Failure,
    check_folder,
    check_seed,
    check_types,
)
from stoker_train.planning.plans import Plan
from stoker_train.sharded.options import Planning, ShardedResult, check, with_batch
from stoker_train.sharded.records import Records, Spec
from stoker_train.training_job import TrainingJob, pickled

if TYPE_CHECKING:
    from stoker.jobs import Job, JobSubmissionClient
    from stoker_train.planning.cluster_shape import ClusterShape
    from stoker_train.planning.profiles.profile import Profile
    from stoker_train.planning.strategy import Strategy

__all__ = ("ShardedTrainer",)


class ShardedTrainer(TrainingJob[ShardedResult]):
    """The training of one model by a gang of ranks, each of which has a part of it.

    ``loop(ctx)`` or ``loop(ctx, config)`` is run by every rank. ``plan`` says how the model is cut: a
    ``Strategy``, a ``Plan`` of :func:`stoker.plan_training`, or ``"auto"``, which asks the planner for its
    best with the records of the running cluster (or ``cluster``), ``model``, ``batch`` and ``seq_len``.
    ``batch`` is the sequences of a step over all ranks; with a plan it sets the size of its micro-batches.
    ``resources`` are a rank's, by default a GPU. A checkpoint is begun every ``checkpoint.every // 2`` steps
    and written beside the training; a gang that loses a rank begins anew from the newest, so that at most
    ``checkpoint.every`` steps are made again, and at most ``failure.retries`` times without another
    checkpoint in between. BadRequestError names the option that makes no sense.
    """

    _controller = "stoker_train.sharded.controller"
    _kind = "sharded"
    _members = "ranks"

    def __init__(
        self,
        loop: Callable[..., Any],
        *,
        plan: Plan | Strategy | str = "auto",
        config: Any = None,
        model: Any = None,
        batch: int | None = None,
        seq_len: int | None = None,
        cluster: ClusterShape | None = None,
        profile: float | Profile | None = None,
        resources: Mapping[str, float] | None = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        failure: Failure | None = None,
        queue: str = "",
        name: str = "",
        seed: int = 0,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(loop):
            raise WrongTypeError(
                f"loop is of the wrong type\n{loop!r:.80}: give a function loop(ctx)", field="loop"
            )
        self.name = name
        if name == "":
            self.name = f"{getattr(loop, '__name__', 'loop').strip('<>')}-{os.urandom(3).hex()}"
        self.failure = Failure() if failure is None else failure
        if isinstance(checkpoint, str | os.PathLike):
            kept: Checkpoint = Checkpoint(path=os.fspath(checkpoint))
        else:
            kept = Checkpoint() if checkpoint is None else checkpoint
        self.resources = {"GPU": 1.0} if resources is None else resources
        self._planning = Planning(model, batch, seq_len, cluster, profile)
        check(plan, self._planning, self.resources, kept, self.failure, self.name)
        check_seed(seed)
        check_types(
            queue=(queue, str, "give the name of a queue"),
            runtime_env=(
                runtime_env,
                Mapping | None,
                "give a dict, as of stoker.init(runtime_env=)",
            ),
        )
        path = os.path.abspath(kept.path or os.path.join("runs", self.name))
        check_folder(kept, path)
        self.checkpoint = Checkpoint(path, kept.every, keep=kept.keep, resume=kept.resume)
        self.plan: Plan | Strategy | None = None
        """How the model is cut; None before ``submit`` where the planner is to say."""
        if not isinstance(plan, str):
            self.plan = with_batch(plan, batch)
        self.queue, self.seed = queue, seed
        self._retries = self.failure.retries
        self._runtime_env = dict(runtime_env or {})
        self._loop, self._config = pickled("loop", loop), pickled("config", config)
        self.job_id = ""

    def _specify(self) -> tuple[Spec, dict[str, str]]:
        check_folder(self.checkpoint, str(self.checkpoint.path))  # a run before may have filled it
        if self.plan is None:
            self.plan = _planned(self._planning)
        stages = self.plan.stages if isinstance(self.plan, Plan) else ()
        strategy = self.plan.strategy if isinstance(self.plan, Plan) else self.plan
        spec = Spec(
            name=self.name,
            loop=self._loop,
            config=self._config,
            strategy=strategy,
            stages=stages,
            resources=dict(self.resources),
            checkpoint=self.checkpoint,
            failure=self.failure,
            seed=self.seed,
        )
        return spec, {"plan": str(strategy), "ranks": str(strategy.gpus)}

    def _records_of(self, job_id: str, namespace: str | None) -> Records:
        return Records(job_id, namespace)

    def _kept_result(self, records: Records, timeout_s: float) -> ShardedResult | None:
        return records.result(timeout_s)

    def _has_failed(self, result: ShardedResult) -> bool:
        return bool(result.error)

    def _without_result(self, job: Job) -> ShardedResult:
        return ShardedResult(error=job.message or f"the job is {job.state}", job_id=job.job_id)

    def _waits(self, job: Job, progress: Mapping[str, Any]) -> bool:
        # The controller says so once it runs; before, the job itself may wait.
        return "waits_for" in progress if progress else str(job.state) != "RUNNING"

    def _reason(self, client: JobSubmissionClient, progress: Mapping[str, Any]) -> str:
        found = progress.get("waits_for", "")
        if not found:
            why = client.explain_job(self.job_id)
            found = f"{why.summary}; {why.remedy}" if why.remedy else why.summary
        return str(found)


def _planned(planning: Planning) -> Plan:
    """Return the planner's best plan that can be trained by. BadRequestError where there is none."""
    from stoker_train.planning.entry import plan_training

    assert planning.batch is not None and planning.seq_len is not None
    try:
        plans = plan_training(
            planning.model,
            cluster=planning.cluster,
            batch=planning.batch,
            seq_len=planning.seq_len,
            profile=planning.profile,
        )
    except (ValueError, TypeError) as error:
        raise BadRequestError(
            f'plan="auto" finds no plan\n{error}; or give plan=stoker.train.Strategy(...)',
            field="plan",
        ) from None
    for plan in plans.plans:
        if plan.strategy.expert == 1:
            return plan
    bound = "; ".join(f"{one.constraint}: {one.nearest}" for one in plans.refusals[:3])
    raise BadRequestError(
        f'plan="auto" finds no plan that fits\n{bound or "give more GPUs, or a smaller batch"}',
        field="plan",
    )
