"""A person's token, and a job's, reach what is theirs: the attacks of the review, and who owns what."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_gcs.registry import access
from stoker_gcs.service import serve
from stoker_wire.errors import BadRequestError, ForbiddenError, StokerError, UnauthorizedError
from stoker_wire.http.auth import channel_proof, write_private
from stoker_wire.http.client.client import Client
from stoker_wire.http.cluster_secret import ClusterSecret, secret_id
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.cluster import Demand, LeaseKind, RegisteredNode
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.control import (
    SECRET_PATH,
    Campaign,
    ChannelReview,
    CreateToken,
    Event,
    IdMatches,
    JoinReply,
    KvPut,
    KvReply,
    Leader,
    Page,
    PersonRole,
    ReviewChannel,
    SecretStatus,
    Token,
)
from stoker_wire.messages.work import (
    DETACHED_JOB,
    Actor,
    AttachDriver,
    CreateActor,
    FinishJob,
    Job,
    JobState,
    KillActor,
    SubmitJob,
)
from tests.contract.gcs_support import PATIENT, TOKEN, a_node, eventually, register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from stoker_gcs.service import Running

    As = Callable[..., Awaitable[Client]]


@pytest.fixture
async def as_(served: tuple[Running, Client]) -> AsyncIterator[As]:
    """Clients of people, by name and role, and (``token``) of whoever has one."""
    running, root = served
    async with AsyncExitStack() as stack:

        async def client(
            name: str = "", role: str = "user", token: str = "", **more: Any
        ) -> Client:
            if not token:
                body = CreateToken(name=name, role=PersonRole(role), **more)
                made = await root.call("POST", "/v1/tokens", body, reply=Token)
                token = made.secret
            return await stack.enter_async_context(
                Client(running.url, token=token, peer="test", timeout_s=30.0)
            )

        yield client


async def attach(client: Client, **more: Any) -> Job:
    body = AttachDriver(pid=7, hostname="here", **more)
    return await client.call("POST", "/v1/jobs/attach", body, reply=Job)


async def create_actor(client: Client, job: Job, **more: Any) -> Actor:
    demand = Demand(job_id=job.job_id, kind=LeaseKind.ACTOR, resources={})
    given = {"actor_id": f"a_{job.job_id[4:]}", "namespace": job.namespace, **more}
    body = CreateActor(demand=demand, class_name="A", payload=b"", **given)
    return await client.call("POST", "/v1/actors", body, reply=Actor)


async def test_a_persons_token_becomes_the_clusters_in_none_of_the_four_ways(
    client: Client, as_: As
) -> None:
    await register(client)
    elected = Campaign(holder="p_1", url="http://127.0.0.1:9")
    await client.call("POST", "/v1/leaders/scheduler", elected, reply=Leader)
    alice = await as_("alice")
    job = await attach(alice)
    for attacker in (alice, await as_(token=job.token)):
        tries: list[tuple[str, str, object]] = [
            ("POST", "/v1/nodes", a_node("n_evil", "http://127.0.0.1:9")),
            ("POST", "/v1/nodes/n_1/leave", None),
            ("DELETE", "/v1/leaders/scheduler?holder=p_1", None),
            ("POST", "/v1/leaders/scheduler", Campaign(holder="p_2", url="http://127.0.0.1:9")),
            ("POST", "/v1/tokens", CreateToken(name="mallory", role=PersonRole.ADMIN)),
            ("GET", "/v1/tokens", None),
            ("POST", "/v1/nodes/n_1/drain", None),
        ]
        for method, path, body in tries:
            with pytest.raises(ForbiddenError, match="is not for"):
                await attacker.call(method, path.partition("?")[0], body)
    listed = await client.call("GET", "/v1/nodes", reply=Page[RegisteredNode | Any])
    assert len(listed.items) == 1


async def test_a_viewer_sees_no_value_of_an_environment_variable(client: Client, as_: As) -> None:
    body = SubmitJob(entrypoint="true", runtime_env=RuntimeEnv(env_vars={"KEY": "hidden"}))
    job = await client.call("POST", "/v1/jobs", body, reply=Job)
    viewer = await as_("dave", "viewer")
    for path in (f"/v1/jobs/{job.job_id}", "/v1/jobs", "/v1/events", "/v1/state"):
        shown = str(await viewer.call("GET", path, reply=dict))
        assert "KEY" in shown
        assert "hidden" not in shown, path
    async with asyncio.timeout(20):
        async for event in viewer.watch("/v1/events"):
            assert "hidden" not in str(event)
            if event.subject == job.job_id:
                break
    assert (await client.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)).runtime_env.env_vars == {
        "KEY": "hidden"
    }


async def test_the_token_of_a_job_is_in_no_list_and_no_event(client: Client, as_: As) -> None:
    job = await attach(await as_("alice"))
    assert job.token
    assert not (await client.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)).token
    events = await client.call("GET", "/v1/events", reply=Page[Event])
    assert job.token not in str(events)


async def test_a_user_sees_and_ends_what_is_theirs_an_admin_all_and_a_viewer_looks_on(
    client: Client, as_: As
) -> None:
    alice, bob = await as_("alice"), await as_("bob")
    carol, dave = await as_("carol", "admin"), await as_("dave", "viewer")
    hers, his = await attach(alice), await attach(bob)
    actor = await create_actor(alice, hers)
    path = f"/v1/jobs/{hers.job_id}"
    for who, seen in ((alice, {hers.job_id}), (bob, {his.job_id})):
        page = await who.call("GET", "/v1/jobs", reply=Page[Job])
        assert {one.job_id for one in page.items} == seen
    for who in (carol, dave, client):
        page = await who.call("GET", "/v1/jobs", reply=Page[Job])
        assert {one.job_id for one in page.items} == {hers.job_id, his.job_id}
        assert len((await who.call("GET", "/v1/actors", reply=Page[Actor])).items) == 1
    assert not (await bob.call("GET", "/v1/actors", reply=Page[Actor])).items
    assert len((await alice.call("GET", "/v1/actors", reply=Page[Actor])).items) == 1
    refused: list[tuple[str, str, object]] = [
        ("GET", path, None),
        ("POST", f"{path}/stop", None),
        ("DELETE", path, None),
        ("POST", f"{path}/finish", FinishJob(state=JobState.SUCCEEDED)),
        ("GET", f"{path}/logs", None),
        ("GET", f"{path}/output", None),
        ("GET", f"{path}/explain", None),
        ("GET", f"/v1/story/{hers.job_id}", None),
        ("GET", f"/v1/actors/{actor.actor_id}", None),
        ("POST", f"/v1/actors/{actor.actor_id}/kill", KillActor()),
        ("GET", f"/v1/kv/{hers.namespace}", None),
    ]
    for method, where, body in refused:
        with pytest.raises(ForbiddenError, match="is not user bob's"):
            await bob.call(method, where, body)
    for theirs in ({"job_id": hers.job_id}, {"namespace": hers.namespace}):
        found = await bob.call("GET", "/v1/actors", reply=Page[Actor], query=theirs)
        assert not found.items
    with pytest.raises(ForbiddenError):
        await create_actor(bob, hers, actor_id="a_2")
    with pytest.raises(ForbiddenError):
        await attach(bob, job_id=hers.job_id)
    ids = await bob.call("GET", "/v1/ids", reply=IdMatches, query={"prefix": "job_"})
    assert [match.id for match in ids.matches] == [his.job_id]
    with pytest.raises(ForbiddenError):
        await dave.call("POST", f"{path}/stop")
    assert (await carol.call("POST", f"{path}/stop", reply=Job)).state is JobState.STOPPED


async def test_what_others_do_is_in_no_event_that_a_user_gets(client: Client, as_: As) -> None:
    alice, bob = await as_("alice"), await as_("bob")
    hers = await attach(alice)
    await create_actor(alice, hers)
    await client.call("POST", "/v1/kv/ns", KvPut(key="k", value=b"secret"), reply=KvReply)
    got: list[Event] = []

    async def watch() -> None:
        async for event in bob.watch("/v1/events"):
            got.append(event)
            if event.kind == "job.finished":
                return

    watching = asyncio.create_task(watch())
    his = await attach(bob)
    await bob.call("POST", f"/v1/jobs/{his.job_id}/stop", reply=Job)
    async with asyncio.timeout(20):
        await watching
    assert {event.subject for event in got} == {his.job_id}
    page = await bob.call("GET", "/v1/events", reply=Page[Event])
    assert {event.subject for event in page.items} == {his.job_id}


async def test_names_belong_to_all_who_may_use_their_namespace(as_: As) -> None:
    alice = await as_("alice", namespaces=("team", "alice"))
    bob, eve = await as_("bob", namespaces=("team",)), await as_("eve")
    job = await attach(alice, namespace="team")
    await create_actor(alice, job, name="svc", detached=True)
    named = "/v1/named-actors/team/svc"
    assert (await bob.call("GET", named, reply=Actor)).name == "svc"
    with pytest.raises(ForbiddenError, match=r"(?s)namespace 'team' is not user eve's.*eve"):
        await eve.call("GET", named)
    await bob.call("POST", "/v1/kv/team", KvPut(key="k", value=b"v"), reply=KvReply)
    assert await alice.call("GET", "/v1/kv/team/k", raw=True) == b"v"
    for body in (
        AttachDriver(pid=7, hostname="here", namespace="team"),
        SubmitJob(entrypoint="true", namespace="team"),
    ):
        path = "/v1/jobs/attach" if isinstance(body, AttachDriver) else "/v1/jobs"
        with pytest.raises(ForbiddenError, match="may not use 'team'"):
            await eve.call("POST", path, body)


async def test_a_job_changes_what_is_its_own_or_of_its_children_and_sees_what_its_user_does(
    as_: As,
) -> None:
    alice = await as_("alice")
    one, other = await attach(alice), await attach(alice)
    job = await as_(token=one.token)
    assert (await job.call("GET", f"/v1/jobs/{other.job_id}", reply=Job)).job_id == other.job_id
    with pytest.raises(ForbiddenError):
        await job.call("POST", f"/v1/jobs/{other.job_id}/stop")
    child = await job.call("POST", "/v1/jobs", SubmitJob(entrypoint="true"), reply=Job)
    assert (child.user, child.parent_job_id, child.namespaces) == (
        "alice",
        one.job_id,
        (one.namespace, "alice"),
    )
    stopped = await job.call("POST", f"/v1/jobs/{child.job_id}/stop", reply=Job)
    assert stopped.state is JobState.STOPPED
    await job.call("POST", f"/v1/kv/{one.namespace}", KvPut(key="k", value=b"v"), reply=KvReply)


async def test_nobody_gets_the_rights_of_others_by_a_detached_actor(
    client: Client, as_: As
) -> None:
    signer = TokenSigner(TOKEN)
    jobs, services = {}, {}
    for name in ("alice", "bob"):
        person = await as_(name)
        jobs[name] = job = await attach(person)
        made = await create_actor(person, job, name="svc", detached=True)
        services[name] = await as_(token=signer.job(DETACHED_JOB, made.actor_id))
        with pytest.raises(ForbiddenError, match="which is for detached actors"):
            await create_actor(
                person,
                msgspec.structs.replace(job, job_id=DETACHED_JOB, namespace=name),
                actor_id="a_x",
            )
    of_none = msgspec.structs.replace(jobs["alice"], job_id=DETACHED_JOB)
    child = await create_actor(services["alice"], of_none, actor_id="a_child")
    assert child.origin_job_id == jobs["alice"].job_id
    path = f"/v1/actors/{child.actor_id}"
    assert (await services["alice"].call("GET", path, reply=Actor)).actor_id == child.actor_id
    of_child = await as_(token=signer.job(DETACHED_JOB, child.actor_id))
    seen = await of_child.call("GET", "/v1/jobs", reply=Page[Job])
    assert [one.job_id for one in seen.items] == [jobs["alice"].job_id]
    for method, where in (("GET", path), ("POST", f"{path}/kill")):
        with pytest.raises(ForbiddenError):
            await services["bob"].call(method, where, None if method == "GET" else KillActor())
    found = await services["bob"].call("GET", "/v1/actors", reply=Page[Actor])
    assert child.actor_id not in {one.actor_id for one in found.items}


async def test_the_token_of_a_job_dies_with_it(as_: As, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "GRACE_S", 0.2)
    job = await attach(await as_("alice"))
    driver = await as_(token=job.token)
    await driver.call("POST", f"/v1/jobs/{job.job_id}/finish", FinishJob(state=JobState.SUCCEEDED))

    async def refused() -> bool:
        try:
            await driver.call("GET", "/v1/nodes")
        except UnauthorizedError as error:
            return f"{job.job_id} has ended" in str(error)
        return False

    await eventually(refused, "the token of the job that has ended is refused")
    unborn = await as_(token=TokenSigner(TOKEN).worker("w_1"))
    with pytest.raises(UnauthorizedError, match="no job yet"):
        await unborn.call("GET", "/v1/nodes")


async def test_a_revoked_token_ends_what_is_open_and_the_jobs_of_its_drivers(
    client: Client, as_: As
) -> None:
    alice = await as_("alice")
    job = await attach(alice)
    submitted = await alice.call("POST", "/v1/jobs", SubmitJob(entrypoint="true"), reply=Job)
    [token] = (await client.call("GET", "/v1/tokens", reply=Page[Token])).items

    open_ = asyncio.Event()

    async def watch() -> None:
        async for _ in alice.watch("/v1/events"):
            open_.set()

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(40):
        await open_.wait()
    await client.call("DELETE", f"/v1/tokens/{token.token_id}", reply=Token)
    async with asyncio.timeout(40):
        with pytest.raises(UnauthorizedError, match="user alice was revoked"):
            await watching
    done = await client.call("GET", f"/v1/jobs/{job.job_id}", reply=Job, query={"wait_s": 20})
    assert (done.state, token.token_id in done.message) == (JobState.FAILED, True)
    left = await client.call("GET", f"/v1/jobs/{submitted.job_id}", reply=Job)
    assert not left.state.terminal


async def test_the_key_of_anothers_request_gives_nothing_of_it_away(
    client: Client, as_: As
) -> None:
    alice, bob = await as_("alice"), await as_("bob", "admin")
    body = AttachDriver(pid=7, hostname="here")
    made = [
        await who.call("POST", "/v1/jobs/attach", body, reply=Job, idempotency_key="k")
        for who in (alice, bob, alice)
    ]
    assert made[0] == made[2]
    assert made[0].job_id != made[1].job_id
    secrets = [
        (await who.call("POST", "/v1/tokens", one, reply=Token, idempotency_key="k")).secret
        for who, one in (
            (client, CreateToken(name="x")),
            (client, CreateToken(name="x")),
            (client, CreateToken(name="x", role=PersonRole.ADMIN)),
            (bob, CreateToken(name="x")),
        )
    ]
    assert secrets[0] == secrets[1]
    assert len(set(secrets)) == 3


@pytest.mark.parametrize("name", ["cluster", "job_1", "stoker.actors", "", "a b", "x" * 201])
async def test_a_name_that_would_be_taken_for_anothers_is_refused(as_: As, name: str) -> None:
    with pytest.raises(BadRequestError, match="name"):
        await as_(name)
    with pytest.raises(BadRequestError, match="namespaces"):
        await as_("alice", namespaces=("team", "job_1"))


async def test_channels_between_jobs_are_for_one_user_or_one_namespace(
    served: tuple[Running, Client], as_: As
) -> None:
    alice = await as_("alice", namespaces=("team",))
    bob, eve = await as_("bob", namespaces=("team",)), await as_("eve")
    one, other = await attach(alice, namespace="team"), await attach(alice)
    jobs = {"one": one, "alices": other, "bobs": await attach(bob), "eves": await attach(eve)}
    asked = await as_(token=one.token)

    async def allowed(job: Job, proof: str) -> bool:
        review = ReviewChannel(job_id=job.job_id, peer_id="p_1", proof=proof)
        answer = await asked.call("POST", "/v1/channel-reviews", review, reply=ChannelReview)
        return answer.allowed

    found = {
        name: await allowed(job, channel_proof(job.token, "p_1")) for name, job in jobs.items()
    }
    assert found == {"one": True, "alices": True, "bobs": True, "eves": False}
    assert not await allowed(other, channel_proof(other.token, "p_2")), "a proof for another peer"
    assert not await allowed(other, channel_proof(jobs["eves"].token, "p_1"))


async def test_an_expired_token_is_refused(as_: As) -> None:
    late = await as_("late", expires_in_s=0.5)
    with contextlib.suppress(StokerError):
        await late.call("GET", "/v1/nodes")

    async def refused() -> bool:
        try:
            await late.call("GET", "/v1/nodes")
        except UnauthorizedError as error:
            return "has expired" in str(error)
        return False

    await eventually(refused, "the token has expired")


async def test_both_secrets_of_a_rotation_are_good_and_the_former_one_is_cut_off_at_its_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "token"
    write_private(path, f"{TOKEN}\n")
    signer = TokenSigner(ClusterSecret.of_file(path))
    former, following = TokenSigner(TOKEN), TokenSigner("the next secret")
    database = f"sqlite+aiosqlite:///{tmp_path / 'rotated.sqlite3'}"
    running = await serve(PATIENT, token=signer, database_url=database)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(running.stop, 0.5)

        async def client(token: str) -> Client:
            return await stack.enter_async_context(
                Client(running.url, token=token, peer="test", timeout_s=10.0)
            )

        root = await client(TOKEN)
        job = await attach(root)
        old, new = former.job(job.job_id), following.job(job.job_id)
        with pytest.raises(UnauthorizedError):
            await (await client(new)).call("GET", "/v1/nodes")
        write_private(path, f"the next secret\n{TOKEN}\n")
        signer.secret.look()
        for token in (old, new):
            # Whoever of two processes of the job has been renewed first: the gcs lets them in.
            asked = await client(token)
            for shown in (old, new):
                review = ReviewChannel(
                    job_id=job.job_id, peer_id="p_1", proof=channel_proof(shown, "p_1")
                )
                answer = await asked.call(
                    "POST", "/v1/channel-reviews", review, reply=ChannelReview
                )
                assert answer.allowed
        made = await root.call(
            "POST", "/v1/tokens", CreateToken(name="alice", role=PersonRole.USER), reply=Token
        )
        assert made.signed_by == secret_id("the next secret")
        status = await root.call("GET", SECRET_PATH, reply=SecretStatus)
        assert (status.signs, status.fixed) == (secret_id("the next secret"), False)
        assert status.accepts == (status.signs, secret_id(TOKEN))

        heard = {"old": 0, "new": 0}

        async def watch(name: str, token: str) -> None:
            reader = await client(token)
            with contextlib.suppress(StokerError):
                async for _ in reader.watch("/v1/events", 0, {}):
                    heard[name] += 1

        async def both_hear() -> bool:
            return all(heard.values())

        async with asyncio.TaskGroup() as group:
            of_old = group.create_task(watch("old", former.operator(60.0)))
            of_new = group.create_task(watch("new", following.operator(60.0)))
            await eventually(both_hear, "both watch")
            assert not of_old.done()
            write_private(path, "the next secret\n")
            signer.secret.look()
            await asyncio.wait_for(of_old, 40)
            assert not of_new.done()
            of_new.cancel()
        for token in (TOKEN, old, former.operator(60.0)):
            with pytest.raises(UnauthorizedError):
                await (await client(token)).call("GET", "/v1/nodes")
        proof = channel_proof(old, "p_1")
        review = ReviewChannel(job_id=job.job_id, peer_id="p_1", proof=proof)
        answer = await (await client(new)).call(
            "POST", "/v1/channel-reviews", review, reply=ChannelReview
        )
        assert not answer.allowed


async def test_a_join_token_becomes_the_secret_once_and_nothing_else(
    served: tuple[Running, Client], as_: As
) -> None:
    _, root = served
    for body in (
        CreateToken(name="m", role=PersonRole.JOIN),
        CreateToken(name="m", role=PersonRole.JOIN, once=True, namespaces=("team",)),
        CreateToken(name="m", once=True),
    ):
        with pytest.raises(BadRequestError):
            await root.call("POST", "/v1/tokens", body, reply=Token)
    once = CreateToken(name="m1", role=PersonRole.JOIN, once=True)
    made = await root.call("POST", "/v1/tokens", once, reply=Token)
    machine = await as_(token=made.secret)
    for path in ("/v1/nodes", "/v1/events", "/v1/tokens", SECRET_PATH):
        with pytest.raises(ForbiddenError):
            await machine.call("GET", path)
    with pytest.raises(ForbiddenError):
        await (await as_("ann", role="admin")).call("POST", "/v1/join", reply=JoinReply)

    async def joins(client: Client) -> bool:
        try:
            reply = await client.call("POST", "/v1/join", reply=JoinReply, retry=False)
        except UnauthorizedError:
            return False
        assert reply.secrets == (TOKEN,)
        return True

    tried = await asyncio.gather(*(joins(machine) for _ in range(8)))
    assert tried.count(True) == 1, "of those at the same moment one wins"
    assert not await joins(machine)
    events = await root.call("GET", "/v1/events", reply=Page[Event], query={"kind": "token.used"})
    (used,) = events.items
    assert used.subject == made.token_id and used.by is not None
    assert (used.by.name, used.by.role, used.by.address) == ("m1", "join", "127.0.0.1")
    assert TOKEN not in str(used.payload)

    many = CreateToken(name="m2", role=PersonRole.JOIN, expires_in_s=60.0)
    made = await root.call("POST", "/v1/tokens", many, reply=Token)
    machine = await as_(token=made.secret)
    assert await joins(machine) and await joins(machine)
    await root.call("DELETE", f"/v1/tokens/{made.token_id}")
    assert not await joins(machine)
    brief = CreateToken(name="m3", role=PersonRole.JOIN, expires_in_s=0.2)
    machine = await as_(token=(await root.call("POST", "/v1/tokens", brief, reply=Token)).secret)
    await asyncio.sleep(0.3)
    assert not await joins(machine)
