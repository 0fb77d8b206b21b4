"""The tokens of people: created, listed and revoked. What is stored of one is its record and a hash.

They are signed (:mod:`stoker_wire.http.server.tokens`), so they end with the cluster's secret.
One that was lost cannot be shown again: it is revoked, and another is made.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_gcs.store.changes import Change, WriteConflict
from stoker_wire.errors import BadRequestError, UnauthorizedError
from stoker_wire.http.principals import Principal
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.common import ANY_NAMESPACE, Role
from stoker_wire.messages.control import CreateToken, ListQuery, Page, PersonRole, Token
from stoker_wire.messages.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.server.tokens import TokenSigner
    from stoker_wire.messages.control import Event

CACHE_SIZE = 4096
_RESERVED = ("job_", "stoker.")
_SERVICE_NAMES = frozenset({"cluster"})


class Tokens:
    """The tokens in SQL, with a cache of those in use."""

    def __init__(self, state: StateStore, signer: TokenSigner) -> None:
        self._state = state
        self._valid: set[str] = set()
        self.on_revoked: Callable[[str], object] = lambda _: None
        """Called with the id of a token that was revoked, here or at another replica."""
        self.signer = signer

    def _records(self, secret_hash: str) -> RecordTable[Token]:
        return RecordTable(
            schema.TOKENS,
            Token,
            lambda token: {
                "token_id": token.token_id,
                "secret_hash": secret_hash,
                "expires_at_s": token.expires_at_s,
                "revoked": int(token.revoked),
            },
            label="token",
        )

    def apply_event(self, event: Event) -> None:
        """Forget that a token is valid, once the event of its revocation arrives."""
        if event.kind == EventKind.TOKEN_USED:  # whoever used it waits for the answer
            self._valid.discard(event.subject)
        elif event.kind == EventKind.TOKEN_REVOKED:
            self._valid.discard(event.subject)
            self.on_revoked(event.subject)

    async def create(self, body: CreateToken, *, by: Principal, key: str | None) -> Token:
        """Create a token, which is in this reply and nowhere else; a repeated request gets it again.

        ``by`` is who asks, and ``key`` the Idempotency-Key: that of another makes another token.
        """
        if body.name in _SERVICE_NAMES:
            raise BadRequestError(
                f"name: {body.name!r} is the name of those who have the cluster's secret\n"
                "choose another",
                field="name",
            )
        for field, name in (("name", body.name), *(("namespaces", one) for one in body.namespaces)):
            if name.startswith(_RESERVED):
                raise BadRequestError(
                    f"{field}: {name!r} begins like the namespaces of jobs and of Stoker itself\n"
                    "choose another",
                    field=field,
                )
        of_machine = body.role is PersonRole.JOIN
        if of_machine and body.expires_in_s is None and not body.once:
            raise BadRequestError(
                "a join token gives the cluster's secret away, for ever\n"
                "give it an end (expires_in_s), or make it good once",
                field="expires_in_s",
            )
        if (body.once and not of_machine) or (body.namespaces and of_machine):
            raise BadRequestError(
                "once is for join tokens, namespaces are for people", field="role"
            )
        _check_run_as(body)
        seed = msgspec.json.encode([str(by), body, key or new_id(Prefix.REQUEST)])
        token_id = f"tok_{hashlib.sha256(seed).hexdigest()[:32]}"
        now = self._state.now()
        token = Token(
            token_id=token_id,
            name=body.name,
            role=body.role,
            namespaces=body.namespaces or _namespaces_of(body),
            created_at_s=now,
            created_by=str(by),
            expires_at_s=None if body.expires_in_s is None else now + body.expires_in_s,
            signed_by=self.signer.secret.id,
            once=body.once,
            run_as=body.run_as,
        )
        records = self._records(hashlib.sha256(token_id.encode()).hexdigest())
        event = self._state.event(EventKind.TOKEN_CREATED, token_id, token)
        try:
            await self._state.writer.apply(Change((records.insert(token),), (event,)))
        except WriteConflict:
            token = await self._state.get(records, token_id)
        return msgspec.structs.replace(token, secret=self._signed(token))

    def _signed(self, token: Token) -> str:
        principal = Principal(
            roles=frozenset({Role(token.role)}),
            name=token.name,
            namespaces=token.namespaces,
            token_id=token.token_id,
            expires_at_s=token.expires_at_s,
            run_as=token.run_as,
        )
        return self.signer.user(principal, issued_at_s=token.created_at_s)

    async def revoke(self, token_id: str) -> Token:
        """Refuse a token from now on."""
        row = await self._state.store.get(schema.TOKENS, {"token_id": token_id})
        records = self._records("" if row is None else row["secret_hash"])

        def rule(token: Token) -> Transition[Token] | None:
            if token.revoked:
                return None
            return Transition(msgspec.structs.replace(token, revoked=True), EventKind.TOKEN_REVOKED)

        token = await self._state.change(records, token_id, rule)
        self._valid.discard(token_id)
        return token

    async def use_to_join(self, token_id: str) -> tuple[str, ...]:
        """Return the cluster's secrets for a join token; UnauthorizedError if it was used up meanwhile."""
        row = await self._state.store.get(schema.TOKENS, {"token_id": token_id})
        records = self._records("" if row is None else row["secret_hash"])

        def rule(token: Token) -> Transition[Token]:
            if token.revoked:
                raise UnauthorizedError(
                    f"join token {token_id} was used or revoked\nmake another: stoker token create "
                    "NAME --role join",
                    field="Authorization",
                )
            used = msgspec.structs.replace(token, revoked=token.once)
            return Transition(used, EventKind.TOKEN_USED)

        await self._state.change(records, token_id, rule)
        self._valid.discard(token_id)
        return self.signer.secret.values

    async def is_revoked(self, token_id: str) -> bool:
        """Return whether a token was revoked."""
        found = await self._state.find(self._records(""), token_id)
        return found is not None and found.record.revoked

    async def page(self, query: ListQuery) -> Page[Token]:
        """Return a page of tokens, without secrets."""
        return await self._state.page(self._records(""), query, {})

    async def check_valid(self, principal: Principal) -> None:
        """Raise UnauthorizedError if a token is unknown here, or was revoked."""
        token_id = principal.token_id
        if token_id in self._valid:
            return
        found = await self._state.find(self._records(""), token_id)
        if found is None or found.record.revoked:
            state = "was revoked" if found is not None else "is unknown here"
            raise UnauthorizedError(
                f"this token of {principal} {state}\nmake another: stoker token create",
                field="Authorization",
            )
        if len(self._valid) >= CACHE_SIZE:
            self._valid.clear()
        self._valid.add(token_id)


def _check_run_as(body: CreateToken) -> None:
    """Raise BadRequestError for a Unix user whom no token may name, or of a token that runs nothing."""
    if body.run_as == "root":
        raise BadRequestError(
            "run_as: jobs do not run as root\ncreate a user of the nodes for them, and name that",
            field="run_as",
        )
    if body.run_as and body.role not in (PersonRole.USER, PersonRole.ADMIN):
        raise BadRequestError(
            f"run_as: a {body.role} token starts no jobs\nit is for --role user and admin",
            field="run_as",
        )


def _namespaces_of(body: CreateToken) -> tuple[str, ...]:
    """Return the namespaces of a token that names none: a user's is named like the user."""
    if body.role is PersonRole.JOIN:
        return ()
    return (body.name,) if body.role is PersonRole.USER else (ANY_NAMESPACE,)
