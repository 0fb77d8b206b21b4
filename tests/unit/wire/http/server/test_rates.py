"""Rates: a burst, then so many a second for each caller; the rest is told when to come again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import RateLimitedError, UnauthorizedError
from stoker_wire.http.principals import READERS, ROOT, Principal
from stoker_wire.http.server import rates
from stoker_wire.http.server.rates import BURST_S, Bucket, Rates
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.service import Service
from stoker_wire.messages.common import Role
from stoker_wire.settings import Settings
from tests.unit.wire.conftest import TOKEN

if TYPE_CHECKING:
    from stoker_wire.http.server.request import Request
    from tests.unit.wire.conftest import Cluster


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bucket_gives_a_burst_and_then_its_rate() -> None:
    clock = Clock()
    bucket = Bucket(2.0, clock)
    burst = int(2 * BURST_S)
    assert [bucket.take("a") for _ in range(burst)] == [0.0] * burst
    assert bucket.take("a") == pytest.approx(0.5)
    assert bucket.take("a") == pytest.approx(0.5), "a refusal costs nothing"
    assert bucket.take("b") == 0.0
    clock.now_s += 0.5
    assert bucket.take("a") == 0.0
    assert bucket.take("a") > 0.0
    clock.now_s += 10 * BURST_S
    assert [bucket.take("a") for _ in range(burst)] == [0.0] * burst
    assert bucket.take("a") > 0.0


def test_a_rate_of_zero_is_no_limit() -> None:
    bucket = Bucket(0.0, Clock())
    assert not any(bucket.take("a") for _ in range(1000))


def test_buckets_that_are_used_least_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_MAX_BUCKETS", 3)
    bucket = Bucket(1.0, Clock())
    for key in ("a", "b", "c", "a", "d"):
        bucket.take(key)
    assert len(bucket) == 3
    assert [bucket.take("a") for _ in range(int(BURST_S) - 1)][-1] > 0.0


def user(name: str, role: Role = Role.USER) -> Principal:
    return Principal(roles=frozenset({role}), name=name)


def test_services_and_admins_have_no_rate() -> None:
    limited = Rates(Settings(expensive_per_s=1 / BURST_S))
    for exempt in (ROOT, user("n_1", Role.NODE), user("carol", Role.ADMIN)):
        for _ in range(3):
            limited.spend(exempt)
    limited.spend(user("ann"))
    with pytest.raises(RateLimitedError, match="ann has asked too often"):
        limited.spend(user("ann"))
    limited.spend(user("bob"))


async def answer(_: object, req: Request) -> int:
    return 42


async def asked(cluster: Cluster, service: Service, path: str, token: str) -> tuple[int, Any, str]:
    session = cluster.client(service).session
    headers = {"Authorization": f"Bearer {token}"}
    async with session.get(service.url + path, headers=headers) as reply:
        wait = reply.headers.get("Retry-After", "")
        return reply.status, await reply.json(content_type=None), wait


async def test_each_user_has_a_rate_of_expensive_routes(cluster: Cluster) -> None:
    settings = Settings(expensive_per_s=2 / BURST_S)
    service = Service("gcs", settings, token=TOKEN)
    ann, bob = (service.tokens.user(user(name), issued_at_s=0.0) for name in ("ann", "bob"))
    service.add_routes(
        (
            Route("GET", "/v1/dear", answer, roles=READERS, summary="Dear", cost="expensive"),
            Route("GET", "/v1/cheap", answer, roles=READERS, summary="Cheap"),
        ),
        None,
    )
    await cluster.start(service)
    for _ in range(2):
        assert (await asked(cluster, service, "/v1/dear", ann))[0] == 200
    status, problem, wait = await asked(cluster, service, "/v1/dear", ann)
    assert (status, problem["code"], problem["title"]) == (429, "rate_limited", "Too many requests")
    assert 0 < problem["extra"]["retry_after_s"] <= int(wait) <= BURST_S
    assert problem["retryable"]
    for path, token in (("/v1/cheap", ann), ("/v1/dear", bob), ("/v1/dear", TOKEN)):
        assert (await asked(cluster, service, path, token))[0] == 200


async def test_wrong_tokens_from_one_address_have_a_rate_and_right_ones_none(
    cluster: Cluster,
) -> None:
    service = cluster.service(failures_per_s=2 / BURST_S)
    await cluster.start(service)
    statuses = [(await asked(cluster, service, "/v1/x", "wrong"))[0] for _ in range(3)]
    assert statuses == [401, 401, 429]
    assert (await asked(cluster, service, "/v1/x", TOKEN))[0] == 404


def test_other_errors_are_not_counted() -> None:
    limited = Rates(Settings(failures_per_s=1 / BURST_S))
    for error in (ValueError(), UnauthorizedError(), ValueError()):
        assert limited.judge(error, "10.0.0.1") is error
    assert isinstance(limited.judge(UnauthorizedError(), "10.0.0.1"), RateLimitedError)
    assert isinstance(limited.judge(UnauthorizedError(), "10.0.0.2"), UnauthorizedError)
    assert isinstance(limited.judge(UnauthorizedError(), None), UnauthorizedError)
