"""Tokens: JSON Web Tokens (RFC 7519, HS256) that every service makes and checks by the cluster's secret.

Made for services (each sends its own, never the secret), for the processes of jobs, and by the gcs for
people. The signature proves that a token was made in this cluster, and its claims say for whom; whether
it was revoked since, or its job has ended, is known to the gcs alone (:class:`Authority`).
"""

from __future__ import annotations

import hmac
import math
import os
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import jwt

from stoker_wire.errors import UnauthorizedError
from stoker_wire.http.auth import Credential
from stoker_wire.http.cluster_secret import ClusterSecret, secret_of
from stoker_wire.http.principals import ROOT, Principal
from stoker_wire.messages.common import ANY_NAMESPACE, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

ALGORITHM = "HS256"
AUDIENCE = "stoker"
"""The ``aud`` of all tokens: one of another system that is signed by the same secret is none of ours."""
CACHED = 4096
"""Tokens whose signatures are not checked again: a request is checked by looking one up."""


class Use(StrEnum):
    """The use of a token: one for a session is no bearer's, nor the other way round."""

    BEARER = ""
    SESSION = "session"
    """In a cookie, for the page of a browser (:mod:`stoker_wire.http.dashboard.sessions`)."""
    LOGIN = "login"
    """To begin such a session, once it is in the link that a person opens."""


class Authority(Protocol):
    """The part that knows more of a token than its signature says (in the gcs)."""

    async def resolve(self, principal: Principal) -> Principal:
        """Return the principal with what the state says of it; UnauthorizedError if it has ended."""
        ...

    async def admit(
        self, principal: Principal, method: str, path: str, params: Mapping[str, str]
    ) -> None:
        """Raise ForbiddenError if the record that a request names is not the principal's."""
        ...


