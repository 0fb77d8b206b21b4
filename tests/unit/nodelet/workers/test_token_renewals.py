"""Workers and drivers of a node get tokens of the new secret, and count as behind until they have them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stoker_nodelet.workers import token_renewals
from stoker_nodelet.workers.token_renewals import TokenRenewals
from stoker_wire.errors import ConflictError
from stoker_wire.http.auth import load_token, write_private
from stoker_wire.http.cluster_secret import ClusterSecret
from stoker_wire.http.server.tokens import TokenSigner

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def process(signer: TokenSigner, token_file: Path | None = None) -> Any:
    served = SimpleNamespace(token=lambda identity: identity.tokens.job("job_1"))
    return SimpleNamespace(
        served=served, job_token=signer.job("job_1"), token_file=token_file, pid=7
    )


async def test_all_who_have_a_job_are_renewed_and_one_that_refuses_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_renewals, "_AGAIN_S", 0.01)
    monkeypatch.setattr(token_renewals, "FOLLOWED_S", 0.01)
    path = tmp_path / "token"
    write_private(path, "first\n")
    signer = TokenSigner(ClusterSecret.of_file(path))
    driver_file = tmp_path / "w_driver"
    write_private(driver_file, signer.job("job_1"))
    fresh = process(signer)
    fresh.served, fresh.job_token = None, ""
    living = {
        "w_busy": process(signer),
        "w_idle": process(signer),
        "w_driver": process(signer, driver_file),
        "w_fresh": fresh,
    }
    refusals, given = ["w_busy", "w_busy"], []

    def client_of(one: Any) -> Any:
        worker_id = next(name for name, known in living.items() if known is one)

        async def call(method: str, route: str, body: Any, **_: Any) -> None:
            assert (method, route) == ("POST", "/v1/token")
            if worker_id in refusals:
                refusals.remove(worker_id)
                raise ConflictError("not yet")
            given.append((worker_id, body.token))

        return SimpleNamespace(call=call)

    identity = SimpleNamespace(tokens=signer, node_id="n_1")
    processes: Any = SimpleNamespace(identity=identity, living=living, client_of=client_of)
    renewals = TokenRenewals(processes)
    assert renewals.behind() == ()
    write_private(path, "second\nfirst\n")
    signer.secret.look()
    assert len(renewals.behind()) == 3
    assert "worker w_busy (pid 7) on node n_1" in renewals.behind()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(renewals.run())
        async with asyncio.timeout(10):
            while renewals.behind():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
    token = TokenSigner("second").job("job_1")
    assert sorted(given) == [("w_busy", token), ("w_idle", token)]
    assert load_token(driver_file) == token
