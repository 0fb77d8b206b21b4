"""``ElasticTrainer``: submit an elastic job, follow it, ask things of it, and get its result.

It runs in the user's program, which may end meanwhile: the job is the cluster's, and ``attach(name)`` finds
it again. It does not import torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.exceptions import (
    BadRequestError,
    GetTimeoutError,
    NameTakenError,
    NotFoundError,
    SerializationError,
    StokerError,
    WrongTypeError,
)
from stoker.jobs import JobSubmissionClient
from stoker.runtime import current
from stoker.runtime.process.stderr import write_now
from stoker_train.elastic.options import (
    Checkpoint,
    Failure,
    Result,
    Scaling,
    check,
    check_count,
    check_folder,
    check_seconds,
    check_seed,
    check_types,
)
from stoker_train.elastic.policies.policy import Policy
from stoker_train.elastic.records import Records, Spec
from stoker_wire.ids import Prefix, new_id

if TYPE_CHECKING:
    from stoker.jobs import Job

__all__ = ("ElasticTrainer",)

_ENTRYPOINT = "-m stoker_train.elastic.controller"
_POLL_S = 1.0
_END_S = 60.0
_TELL_S = 8.0
"""Who waits for replicas is told of that after so long."""


class ElasticTrainer:
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
        self._runtime_env = dict(runtime_env or {})
        self._spec = Spec(
            name=self.name,
            loop=_pickled("loop", loop),
            config=_pickled("config", config),
            sync=_pickled("sync", _strategy(sync)),
            policies=_pickled("policies", tuple(policies)),
            scaling=_picklable("scaling", self.scaling),
            checkpoint=self.checkpoint,
            failure=self.failure,
            seed=seed,
            code_hash=_code_hash(loop, self.scaling) if self.scaling.reuse_measurements else "",
        )
        self.job_id = ""

    def fit(self, timeout_s: float | None = None) -> Result:
        """Train to the end, and return what became of it; an error of the loop is in ``Result.error``.

        GetTimeoutError after ``timeout_s``: the job goes on then.
        """
        self.submit()
        return self.result(timeout_s)

    def submit(self) -> str:
        """Begin the training, and return the id of its job. NameTakenError if one of that name runs."""
        client = _client()
        if any(one.name == self.name and not one.state.terminal for one in client.list_jobs()):
            raise NameTakenError(
                f"name: {self.name!r} is a job that runs\n"
                "give another name, or follow it by ElasticTrainer.attach(name)",
                field="name",
            )
        self.job_id = new_id(Prefix.JOB)
        self._records.put_spec(self._spec)
        runtime = current.runtime()
        client.submit_job(
            entrypoint=f"{sys.executable} {_ENTRYPOINT}",
            job_id=self.job_id,
            name=self.name,
            queue=self.queue,
            retries=self.failure.retries,
            retry_delay_s=0.1,
            namespace=runtime.job.namespace,
            runtime_env=_with_search_path(self._runtime_env),
            metadata={"elastic": "trainer"},
        )
        return self.job_id

    @classmethod
    def attach(cls, name: str) -> ElasticTrainer:
        """Return the trainer of a job that was submitted, by its name or id. NotFoundError for none."""
        client = _client()
        if name.startswith(f"{Prefix.JOB}_"):
            job = client.get_job(name)
        else:
            jobs = [one for one in client.list_jobs() if one.name == name]
            if not jobs:
                raise NotFoundError(
                    f"name: no job is named {name!r}\n`stoker list jobs` shows all", field="name"
                )
            job = max(jobs, key=lambda one: one.created_at_s)
        trainer = cls.__new__(cls)
        trainer.name, trainer.job_id = job.name or name, job.job_id
        trainer._namespace = job.namespace
        return trainer

    _namespace: str | None = None

    @property
    def _records(self) -> Records:
        if not self.job_id:
            raise NotFoundError("the training has not begun\ncall fit() or submit() before")
        return Records(self.job_id, self._namespace)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end of the training and return its result; GetTimeoutError after ``timeout_s``.

        With 0 it only looks.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, or_zero=True)
        client, records = _client(), self._records
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wait = _Wait(self.name, self.job_id)
        while True:
            left_s = _POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            result = records.result(min(_POLL_S, left_s))
            if result is not None:
                self._await_end(client, failed=bool(result.error))
                return result
            job = client.get_job(self.job_id)
            if job.state.terminal:
                # Of a result that was written just before the end.
                return records.result() or self._without_result(job)
            wait.look(client, job, self.progress())
            if deadline is not None and time.monotonic() >= deadline:
                raise GetTimeoutError(
                    f"training {self.name!r} is not over after {timeout_s:g} s\n"
                    f"it is {self.progress().get('phase', 'starting')}; `stoker explain {self.job_id}` "
                    "says what it waits for"
                )

    def progress(self) -> dict[str, Any]:
        """Return how it is: phase, generation, replicas, metrics, steps; empty before it has begun."""
        return self._records.progress()

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

    def save(self) -> None:
        """Ask for a durable checkpoint."""
        self._ask("checkpoint")

    def restart(self) -> None:
        """Ask that it saves a checkpoint, ends all replicas, and goes on from that with new ones."""
        self._ask("restart")

    def replace(self, rank: int) -> None:
        """Ask for another replica in the place of a rank."""
        check_count("rank", rank, least=0)
        self._records.ask("replace", rank=rank)

    def stop(self) -> None:
        """Ask that it ends well, at the next batch boundary."""
        self._ask("stop")

    def _ask(self, what: str, value: Any = None) -> None:
        self._records.ask(what, value=value)

    def _await_end(self, client: JobSubmissionClient, *, failed: bool) -> None:
        """Wait until nothing of the job runs; one that has failed is not tried again."""
        try:
            if failed:
                client.stop_job(self.job_id)
            client.wait(self.job_id, timeout_s=_END_S)
            self._records.drop_spec()
        except StokerError:
            return  # its result is there; the cluster ends the rest

    def _without_result(self, job: Job) -> Result:
        return Result(error=job.message or f"the job is {job.state}", job_id=job.job_id)


@dataclass(slots=True)
class _Wait:
    """A wait for replicas, of which the user is told once."""

    name: str
    job_id: str
    since_s: float | None = None
    told: bool = False

    def look(self, client: JobSubmissionClient, job: Job, progress: Mapping[str, Any]) -> None:
        """Take note of how the job is; says on stderr why it has not had what it needs for a while."""
        now_s = time.monotonic()
        if _has_enough(job) or progress.get("phase", "FORMING") not in ("FORMING", "RESTORING"):
            self.since_s, self.told = None, False
            return
        if self.since_s is None:
            self.since_s = now_s
        waited_s = now_s - self.since_s
        if self.told or waited_s < _TELL_S:
            return
        self.told = True
        try:
            why = client.explain_job(self.job_id)
        except StokerError:
            return  # whoever follows the job hears of it
        remedy = f"; {why.remedy}" if why.remedy else ""
        write_now(
            f"stoker: training {self.name!r} has waited {waited_s:.0f} s for its replicas: {why.summary}"
            f"{remedy}. More: stoker explain {self.job_id}\n"
        )


def _has_enough(job: Job) -> bool:
    """Return whether a job has, or is offered, the replicas with which it can train."""
    state = job.elastic
    if state is None:
        return False
    offered = state.offer.replicas if state.offer is not None else ()
    return max(len(state.replicas), len(offered)) >= state.scaling.min_replicas


def _with_search_path(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Return the environment with this program's search path: its modules are found where it finds them."""
    own = os.path.realpath(os.path.join(sys.base_prefix, "lib"))
    paths = [os.path.abspath(one) for one in sys.path]
    paths = [one for one in paths if not os.path.realpath(one).startswith(own)]
    variables = dict(runtime_env.get("env_vars", {}))
    known = variables.get("PYTHONPATH", "")
    variables["PYTHONPATH"] = os.pathsep.join([*([known] if known else []), *paths])
    return {**runtime_env, "env_vars": variables}


def _client() -> JobSubmissionClient:
    runtime = current.runtime()
    return JobSubmissionClient(runtime.identity.gcs_url, token=runtime.identity.credential.token)


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


def _pickled(field: str, value: Any) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise SerializationError(
            f"{field} cannot be pickled\n"
            f"make what it holds inside of the loop ({type(error).__name__}: {error})",
            field=field,
        ) from None


def _picklable(field: str, value: Scaling) -> Scaling:
    _pickled(field, value)
    return value
