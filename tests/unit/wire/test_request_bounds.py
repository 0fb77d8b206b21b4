"""Every number that a request brings has bounds, so that none is NaN, infinite or too large to store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from stoker_gcs.api.routes import ROUTES as GCS
from stoker_nodelet.api import ROUTES as NODELET
from stoker_nodelet.profiles.api import ROUTES as PROFILES
from stoker_nodelet.transfer import ROUTES as TRANSFER
from stoker_scheduler.api import ROUTES as SCHEDULER
from stoker_wire.messages.control import CreateToken
from stoker_wire.messages.work import SubmitJob

TYPES = {
    type_
    for route in (*GCS, *NODELET, *PROFILES, *TRANSFER, *SCHEDULER)
    for type_ in (getattr(route, "body", None), route.query)
    if type_ is not None
}


def unbounded(type_: inspect.Type, at: str, seen: set[type]) -> Iterator[str]:
    """Yield the places of numbers without a least and a largest value."""
    match type_:
        case inspect.Metadata():
            yield from unbounded(type_.type, at, seen)
        case inspect.FloatType() | inspect.IntType():
            least = type_.ge if type_.gt is None else type_.gt
            if least is None or (type_.le is None and type_.lt is None):
                yield at
        case inspect.StructType():
            if type_.cls not in seen:
                seen.add(type_.cls)
                for field in type_.fields:
                    yield from unbounded(field.type, f"{type_.cls.__name__}.{field.name}", seen)
        case inspect.UnionType():
            for one in type_.types:
                yield from unbounded(one, at, seen)
        case inspect.TupleType():
            for one in type_.item_types:
                yield from unbounded(one, at, seen)
        case inspect.DictType():
            yield from unbounded(type_.key_type, f"a key of {at}", seen)
            yield from unbounded(type_.value_type, f"a value of {at}", seen)
        case inspect.CollectionType():
            yield from unbounded(type_.item_type, at, seen)
        case inspect.NamedTupleType() | inspect.TypedDictType() | inspect.DataclassType():
            for named in type_.fields:
                yield from unbounded(named.type, f"{at}.{named.name}", seen)
        case inspect.CustomType():
            yield at


def test_no_number_of_a_request_is_without_bounds() -> None:
    assert len(TYPES) > 40, "the routes are not read any more"
    seen: set[type] = set()
    found = [at for type_ in TYPES for at in unbounded(inspect.type_info(type_), str(type_), seen)]
    assert not found, "give it a type of messages/common.py, such as Seconds, Time, Amount or Count"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308])
def test_a_token_expires_after_a_time_and_a_job_has_one(value: float) -> None:
    for type_, fields in (
        (CreateToken, {"name": "n", "expires_in_s": value}),
        (SubmitJob, {"entrypoint": "true", "timeout_s": value}),
    ):
        with pytest.raises(msgspec.ValidationError, match=list(fields)[-1]):
            msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=type_)


@pytest.mark.parametrize("amount", [math.nan, math.inf, -1.0, 1e16])
def test_a_job_asks_for_an_amount_of_a_resource(amount: float) -> None:
    body: dict[str, Any] = {"entrypoint": "true", "resources": {"CPU": amount}}
    with pytest.raises(msgspec.ValidationError, match="resources"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=SubmitJob)
