"""A driver gets the token that the new secret signs, and counts as behind until it has said so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.registry.jobs.driver_tokens import DriverTokens
from stoker_wire.http.auth import token_digest, write_private
from stoker_wire.http.cluster_secret import ClusterSecret
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.work import SESSION_BEAT, SessionMessage

if TYPE_CHECKING:
    from pathlib import Path


def opened(token: str, job_id: str, principal_job: str = "job_1") -> Any:
    http = SimpleNamespace(headers={"Authorization": f"Bearer {token}"})
    principal = SimpleNamespace(job_id=principal_job)
    return SimpleNamespace(path={"job_id": job_id}, principal=principal, http=http)


async def test_a_driver_is_behind_until_it_says_what_it_took(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_private(path, "first\n")
    signer = TokenSigner(ClusterSecret.of_file(path))
    tokens = DriverTokens(signer)
    session = tokens.of(opened(signer.job("job_1"), "job_1"))
    assert session is not None
    assert tokens.of(opened("x", "job_1", principal_job="job_2")) is None
    assert tokens.of(opened("first", "job_1", principal_job="")) is None
    sent: asyncio.Queue[str] = asyncio.Queue()
    ws: Any = SimpleNamespace(send_str=sent.put)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(tokens.renew(ws, session))
        await asyncio.sleep(0)
        assert tokens.behind() == ()
        for secrets in ("second\nfirst\n", "third\nsecond\n"):
            write_private(path, secrets)
            signer.secret.look()
            assert tokens.behind() == ("the driver of job_1",)
            message = msgspec.json.decode(await sent.get(), type=SessionMessage)
            assert message.token == signer.job("job_1")
            for text in (SESSION_BEAT, "{", '{"took": "another"}'):
                session.on_text(text)
                assert tokens.behind() == ("the driver of job_1",)
            answer = SessionMessage(took=token_digest(message.token))
            session.on_text(msgspec.json.encode(answer).decode())
            assert tokens.behind() == ()
        task.cancel()
    assert sent.empty()


async def test_a_driver_that_comes_back_with_the_former_token_gets_the_new_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "token"
    write_private(path, "second\nfirst\n")
    signer = TokenSigner(ClusterSecret.of_file(path))
    tokens = DriverTokens(signer)
    session = tokens.of(opened(TokenSigner("first").job("job_1"), "job_1"))
    assert session is not None
    sent: asyncio.Queue[str] = asyncio.Queue()
    ws: Any = SimpleNamespace(send_str=sent.put)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(tokens.renew(ws, session))
        assert signer.job("job_1") in await sent.get()
        task.cancel()
    assert tokens.behind() == (), "a session that has ended is waited for by nobody"
