"""Messages as events of the core: what would harm it is refused here."""

from __future__ import annotations

import pytest

from stoker_scheduler.gcs_feed import queue_spec_of
from stoker_scheduler.wire_types import requirements_of
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Demand, LeaseKind
from stoker_wire.messages.queues import Queue


def test_a_bundle_is_not_asked_for_without_its_group() -> None:
    demand = Demand(job_id="job_1", resources={"CPU": 1}, kind=LeaseKind.BUNDLE)
    with pytest.raises(BadRequestError, match="placement group") as raised:
        requirements_of(demand, at="demand.")
    assert raised.value.field == "demand.kind"


def test_a_stored_limit_that_is_too_small_to_be_counted_admits_nothing() -> None:
    spec = queue_spec_of(Queue(name="team", quota={"x": 1e-179}, limit={"CPU": 2, "x": 5e-324}))
    assert (spec.quota, spec.limit) == ({"x": 0}, {"CPU": 20_000, "x": 0})
