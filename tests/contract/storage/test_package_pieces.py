"""Packages in pieces on every store: which are missing, and pieces that stay as long as a list names them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import pytest

from stoker_gcs.controllers import retention
from stoker_gcs.registry.kv.blobs import PACKAGES
from stoker_gcs.state import schema
from stoker_wire.data.piece_lists import (
    DIGEST_NBYTES,
    MARK,
    MAX_PIECES,
    FindMissing,
    MissingPackages,
    write_list,
)
from stoker_wire.errors import BadRequestError, NotFoundError
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.work import Job, JobState, SubmitJob
from tests.contract.gcs_support import PATIENT, gcs, migrate

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client

KEEP_S = 1000.0
SETTINGS = msgspec.structs.replace(PATIENT, keep_blobs_s=KEEP_S)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(retention, "EVERY_S", (3600.0, 3600.0))
    if request.param == "memory":
        return "memory://"
    made: str = request.getfixturevalue(f"{request.param}_url")
    await migrate(made)
    return made


def name(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def put(client: Client, content: bytes) -> str:
    await client.call("PUT", f"/v1/packages/{name(content)}", content)
    return name(content)


async def missing(client: Client, *hashes: str) -> tuple[str, ...]:
    body = FindMissing(hashes=hashes)
    return (await client.call("POST", "/v1/packages/missing", body, reply=MissingPackages)).hashes


async def test_a_list_is_taken_when_all_its_pieces_are_there(url: str) -> None:
    async with gcs(url, settings=SETTINGS) as (_, client):
        first, second = await put(client, b"1"), name(b"2")
        pieces = write_list((first, second))
        assert await missing(client, second, first, name(pieces)) == (second, name(pieces))
        with pytest.raises(BadRequestError, match=r"(?s)1 of the 2 pieces.*" + second):
            await put(client, pieces)
        assert await missing(client, name(pieces)) == (name(pieces),)
        await put(client, b"2")
        for _ in range(2):  # the same again is no error
            await put(client, pieces)
        assert await missing(client, first, second, name(pieces)) == ()
        assert await client.call("GET", f"/v1/packages/{name(pieces)}", raw=True) == pieces


async def test_what_is_asked_and_put_has_bounds(url: str) -> None:
    async with gcs(url, settings=SETTINGS) as (_, client):
        for hashes in ((), ("a",), ("a" * 64,) * (MAX_PIECES + 1)):
            with pytest.raises(BadRequestError):
                await missing(client, *hashes)
        for nbytes in (0, 31, DIGEST_NBYTES * (MAX_PIECES + 1)):
            with pytest.raises(BadRequestError, match="list of pieces is broken"):
                await put(client, MARK + bytes(nbytes))


@pytest.mark.parametrize("how", ["get", "head", "missing", "put"])
async def test_the_use_of_a_list_is_that_of_its_pieces(url: str, how: str) -> None:
    async with gcs(url, settings=SETTINGS) as (running, client):
        hashes = [await put(client, one) for one in (b"1", b"2")]
        content = write_list(tuple(hashes))
        listed = await put(client, content)
        other = await put(client, b"3")
        now_s = running.app.state.now
        running.app.state.now = lambda: now_s() + KEEP_S * 0.9  # type: ignore[method-assign]
        if how == "get":
            await client.call("GET", f"/v1/packages/{listed}", raw=True)
        elif how == "head":
            assert await running.app.blobs.size(PACKAGES, listed) == len(content)
        elif how == "missing":
            assert await missing(client, listed) == ()
        else:
            await put(client, content)
        running.app.state.now = lambda: now_s() + KEEP_S * 1.8  # type: ignore[method-assign]
        await running.app.retention.enforce()
        rows = await running.app.state.store.select(schema.BLOBS)
        assert {row["blob_id"] for row in rows} == {*hashes, listed}
        assert await missing(client, other) == (other,)
        running.app.state.now = lambda: now_s() + KEEP_S * 2  # type: ignore[method-assign]
        await running.app.retention.enforce()
        assert not await running.app.state.store.select(schema.BLOBS)


async def test_pieces_stay_while_a_job_names_their_list(url: str) -> None:
    settings = msgspec.structs.replace(SETTINGS, keep_blobs_s=0.01, keep_jobs_s=0.0)
    async with gcs(url, settings=settings) as (running, client):
        hashes = [await put(client, one) for one in (b"1", b"2")]
        listed = await put(client, write_list(tuple(hashes)))
        await put(client, b"3")
        now_s = running.app.state.now
        running.app.state.now = lambda: now_s() + 1.0  # type: ignore[method-assign]
        body = SubmitJob(entrypoint="true", runtime_env=RuntimeEnv(working_dir=listed))
        job = await client.call("POST", "/v1/jobs", body, reply=Job)
        await running.app.retention.enforce()
        rows = await running.app.state.store.select(schema.BLOBS)
        assert {row["blob_id"] for row in rows} == {*hashes, listed}
        stopped = await client.call("POST", f"/v1/jobs/{job.job_id}/stop", reply=Job)
        assert stopped.state is JobState.STOPPED
        running.app.state.now = lambda: now_s() + 2.0  # type: ignore[method-assign]
        await running.app.retention.enforce()
        assert not await running.app.state.store.select(schema.BLOBS)


async def test_a_list_that_lost_a_piece_is_not_there_until_it_is_put_again(url: str) -> None:
    async with gcs(url, settings=SETTINGS) as (running, client):
        piece = await put(client, b"1")
        listed = await put(client, write_list((piece,)))
        uses = await running.app.state.store.select(schema.BLOB_USES)
        used_at_s = {row["blob_id"]: row["used_at_s"] for row in uses}
        assert used_at_s[piece] >= used_at_s[listed]
        assert await running.app.blobs.delete(PACKAGES, piece, used_at_s=used_at_s[piece])
        now_s = running.app.state.now
        running.app.state.now = lambda: now_s() + KEEP_S / 2  # type: ignore[method-assign]
        assert await running.app.blobs.size(PACKAGES, listed) is None
        with pytest.raises(NotFoundError):
            await client.call("GET", f"/v1/packages/{piece}", raw=True)
        await put(client, b"1")
        await put(client, write_list((piece,)))
        assert await running.app.blobs.size(PACKAGES, listed)
