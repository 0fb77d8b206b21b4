"""One client per URL, and calls that follow the leader as it changes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import (
    ConflictError,
    DeadlineExceededError,
    NotLeaderError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.client.pool import ClientPool, LeaderClient
from stoker_wire.messages.common import Record
from stoker_wire.settings import Settings
from tests.services import ReservedPort
from tests.unit.wire.conftest import TOKEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from stoker_wire.http.server.service import Request, Service
    from tests.unit.wire.conftest import Cluster

TIMEOUT_S = 20.0


class Named(Record):
    name: str


class Candidate:
    """A service that leads or not, and counts how often it was asked."""

    def __init__(self, name: str, service: Service) -> None:
        self.name = name
        self.service = service
        self.asked = 0
        self.fails: Callable[[], StokerError | None] = lambda: None
        self.waits = False
        service.route(
            "POST", "/v1/x", self.answer, reply=Named, summary="Answer", idempotency=False
        )

    async def answer(self, _: Request) -> Named:
        self.asked += 1
        if self.waits:
            await asyncio.Event().wait()
        error = self.fails()
        if error is not None:
            raise error
        return Named(name=self.name)

    @property
    def url(self) -> str:
        return self.service.url


class Election:
    """Says who leads, and counts how often it was asked."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.looked_up = 0
        self.retries: list[bool] = []

    async def __call__(self, retry: bool) -> str:
        self.looked_up += 1
        self.retries.append(retry)
        if not self.urls:
            raise UnavailableError("no scheduler leads now")
        return self.urls.pop(0) if len(self.urls) > 1 else self.urls[0]


@pytest.fixture
async def pool() -> AsyncIterator[ClientPool]:
    settings = Settings(retry_initial_s=0.001, retry_max_s=0.01)
    made = ClientPool(token=TOKEN, peer="tester", settings=settings)
    yield made
    await made.close()


async def candidate(cluster: Cluster, name: str) -> Candidate:
    made = Candidate(name, cluster.service())
    await cluster.start(made.service)
    return made


async def ask(leader: LeaderClient, **options: Any) -> str:
    given = {"reply": Named, "timeout_s": TIMEOUT_S, "retry": False, **options}
    reply: Named = await leader.call("POST", "/v1/x", None, **given)
    return reply.name


def not_leader() -> StokerError:
    return NotLeaderError("another one leads")


async def test_one_client_per_url_and_all_are_closed(cluster: Cluster, pool: ClientPool) -> None:
    one = await candidate(cluster, "one")
    client = pool.client(one.url)
    assert pool.client(one.url) is client
    assert pool.client("http://127.0.0.1:1") is not client
    assert (await client.call("POST", "/v1/x", reply=Named)).name == "one"
    await pool.close()
    with pytest.raises(UnavailableError, match="are closed"):
        await client.call("POST", "/v1/x", reply=Named)
    assert pool.client(one.url) is not client


async def test_a_client_that_is_taken_out_is_the_callers(
    cluster: Cluster, pool: ClientPool
) -> None:
    one = await candidate(cluster, "one")
    client = pool.client(one.url)
    assert pool.pop(one.url) is client
    assert pool.pop(one.url) is None
    fresh = pool.client(one.url)
    await client.close()
    assert (await fresh.call("POST", "/v1/x", reply=Named)).name == "one"


@pytest.mark.parametrize("fail_over", [False, True])
async def test_the_leader_is_looked_up_once_and_remembered(
    cluster: Cluster, pool: ClientPool, fail_over: bool
) -> None:
    one = await candidate(cluster, "one")
    election = Election(one.url)
    leader = LeaderClient("scheduler", pool, election, fail_over=fail_over)
    assert [await ask(leader), await ask(leader)] == ["one", "one"]
    assert (election.looked_up, election.retries) == (1, [False])


