"""Further tokens beside the cluster's own: created, checked and revoked; only hashes are stored.

A token's secret is derived from the cluster's token and the request's Idempotency-Key, so that a
retried creation gives the same secret although it is stored nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_gcs.store.changes import Change, WriteConflict
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.control import CreateToken, ListQuery, Page, Token
from stoker_wire.messages.events import EventKind

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.control import Event

CACHE_SIZE = 1024


def hash_secret(secret: str) -> str:
    """Return the stored form of a secret: it has 256 random bits, so a plain hash suffices."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Tokens:
    """The tokens in SQL, with a cache of those in use; also the service's authenticator."""

    def __init__(self, state: StateStore, root: str) -> None:
        self._state = state
        self._root = root
        self._cache: dict[str, Token] = {}

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
        """Empty the cache on a revocation, so that the token is refused as soon as its event arrives."""
        if event.kind == EventKind.TOKEN_REVOKED:
            self._cache.clear()

    async def create(self, body: CreateToken, *, key: str | None) -> Token:
        """Create a token; its secret is in this reply and nowhere else."""
        seed = key or new_id(Prefix.REQUEST)
        digest = hmac.new(self._root.encode(), f"token {seed}".encode(), hashlib.sha256).hexdigest()
        secret = f"stk_{digest}"
        token_id = f"tok_{hash_secret(secret)[:16]}"
        now = self._state.now()
        expires = None if body.expires_in_s is None else now + body.expires_in_s
        token = Token(token_id=token_id, name=body.name, created_at_s=now, expires_at_s=expires)
        records = self._records(hash_secret(secret))
        event = self._state.event(EventKind.TOKEN_CREATED, token_id, token)
        try:
            await self._state.writer.apply(Change((records.insert(token),), (event,)))
        except WriteConflict:
            token = await self._state.get(records, token_id)
        return msgspec.structs.replace(token, secret=secret)

    async def revoke(self, token_id: str) -> Token:
        """Refuse a token from now on."""
        row = await self._state.store.get(schema.TOKENS, {"token_id": token_id})
        records = self._records("" if row is None else row["secret_hash"])

        def rule(token: Token) -> Transition[Token] | None:
            if token.revoked:
                return None
            return Transition(msgspec.structs.replace(token, revoked=True), EventKind.TOKEN_REVOKED)

        return await self._state.change(records, token_id, rule)

    async def page(self, query: ListQuery) -> Page[Token]:
        """Return a page of tokens, without secrets."""
        return await self._state.page(self._records(""), query, {})

    async def principal(self, token: str) -> str | None:
        """Return the name of a bearer token; None if it is unknown, revoked or expired."""
        if not token.startswith("stk_"):
            return None
        secret_hash = hash_secret(token)
        known = self._cache.get(secret_hash)
        if known is None:
            rows = await self._state.store.select(
                schema.TOKENS, {"secret_hash": secret_hash, "revoked": 0}, limit=1
            )
            if not rows:
                return None
            known = self._records(secret_hash).decode(rows[0]).record
            if len(self._cache) >= CACHE_SIZE:
                self._cache.clear()
            self._cache[secret_hash] = known
        if known.expires_at_s is not None and known.expires_at_s <= self._state.now():
            return None
        return f"token {known.name} ({known.token_id})"


def user_of(principal: str) -> str:
    """Return the name of the token with which a request came; the cluster's own is ``cluster``."""
    return principal.removeprefix("token ").rpartition(" (")[0] or principal
