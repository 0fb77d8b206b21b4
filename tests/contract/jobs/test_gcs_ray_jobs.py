"""Ray's job API over plain HTTP and WebSocket; the real client is in ``tests/interop/test_ray.py``."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from stoker_gcs.api.ray_jobs.mapping import submission
from stoker_gcs.api.ray_jobs.types import RaySubmit
from stoker_wire.errors import BadRequestError
from stoker_wire.http.principals import Principal
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.common import Role, RuntimeEnv
from stoker_wire.messages.work import Job
from tests.contract.gcs_support import TOKEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.service import Running
    from stoker_wire.http.client.client import Client


@asynccontextmanager
async def session(running: Running, token: str = TOKEN) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(running.url, headers=headers) as made:
        yield made


async def ask(http: aiohttp.ClientSession, method: str, path: str, **more: Any) -> tuple[int, Any]:
    async with http.request(method, path, **more) as reply:
        if reply.content_type == "text/plain":
            return reply.status, await reply.text()
        return reply.status, await reply.json()


def user(name: str) -> str:
    principal = Principal(roles=frozenset({Role.USER}), name=name, namespaces=(name,))
    return TokenSigner(TOKEN).user(principal, issued_at_s=0.0)


async def test_a_job_is_submitted_shown_stopped_and_deleted(served: tuple[Running, Client]) -> None:
    running, client = served
    async with session(running) as http:
        assert (await ask(http, "GET", "/api/version"))[1]["ray_version"].startswith("2.")
        body = {
            "entrypoint": "true",
            "submission_id": "mine",
            "metadata": {"a": "b"},
            "entrypoint_num_cpus": 1,
            "entrypoint_memory": 1000,
            "entrypoint_resources": {"disk": 2},
            "runtime_env": {"env_vars": {"X": "1"}, "pip": {"packages": ["x"]}, "excludes": []},
        }
        assert await ask(http, "POST", "/api/jobs/", json=body) == (
            200,
            {"job_id": "mine", "submission_id": "mine"},
        )
        made = await client.call("GET", "/v1/jobs/job_mine", reply=Job)
        assert made.resources == {"CPU": 1.0, "memory": 1000.0, "disk": 2.0}
        assert made.runtime_env.pip == ("x",)
        for name in ("mine", "job_mine"):
            status, shown = await ask(http, "GET", f"/api/jobs/{name}")
            assert (status, shown["submission_id"], shown["status"]) == (200, "mine", "PENDING")
            assert shown["metadata"] == {"a": "b"}
        assert [one["submission_id"] for one in (await ask(http, "GET", "/api/jobs/"))[1]] == [
            "mine"
        ]
        assert await ask(http, "GET", "/api/jobs/mine/logs") == (200, {"logs": ""})
        status, text = await ask(http, "DELETE", "/api/jobs/mine")
        assert (status, text.splitlines()[0]) == (409, "job job_mine is PENDING.")
        for stopped in (True, False):
            assert await ask(http, "POST", "/api/jobs/mine/stop") == (200, {"stopped": stopped})
        async with http.ws_connect("/api/jobs/mine/logs/tail") as ws:
            assert (await ws.receive(timeout=40)).type is aiohttp.WSMsgType.CLOSE
        assert await ask(http, "DELETE", "/api/jobs/mine") == (200, {"deleted": True})
        assert (await ask(http, "GET", "/api/jobs/mine"))[0] == 404


async def test_a_package_is_stored_once_and_is_its_users_alone(
    served: tuple[Running, Client],
) -> None:
    running, client = served
    path = "/api/packages/gcs/_ray_pkg_12.zip"
    uri = "gcs://_ray_pkg_12.zip"
    body = {"entrypoint": "true", "submission_id": "p", "runtime_env": {"working_dir": uri}}
    async with session(running) as http:
        assert (await ask(http, "GET", path))[0] == 404
        assert (await ask(http, "POST", "/api/jobs/", json=body))[0] == 404
        for _ in range(2):
            assert (await ask(http, "PUT", path, data=b"zip"))[0] == 200
        assert (await ask(http, "GET", path))[0] == 200
        assert (await ask(http, "PUT", "/api/packages/s3/a.zip", data=b"zip"))[0] == 404
        assert (await ask(http, "POST", "/api/jobs/", json=body))[0] == 200
    env = (await client.call("GET", "/v1/jobs/job_p", reply=Job)).runtime_env
    assert env.working_dir is not None
    assert len(env.working_dir) == 64
    async with session(running, user("bob")) as http:
        assert (await ask(http, "GET", path))[0] == 404


async def test_the_job_of_another_user_is_not_to_be_had_by_either_of_its_names(
    served: tuple[Running, Client],
) -> None:
    running, _ = served
    body = {"entrypoint": "true", "submission_id": "hers"}
    async with session(running, user("ann")) as http:
        assert (await ask(http, "POST", "/api/jobs/", json=body))[0] == 200
        assert (await ask(http, "GET", "/api/jobs/hers"))[0] == 200
    async with session(running, user("bob")) as http:
        assert await ask(http, "GET", "/api/jobs/") == (200, [])
        for name in ("hers", "job_hers"):
            for method, path in (
                ("GET", ""),
                ("GET", "/logs"),
                ("POST", "/stop"),
                ("DELETE", ""),
            ):
                assert (await ask(http, method, f"/api/jobs/{name}{path}"))[0] == 403, (name, path)
    async with session(running, user("ann")) as http:
        assert (await ask(http, "GET", "/api/jobs/hers"))[1]["status"] == "PENDING"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"runtime_env": {"mpi": {}}}, "runtime_env has no key 'mpi'"),
        ({"runtime_env": {"working_dir": "https://x/y.zip"}}, "is no uploaded package"),
        ({"runtime_env": {"py_modules": "gcs://x"}}, "runtime_env.py_modules: expected a list"),
        ({"entrypoint_num_cpus": -1}, "entrypoint_num_cpus"),
        ({"submission_id": "a b"}, "job_id"),
        ({"nonsense": 1}, "unknown field 'nonsense'"),
    ],
)
async def test_bad_input_is_a_text_that_names_the_field(
    served: tuple[Running, Client], more: dict[str, Any], says: str
) -> None:
    async with session(served[0]) as http:
        status, text = await ask(http, "POST", "/api/jobs/", json={"entrypoint": "true", **more})
    assert status == 400
    assert says in text
    async with session(served[0], "wrong") as http:
        status, text = await ask(http, "GET", "/api/version")
    assert (status, text[:4]) == (401, "this")


@pytest.mark.parametrize(
    ("conda", "taken"),
    [
        ("mine", RuntimeEnv(conda="mine")),
        ({"dependencies": ["x"]}, RuntimeEnv(conda_file='{"dependencies":["x"]}')),
        ("dependencies:\n- x\n", RuntimeEnv(conda_file="dependencies:\n- x\n")),
    ],
)
def test_conda_is_taken_as_a_client_of_ray_gives_it(conda: Any, taken: RuntimeEnv) -> None:
    body = RaySubmit(entrypoint="true", runtime_env={"conda": conda})
    assert submission(body, {}).runtime_env == taken


def test_an_image_is_taken() -> None:
    body = RaySubmit(entrypoint="true", runtime_env={"image_uri": "localhost:5000/a/b@sha256:0"})
    assert submission(body, {}).runtime_env == RuntimeEnv(image_uri="localhost:5000/a/b@sha256:0")


@pytest.mark.parametrize(
    "image", ["-v", "a b", "a" * 501, "a;b"], ids=["option", "space", "long", "shell"]
)
def test_what_is_no_name_of_an_image_is_refused(image: str) -> None:
    body = RaySubmit(entrypoint="true", runtime_env={"image_uri": image})
    with pytest.raises(BadRequestError, match="image_uri"):
        submission(body, {})