@pytest.mark.parametrize("fail_over", [False, True])
async def test_a_leader_that_no_longer_leads_is_looked_up_again(
    cluster: Cluster, pool: ClientPool, fail_over: bool
) -> None:
    old, new = await candidate(cluster, "old"), await candidate(cluster, "new")
    election = Election(old.url, new.url)
    leader = LeaderClient("scheduler", pool, election, fail_over=fail_over)
    assert await ask(leader) == "old"
    old.fails = not_leader
    assert [await ask(leader, retry=True), await ask(leader)] == ["new", "new"]
    assert (election.looked_up, election.retries) == (2, [False, True])


async def test_without_a_leader_that_says_so_the_call_ends(
    cluster: Cluster, pool: ClientPool
) -> None:
    one = await candidate(cluster, "one")
    one.fails = not_leader
    leader = LeaderClient("scheduler", pool, Election(one.url))
    with pytest.raises(NotLeaderError, match="no scheduler leads at the moment"):
        await ask(leader)
    assert one.asked == 3
    named = LeaderClient("scheduler", pool, Election(one.url), fail_over=True)
    with pytest.raises(UnavailableError, match=f"the scheduler at {one.url} does not answer") as at:
        await ask(named)
    assert "another one leads" in str(at.value)


async def test_a_look_up_that_fails_is_the_callers_error(pool: ClientPool) -> None:
    leader = LeaderClient("scheduler", pool, Election())
    with pytest.raises(UnavailableError, match="no scheduler leads now"):
        await ask(leader)


async def test_an_error_of_the_leader_itself_is_raised_at_once(
    cluster: Cluster, pool: ClientPool
) -> None:
    one = await candidate(cluster, "one")
    one.fails = lambda: ConflictError("taken")
    election = Election(one.url)
    leader = LeaderClient("scheduler", pool, election, fail_over=True)
    with pytest.raises(ConflictError, match="taken"):
        await ask(leader)
    assert (one.asked, election.looked_up) == (1, 1)


async def test_a_silent_leader_is_the_callers_error_and_looked_up_at_the_next_call(
    cluster: Cluster, pool: ClientPool
) -> None:
    port = ReservedPort()
    one = await candidate(cluster, "one")
    election = Election(f"http://127.0.0.1:{port}", one.url)
    leader = LeaderClient("scheduler", pool, election)
    with pytest.raises(UnavailableError, match="got no answer"):
        await ask(leader)
    assert await ask(leader) == "one"
    one.waits = True
    with pytest.raises(DeadlineExceededError):
        await ask(leader, timeout_s=0.1)


async def test_fail_over_asks_a_new_leader_at_once(cluster: Cluster, pool: ClientPool) -> None:
    port = ReservedPort()
    one = await candidate(cluster, "one")
    election = Election(f"http://127.0.0.1:{port}", one.url)
    assert await ask(LeaderClient("scheduler", pool, election, fail_over=True)) == "one"
    assert election.looked_up == 2


async def test_fail_over_names_the_leader_that_does_not_answer(
    cluster: Cluster, pool: ClientPool
) -> None:
    one = await candidate(cluster, "one")
    one.waits = True
    leader = LeaderClient("scheduler", pool, Election(one.url), fail_over=True)
    with pytest.raises(UnavailableError) as caught:
        await ask(leader, timeout_s=0.1)
    assert str(caught.value) == (
        f"the scheduler at {one.url} does not answer.\n"
        f"the scheduler at {one.url} did not answer within 0.1 s"
    )
    assert one.asked == 1


async def test_what_others_know_of_the_leader_comes_first(
    cluster: Cluster, pool: ClientPool
) -> None:
    one, two = await candidate(cluster, "one"), await candidate(cluster, "two")
    known = {"url": one.url}
    election = Election(two.url)
    leader = LeaderClient(
        "scheduler", pool, election, last_known=lambda: known["url"], fail_over=True
    )
    assert await ask(leader) == "one"
    one.fails = not_leader
    assert await ask(leader) == "two"
    known["url"] = ""
    assert await ask(leader) == "two"
    assert election.looked_up == 2