class TokenSigner:
    """Maker and verifier of the tokens of one cluster, for its services.

    The first of the secrets signs, and what any of them has signed is good.
    """

    def __init__(self, secret: str | ClusterSecret) -> None:
        self.secret = secret_of(secret)
        self._known: dict[tuple[str, Use], Principal] = {}
        self._keys: tuple[bytes, ...] = ()
        """What signs is derived from the secret, which so is a key for nothing else."""
        self._use_secrets()
        self.secret.on_change(self._use_secrets)

    def _use_secrets(self) -> None:
        self._keys = tuple(_key_of(one) for one in self.secret.values)
        self._known = {}

    def service(self, role: Role, name: str) -> str:
        """Return the token by which a service shows itself to others."""
        return self._sign({"role": role, "sub": name})

    def service_credential(self, role: Role, name: str) -> Credential:
        """Return that token for clients, which is renewed with the secret that signs."""
        credential = Credential(self.service(role, name))
        self.secret.on_change(lambda: credential.replace(self.service(role, name)))
        return credential

    def worker(self, worker_id: str) -> str:
        """Return the token by which a process and its nodelet know each other, before it has a job."""
        return self._sign({"role": Role.JOB, "worker": worker_id})

    def job(self, job_id: str, actor_id: str = "") -> str:
        """Return the token of the processes of a job, or of a detached actor."""
        return self._sign(_job_claims(job_id, actor_id))

    def job_tokens(self, job_id: str, actor_id: str = "") -> tuple[str, ...]:
        """Return all tokens that a process of a job may have: one for each secret."""
        claims = _job_claims(job_id, actor_id)
        return tuple(_signed(claims, key) for key in self._keys)

    def user(self, principal: Principal, *, issued_at_s: float) -> str:
        """Return the token of a person."""
        claims = _person_claims(principal, int(issued_at_s))
        if principal.expires_at_s is not None:
            claims["exp"] = principal.expires_at_s
        return self._sign(claims)

    def person(self, principal: Principal, use: Use, lifetime_s: float) -> str:
        """Return a token of a person for another use than a bearer's; it ends with theirs at the latest."""
        now_s = time.time()
        until_s = principal.expires_at_s
        claims = _person_claims(principal, int(now_s))
        claims |= {"use": use, "nonce": os.urandom(8).hex(), "until": until_s}
        return self._sign({**claims, "exp": min(now_s + lifetime_s, until_s or math.inf)})

    def names_of(self, what: str) -> tuple[str, ...]:
        """Return what something is called in this cluster and in no other: a name for each secret."""
        return tuple(hmac.digest(key, what.encode(), "sha256").hex()[:12] for key in self._keys)

    def operator(self, lifetime_s: float) -> str:
        """Return an admin's token for whoever has the secret, which so need not be sent."""
        now_s = time.time()
        operator = Principal(
            roles=frozenset({Role.ADMIN}), name=ROOT.name, expires_at_s=now_s + lifetime_s
        )
        return self.user(operator, issued_at_s=now_s)

    def _sign(self, claims: dict[str, Any]) -> str:
        return _signed(claims, self._keys[0])

    def verify(self, token: str, use: Use = Use.BEARER) -> Principal:
        """Return whose token it is; UnauthorizedError if it has expired, or is not for this use."""
        principal = self._known.get((token, use))
        if principal is None:
            principal = self._decoded(token, use)
            if use is Use.LOGIN:  # checked whole, each time: its own end is not the person's
                return principal
            if len(self._known) >= CACHED:
                self._known.clear()
            self._known[token, use] = principal
        if principal.expires_at_s is not None and principal.expires_at_s <= time.time():
            raise UnauthorizedError(
                f"this token of {principal} has expired\nmake another: stoker token create",
                field="Authorization",
            )
        return principal

    def _decoded(self, token: str, use: Use) -> Principal:
        shown = token.encode(errors="replace")  # a header may have any bytes
        if use is Use.BEARER and any(
            hmac.compare_digest(shown, one.encode()) for one in self.secret.values
        ):
            return ROOT
        for key in self._keys:
            try:
                # Its expiry is looked at with each request, and not only with the first.
                claims = jwt.decode(
                    token,
                    key,
                    [ALGORITHM],
                    audience=AUDIENCE,
                    options={"verify_exp": use is Use.LOGIN},
                )
                if claims.get("use", "") != use:
                    continue
                if use is Use.LOGIN:
                    claims["exp"] = claims["until"]
                return _principal_of(claims)
            except (jwt.InvalidTokenError, KeyError, TypeError, ValueError):
                continue
        raise UnauthorizedError(
            "this token is not one of the cluster's\n"
            "compare STOKER_TOKEN or the token file with the head node's",
            field="Authorization",
        )


def _key_of(secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"stoker token", "sha256")


def _signed(claims: dict[str, Any], key: bytes) -> str:
    return jwt.encode({"aud": AUDIENCE, **claims}, key, ALGORITHM)


def _job_claims(job_id: str, actor_id: str) -> dict[str, Any]:
    actor = {"actor": actor_id} if actor_id else {}
    return {"role": Role.JOB, "job": job_id, **actor}


def _person_claims(principal: Principal, issued_at_s: int) -> dict[str, Any]:
    claims: dict[str, Any] = {
        "role": principal.role,
        "sub": principal.name,
        "namespaces": list(principal.namespaces),
        "jti": principal.token_id,
        "iat": issued_at_s,
    }
    if principal.run_as:
        claims["run_as"] = principal.run_as
    return claims


def _principal_of(claims: dict[str, Any]) -> Principal:
    return Principal(
        roles=frozenset({Role(claims["role"])}),
        name=claims.get("sub", ""),
        job_id=claims.get("job", ""),
        actor_id=claims.get("actor", ""),
        worker_id=claims.get("worker", ""),
        namespaces=tuple(claims.get("namespaces", (ANY_NAMESPACE,))),
        token_id=claims.get("jti", ""),
        expires_at_s=claims.get("exp"),
        run_as=claims.get("run_as", ""),
    )
