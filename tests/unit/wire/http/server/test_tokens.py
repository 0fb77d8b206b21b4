"""Tokens are made and checked by the cluster's secret alone, and say no more than for whom they are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import jwt
import pytest

from stoker_wire.errors import UnauthorizedError
from stoker_wire.http.auth import write_private
from stoker_wire.http.cluster_secret import ClusterSecret
from stoker_wire.http.principals import ROOT, Principal
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.common import Role

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "a secret of the length that a secret has"


@pytest.fixture
def signer() -> TokenSigner:
    return TokenSigner(SECRET)


def test_what_is_signed_is_read_back(signer: TokenSigner) -> None:
    node = signer.verify(signer.service(Role.NODE, "n_1"))
    assert (node.role, node.name, str(node)) == (Role.NODE, "n_1", "node n_1")
    job = signer.verify(signer.job("job_1"))
    assert (job.role, job.job_id, str(job)) == (Role.JOB, "job_1", "job job_1")
    assert signer.verify(signer.job("job_detached", "a_1")).actor_id == "a_1"
    assert signer.verify(signer.worker("w_1")).worker_id == "w_1"
    person = Principal(
        roles=frozenset({Role.USER}), name="alice", namespaces=("team",), token_id="tok_1"
    )
    assert signer.verify(signer.user(person, issued_at_s=1.0)) == person


def test_the_secret_itself_has_every_role(signer: TokenSigner) -> None:
    assert signer.verify(SECRET) is ROOT
    assert ROOT.roles == set(Role)


def test_a_job_has_one_token_whichever_service_makes_it(signer: TokenSigner) -> None:
    assert signer.job("job_1") == TokenSigner(SECRET).job("job_1") != signer.job("job_2")


def test_tokens_of_other_clusters_and_forged_ones_are_refused(signer: TokenSigner) -> None:
    other = TokenSigner("another secret of some length")
    claims = {"aud": "stoker", "role": "admin", "sub": "eve"}
    unsigned = jwt.encode(claims, None, "none")
    body = signer.service(Role.ADMIN, "x").split(".")
    stolen = signer.job("job_1").rpartition(".")[2]
    for token in (
        "",
        "x",
        "a.b.c",
        SECRET[:-1],
        other.service(Role.NODE, "n_1"),
        unsigned,
        jwt.encode(claims, SECRET, "HS256"),  # the secret signs nothing: a key derived from it does
        f"{body[0]}.{body[1]}.{stolen}",
        f"{body[0]}.{body[1]}.",
    ):
        with pytest.raises(UnauthorizedError, match="not one of the cluster's"):
            signer.verify(token)


def test_an_expired_token_is_refused_although_it_was_good_before(
    signer: TokenSigner, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    token = signer.user(
        Principal(roles=frozenset({Role.USER}), name="alice", expires_at_s=now + 10),
        issued_at_s=now,
    )
    assert signer.verify(token).name == "alice"
    monkeypatch.setattr(time, "time", lambda: now + 11)
    with pytest.raises(UnauthorizedError, match="user alice has expired"):
        signer.verify(token)


def test_the_first_of_two_secrets_signs_and_what_either_has_signed_is_good(tmp_path: Path) -> None:
    path = tmp_path / "token"
    next_secret = "the next secret, of some length"
    former, following = TokenSigner(SECRET), TokenSigner(next_secret)
    write_private(path, f"{SECRET}\n{next_secret}\n")
    signer = TokenSigner(ClusterSecret.of_file(path))
    credential = signer.service_credential(Role.GCS, "gcs_1")
    assert credential.token == former.service(Role.GCS, "gcs_1")
    for one in (former, following):
        assert signer.verify(one.job("job_1")).job_id == "job_1"
        assert signer.verify(one.operator(60.0)).role is Role.ADMIN
    assert signer.verify(SECRET) is signer.verify(next_secret) is ROOT
    assert signer.job_tokens("job_1") == (former.job("job_1"), following.job("job_1"))

    write_private(path, f"{next_secret}\n{SECRET}\n")
    signer.secret.look()
    assert signer.job("job_1") == following.job("job_1")
    assert credential.token == following.service(Role.GCS, "gcs_1")
    assert signer.verify(former.job("job_1")).job_id == "job_1"

    write_private(path, f"{next_secret}\n")
    signer.secret.look()
    assert signer.verify(following.job("job_1")).job_id == "job_1"
    for token in (SECRET, former.job("job_1"), former.operator(60.0)):
        with pytest.raises(UnauthorizedError):
            signer.verify(token)
