"""``ElasticTrainer``: submit an elastic job, follow it, ask things of it, and get its result.

It runs in the user's program, which may end meanwhile: the job is the cluster's, and ``attach(name)`` finds
it again. It does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker_train.elastic.options import (
    Checkpoint,
    Failure,
    Result,
    Scaling,
    check,
    check_count,
    check_folder,
    check_seed,
    check_types,
)
from stoker_train.elastic.policies.policy import Policy
from stoker_train.elastic.records import Records, Spec
from stoker_train.training_job import TrainingJob, pickled

if TYPE_CHECKING:
    from stoker.jobs import Job, JobSubmissionClient

__all__ = ("ElasticTrainer",)


class ElasticTrainer(TrainingJob[Result]):
    """A training that the cluster may grow, shrink, move and preempt at batch boundaries.

    ``loop(ctx)`` or ``loop(ctx, config)`` is an ordinary data-parallel PyTorch function, run by every
    replica. ``sync`` is the strategy of synchronisation (all-reduce), ``policies`` adapt the job while it
    trains, ``queue`` is whose share it has. ``name`` is unique among jobs that run; default: the loop's and a
    number. BadRequestError names the option that makes no sense.
    """

    def __init__(
        self,
        loop: Callable[..., Any],
        *,
        config: Any = None,
        scaling: Scaling | None = None,
        sync: Any = None,
        policies: Sequence[Any] = (),
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
        self.scaling = Scaling() if scaling is None else scaling
        self.failure = Failure() if failure is None else failure
        self.name = name
        if name == "":
            self.name = f"{getattr(loop, '__name__', 'loop').strip('<>')}-{os.urandom(3).hex()}"
        if isinstance(checkpoint, str | os.PathLike):
            kept = Checkpoint(path=os.fspath(checkpoint))
        else:
            kept = Checkpoint() if checkpoint is None else checkpoint
        check(self.scaling, kept, self.failure, name=self.name)
        check_seed(seed)
        check_types(
            queue=(queue, str, "give the name of a queue"),
            policies=(policies, list | tuple, "give a list of policies"),
            runtime_env=(
                runtime_env,
                Mapping | None,
                "give a dict, as of stoker.init(runtime_env=)",
            ),
        )
        for number, one in enumerate(policies):
            fix = "give objects of a class that is a stoker.train.Policy"
            check_types(**{f"policies[{number}]": (one, Policy, fix)})
        path = os.path.abspath(kept.path or os.path.join("runs", self.name))
        check_folder(kept, path)
        self.checkpoint = Checkpoint(path, kept.every, kept.commit_every, kept.keep, kept.resume)
        self.queue, self.seed = queue, seed
        self._retries = self.failure.retries
        self._runtime_env = dict(runtime_env or {})
        self._spec = Spec(
            name=self.name,
            loop=pickled("loop", loop),
            config=pickled("config", config),
            sync=pickled("sync", _strategy(sync)),
            policies=pickled("policies", tuple(policies)),
            scaling=_picklable("scaling", self.scaling),
            checkpoint=self.checkpoint,
            failure=self.failure,
            seed=seed,
            code_hash=_code_hash(loop, self.scaling) if self.scaling.reuse_measurements else "",
        )
        self.job_id = ""

    _controller = "stoker_train.elastic.controller"
    _kind = "elastic"
    _members = "replicas"

    def _specify(self) -> tuple[Spec, dict[str, str]]:
        return self._spec, {}

    def _records_of(self, job_id: str, namespace: str | None) -> Records:
        return Records(job_id, namespace)

    def _kept_result(self, records: Records, timeout_s: float) -> Result | None:
        return records.result(timeout_s)

    def _has_failed(self, result: Result) -> bool:
        return bool(result.error)

    def _without_result(self, job: Job) -> Result:
        return Result(error=job.message or f"the job is {job.state}", job_id=job.job_id)

    def _waits(self, job: Job, progress: Mapping[str, Any]) -> bool:
        waiting = progress.get("phase", "FORMING") in ("FORMING", "RESTORING")
        return waiting and not _has_enough(job)

    def _reason(self, client: JobSubmissionClient, progress: Mapping[str, Any]) -> str:
        why = client.explain_job(self.job_id)
        return f"{why.summary}; {why.remedy}" if why.remedy else str(why.summary)

    def resize(self, replicas: int) -> None:
        """Ask for so many replicas, within its limits; it gets them as the cluster has them."""
        check_count("replicas", replicas)
        self._ask("resize", replicas)

    def set_batch_size(self, batch: int) -> None:
        """Ask for another M, within its limits."""
        check_count("batch", batch)
        self._ask("set_batch_size", batch)

    def set_sync(self, strategy: Any) -> None:
        """Ask for another strategy of synchronisation."""
        self._ask("set_sync", _strategy(strategy))

    def restart(self) -> None:
        """Ask that it saves a checkpoint, ends all replicas, and goes on from that with new ones."""
        self._ask("restart")

    def replace(self, rank: int) -> None:
        """Ask for another replica in the place of a rank."""
        check_count("rank", rank, least=0)
        self._records.ask("replace", rank=rank)


def _has_enough(job: Job) -> bool:
    """Return whether a job has, or is offered, the replicas with which it can train."""
    state = job.elastic
    if state is None:
        return False
    offered = state.offer.replicas if state.offer is not None else ()
    return max(len(state.replicas), len(offered)) >= state.scaling.min_replicas


def _strategy(sync: Any) -> dict[str, Any]:
    """Return plain values for a strategy; BadRequestError for none."""
    from stoker_train.elastic.sync import Strategy, make_strategy

    if not isinstance(sync, str | Mapping | Strategy | None):
        fix = 'give a name, a dict with "name", or an object as stoker.train.LocalSGD(4)'
        raise WrongTypeError(f"sync is of the wrong type\n{sync!r:.80}: {fix}", field="sync")
    try:
        return make_strategy(sync).spec()
    except ValueError as error:
        raise BadRequestError(f"sync is no strategy\n{error}", field="sync") from None


def _code_hash(loop: Callable[..., Any], scaling: Scaling) -> str:
    """Return under what the measurements of a loop are kept; BadRequestError for one without code."""
    from stoker_train.elastic.optimization.priors import code_hash

    try:
        return code_hash(loop, sorted(scaling.resources.items()))
    except TypeError as error:
        raise BadRequestError(
            f"scaling.reuse_measurements needs another loop\n{error}",
            field="scaling.reuse_measurements",
        ) from None


def _picklable(field: str, value: Scaling) -> Scaling:
    pickled(field, value)
    return value
