"""``stoker.train.elastic``: the half of an elastic job that speaks with the scheduler.

A job that can run with more or fewer replicas says so by :func:`join`, tells how fast it is
(:meth:`Session.report`), looks for offers at its batch boundaries (:attr:`Session.offer`), and begins the
next generation by :meth:`Session.accept`. What runs in the replicas is the job's own business; each has a
bundle of a placement group for itself (:meth:`Generation.strategies`).

::

    session = stoker.train.elastic.join(base_batch=256, max_batch=4096, max_local_batch=64)
    generation = session.accept(session.wait_for_offer(timeout_s=600))
    while training:
        train_one_step(generation)
        if session.offer is not None:          # no request: a thread of Stoker's keeps it up to date
            commit()
            generation = session.accept(session.offer)

The names of Horovod's elastic API (``run``, ``TorchState``, ...) are here too, for loops of an
``ElasticTrainer``.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from stoker.api.placement_groups import PlacementGroup
from stoker.exceptions import ConflictError, GetTimeoutError, StokerError
from stoker.runtime import current
from stoker.runtime.options.strategies import PlacementGroupSchedulingStrategy
from stoker_wire.messages.elastic import (
    AnswerOffer,
    ElasticState,
    Hints,
    Offer,
    Replica,
    Scaling,
    StepTimeParams,
    by_node,
)

__all__ = ("Generation", "Session", "join")

_log = logging.getLogger(__name__)
_CALL_S = 15.0
_POLL_S = 30.0
_PAUSE_S = 1.0
_HOROVOD = (
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "rank",
    "run",
    "size",
)
"""Names of Horovod's elastic API: ``stoker_train``, which is built on this package, has them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A set of replicas: its number, and the place of each by rank. None is left of the one before.

    ``must_answer_by_s`` is set while it is an offer that takes replicas away: a job that has not accepted by
    then, in seconds since 1970, loses all that it has, and goes on from its last commit.
    """

    number: int
    replicas: tuple[Replica, ...]
    resources: Mapping[str, float]
    must_answer_by_s: float | None = None

    @property
    def world(self) -> int:
        """The number of its replicas."""
        return len(self.replicas)

    @property
    def nodes(self) -> dict[str, int]:
        """Its replicas by node, in the order of their ranks."""
        return by_node(self.replicas)

    def strategies(self) -> list[PlacementGroupSchedulingStrategy]:
        """Return the ``scheduling_strategy`` for the actor of each rank."""
        return [
            PlacementGroupSchedulingStrategy(
                PlacementGroup(one.group_id, [self.resources] * (one.bundle + 1)),
                placement_group_bundle_index=one.bundle,
            )
            for one in self.replicas
        ]


class Session:
    """An elastic job's line to the scheduler, of the process that made it. For any thread.

    ``with`` ends it: the job is rigid again, and its replicas are released.
    """

    def __init__(self, job_id: str, state: ElasticState, report_interval_s: float) -> None:
        self._runtime = current.runtime()
        self._path = f"/v1/jobs/{job_id}"
        self._lock = threading.Condition()
        self._state = state
        self._closed = False
        self._failure: StokerError | None = None
        """Why nothing more is heard of the job, as it has ended or is rigid."""
        self._report_interval_s = report_interval_s
        self._unsaid: Hints | None = None
        self._says = False
        self._task: asyncio.Future[None] = self._runtime.io.run(self._start(), _CALL_S)

    @property
    def state(self) -> ElasticState:
        """The job as the cluster has it: limits, replicas, offer, hints."""
        return self._state

    @property
    def generation(self) -> Generation:
        """The generation that lives; number 0, without replicas, if none does."""
        state = self._state
        return Generation(state.generation, state.replicas, state.scaling.resources)

    @property
    def offer(self) -> Generation | None:
        """The open offer, as of a moment ago, or None."""
        state = self._state
        return None if state.offer is None else _offered(state, state.offer)

    def wait_for_offer(self, timeout_s: float | None = 600.0) -> Generation:
        """Return the open offer, once there is one; GetTimeoutError if none comes within ``timeout_s``.

        None waits for ever. NotFoundError if the job is rigid again, ConflictError if the session is closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            while self._state.offer is None:
                if self._failure is not None:
                    raise self._failure
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise GetTimeoutError(
                        f"no offer came within {timeout_s:g} s\n"
                        f"stoker explain {self._path.rpartition('/')[2]} says who has the replicas, and why"
                    )
                self._lock.wait(left_s)
            return _offered(self._state, self._state.offer)

    def wait_for_change(self, seen: int, timeout_s: float) -> ElasticState:
        """Return the job's state once its ``version`` is not ``seen``, or after ``timeout_s``.

        NotFoundError if the job is rigid again, ConflictError if the session is closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._state.version == seen and self._failure is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._lock.wait(left_s)
            if self._failure is not None:
                raise self._failure
            return self._state

    def limit(
        self, *, min_replicas: int, max_replicas: int, node_filter: str | None = None
    ) -> None:
        """Change how many replicas the job may have, and on which nodes if that is given.

        BadRequestError for limits that nothing keeps.
        """
        present = self._state.scaling
        scaling = msgspec.structs.replace(
            present,
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            node_filter=present.node_filter if node_filter is None else node_filter,
        )
        self._set(self._call("PUT", "scaling", scaling))

    def accept(self, offer: Generation) -> Generation:
        """Begin the generation that was offered; what it lacks of the present replicas is released.

        Commit before: what is not, is lost. ConflictError if the offer is void by now; then the present
        generation goes on.
        """
        answer = AnswerOffer(generation=offer.number)
        self._set(self._call("POST", "generation", answer))
        return Generation(offer.number, offer.replicas, offer.resources)

    def report(
        self,
        *,
        params: Sequence[float] | Mapping[str, float] | None = None,
        **values: Any,
    ) -> None:
        """Tell how fast the job is; see :class:`stoker_wire.messages.elastic.Hints` for the ``values``.

        ``params`` are the seven of :class:`stoker_goodput.throughput.ThroughputParams`, in their order or by
        name. It waits for nothing: of the reports of ``report_interval_s`` the last is sent. Numbers that are
        NaN, or negative, are dropped by the cluster, which counts them (``state.hints_dropped``).
        """
        theta = None
        if params is not None:
            names = StepTimeParams.__struct_fields__
            by_name = (
                params if isinstance(params, Mapping) else dict(zip(names, params, strict=True))
            )
            theta = StepTimeParams(**{name: _finite(by_name[name]) for name in names})
        said = {name: _finite(value) for name, value in values.items()}
        hints = Hints(params=theta, **said)
        with self._lock:
            self._unsaid = hints
            if self._says:
                return
            self._says = True
        self._runtime.io.call_soon(self._say_soon)

    def close(self) -> None:
        """Make the job rigid again; its replicas are released, and what runs in them ends."""
        if not self._closed:
            self._closed = True
            self._runtime.io.run(self._end(), 2 * _CALL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, what: str, body: object) -> ElasticState:
        call = self._runtime.clients.gcs.call(
            method, f"{self._path}/{what}", body, reply=ElasticState, timeout_s=_CALL_S
        )
        return self._runtime.io.run(call, _CALL_S + 1)

    def _set(self, state: ElasticState) -> None:
        with self._lock:
            known = self._state
            if (state.version, state.hints_at_s or 0.0) >= (known.version, known.hints_at_s or 0.0):
                self._state = state
            self._lock.notify_all()

    async def _start(self) -> asyncio.Future[None]:
        return self._runtime.io.background.spawn(self._follow(), name="elastic session")

    def _say_soon(self) -> None:
        self._runtime.io.background.spawn(self._say(), name="elastic hints")

    async def _say(self) -> None:
        """Send the newest hints, and those that come meanwhile after an interval."""
        while not self._closed:
            with self._lock:
                hints, self._unsaid = self._unsaid, None
                if hints is None:
                    self._says = False
                    return
            try:
                self._set(
                    await self._runtime.clients.gcs.call(
                        "PUT",
                        f"{self._path}/hints",
                        hints,
                        reply=ElasticState,
                        timeout_s=_CALL_S,
                    )
                )
            except StokerError as error:
                _log.warning("hints of %s were not taken: %s", self._path, error)
            await asyncio.sleep(self._report_interval_s)

    async def _follow(self) -> None:
        while True:
            query = {"seen": self._state.version, "wait_s": _POLL_S}
            try:
                state = await self._runtime.clients.gcs.call(
                    "GET",
                    f"{self._path}/elastic",
                    reply=ElasticState,
                    query=query,
                    timeout_s=_POLL_S + _CALL_S,
                )
            except StokerError as error:
                if not error.retryable:
                    return self._fail(error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._set(state)
            if state.version == query["seen"]:
                # The wait is over; or the job is, of which each answer comes at once.
                await asyncio.sleep(_PAUSE_S)

    def _fail(self, error: StokerError) -> None:
        with self._lock:
            self._failure = error
            self._lock.notify_all()

    async def _end(self) -> None:
        self._task.cancel()
        self._fail(ConflictError("this session is closed\njoin again: stoker.train.elastic.join()"))
        await self._runtime.clients.gcs.call("DELETE", f"{self._path}/scaling", timeout_s=_CALL_S)


def _finite(value: Any) -> Any:
    """Return a number, or None for one that is none."""
    if isinstance(value, int | tuple):
        return value
    return float(value) if math.isfinite(value) else None


def _offered(state: ElasticState, offer: Offer) -> Generation:
    by_s = offer.answer_by_s if offer.withdraws else None
    return Generation(offer.generation, offer.replicas, state.scaling.resources, by_s)


def join(
    *,
    base_batch: int,
    max_local_batch: int,
    max_batch: int | None = None,
    min_local_batch: int = 1,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    resources: Mapping[str, float] | None = None,
    grace_s: float = 30.0,
    report_interval_s: float = 5.0,
    label_selector: Mapping[str, str] | None = None,
    node_filter: str = "",
) -> Session:
    """Make this job elastic: from now on the scheduler offers it replicas. Again changes its limits.

    ``base_batch`` is the batch in samples for which the learning rate was tuned (M0), ``max_batch`` the most
    that is still worth trying (default: the same), ``max_local_batch`` what fits on a replica. Each replica
    has ``resources``, by default a GPU. An offer of fewer replicas that is not accepted within ``grace_s``
    costs the job all of them. BadRequestError names the limit that makes no sense.
    """
    given: dict[str, Any] = {}
    if max_replicas is not None:
        given["max_replicas"] = max_replicas
    if resources is not None:
        given["resources"] = dict(resources)
    scaling = Scaling(
        base_batch=base_batch,
        max_batch=max_batch,
        min_local_batch=min_local_batch,
        max_local_batch=max_local_batch,
        min_replicas=min_replicas,
        grace_s=grace_s,
        label_selector=dict(label_selector or {}),
        node_filter=node_filter,
        **given,
    )
    runtime = current.runtime()
    job_id = runtime.job.job_id
    call = runtime.clients.gcs.call(
        "PUT", f"/v1/jobs/{job_id}/scaling", scaling, reply=ElasticState, timeout_s=_CALL_S
    )
    return Session(job_id, runtime.io.run(call, _CALL_S + 1), report_interval_s)


def __getattr__(name: str) -> Any:
    if name in _HOROVOD:
        return getattr(importlib.import_module("stoker_train.elastic.horovod"), name)
    raise AttributeError(f"module 'stoker.train.elastic' has no attribute {name!r}")
