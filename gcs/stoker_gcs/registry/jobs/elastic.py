"""The registry of elastic jobs: applies ``elastic_rules`` to what jobs say and the scheduler decides.

Their state is a part of the job's record (:attr:`stoker_wire.messages.work.Job.elastic`), so that who watches
jobs sees it, and time travel has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.registry.jobs import elastic_rules as rules
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.amounts import check_parts
from stoker_wire.constraints import node_filters
from stoker_wire.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_gcs.state.records import StateStore, Transition
    from stoker_wire.messages.elastic import (
        AnswerOffer,
        ElasticState,
        Hints,
        MakeOffer,
        Scaling,
        WithdrawReplicas,
    )
    from stoker_wire.messages.work import Job


class ElasticRegistry:
    """Durable limits, hints, offers and generations of elastic jobs."""

    def __init__(self, state: StateStore) -> None:
        self._state = state

    async def get(self, job_id: str, *, seen: int, wait_s: float) -> ElasticState:
        """Return the state; with ``wait_s``, once its version is not ``seen``, or the time is over."""

        def is_news(job: Job) -> bool:
            return job.elastic is None or job.elastic.version != seen or job.state.terminal

        return _state_of(await self._state.wait_for(JOBS, job_id, is_news, wait_s))

    async def scale(self, job_id: str, scaling: Scaling) -> ElasticState:
        """Make a job elastic, or change its limits."""
        rules.check(scaling)
        check_parts(scaling.resources, "resources")
        node_filters.check(scaling.node_filter, "node_filter")
        return await self._change(job_id, lambda job: rules.scaled(job, scaling, self._state.now()))

    async def end(self, job_id: str) -> None:
        """Make a job rigid again; again changes nothing."""
        await self._state.change(JOBS, job_id, rules.unscaled)

    async def hint(self, job_id: str, hints: Hints) -> ElasticState:
        """Keep the hints of a job, or count that they were none."""
        return await self._change(job_id, lambda job: rules.hinted(job, hints, self._state.now()))

    async def offer(self, job_id: str, offer: MakeOffer) -> ElasticState:
        """Record an offer of the scheduler."""
        return await self._change(job_id, lambda job: rules.offered(job, offer, self._state.now()))

    async def accept(self, job_id: str, answer: AnswerOffer) -> ElasticState:
        """Begin the generation that a job was offered."""
        return await self._change(
            job_id, lambda job: rules.accepted(job, answer, self._state.now())
        )

    async def withdraw(self, job_id: str, order: WithdrawReplicas) -> ElasticState:
        """Void an offer, or take replicas away."""
        return await self._change(
            job_id, lambda job: rules.withdrawn(job, order, self._state.now())
        )

    async def _change(
        self, job_id: str, rule: Callable[[Job], Transition[Job] | None]
    ) -> ElasticState:
        return _state_of(await self._state.change(JOBS, job_id, rule))


def _state_of(job: Job) -> ElasticState:
    if job.elastic is None:
        raise NotFoundError(
            f"job {job.job_id} is not elastic\nstate its limits first: PUT /v1/jobs/{job.job_id}/scaling"
        )
    return job.elastic
