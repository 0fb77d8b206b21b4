"""Further tokens beside the cluster's own: created, checked and revoked; only hashes are kept.

A token's secret is derived from the cluster's token and the request's Idempotency-Key, so that a
retried creation gives the same secret without anybody having stored it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.state.records import Shelf, Step
from stoker_gcs.store.changes import Change, Clash
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.control import CreateToken, ListQuery, Page, Token

if TYPE_CHECKING:
    from stoker_gcs.state.records import Truth
    from stoker_wire.messages.control import Event

CACHE_SIZE = 1024


def hash_of(secret: str) -> str:
    """What is stored of a secret: it has 256 random bits, so a plain hash suffices."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Tokens:
    """See the module. Also the service's authenticator."""

    def __init__(self, truth: Truth, root: str) -> None:
        self._truth = truth
        self._root = root
        self._known: dict[str, Token] = {}

    def _shelf(self, secret_hash: str) -> Shelf[Token]:
        return Shelf(
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

    def observe(self, event: Event) -> None:
        """A revoked token must not be known for longer than its event takes to arrive."""
        if event.kind == "token.revoked":
            self._known.clear()

    async def create(self, body: CreateToken, *, key: str | None) -> Token:
        """Make a token; its secret is in this reply and nowhere else."""
        seed = key or new_id(Prefix.REQUEST)
        digest = hmac.new(self._root.encode(), f"token {seed}".encode(), hashlib.sha256).hexdigest()
        secret = f"stk_{digest}"
        token_id = f"tok_{hash_of(secret)[:16]}"
        now = self._truth.now()
        expires = None if body.expires_in_s is None else now + body.expires_in_s
        token = Token(token_id=token_id, name=body.name, created_at_s=now, expires_at_s=expires)
        shelf = self._shelf(hash_of(secret))
        event = self._truth.event("token.created", token_id, token)
        try:
            await self._truth.journal.apply(Change((shelf.insert(token),), (event,)))
        except Clash:
            token = await self._truth.get(shelf, token_id)
        return msgspec.structs.replace(token, secret=secret)

    async def revoke(self, token_id: str) -> Token:
        """Refuse a token from now on."""
        row = await self._truth.store.get(schema.TOKENS, {"token_id": token_id})
        shelf = self._shelf("" if row is None else row["secret_hash"])

        def rule(token: Token) -> Step[Token] | None:
            if token.revoked:
                return None
            return Step(msgspec.structs.replace(token, revoked=True), "token.revoked")

        return await self._truth.change(shelf, token_id, rule)

    async def page(self, query: ListQuery) -> Page[Token]:
        """One page of tokens, without secrets."""
        return await self._truth.page(self._shelf(""), query, {})

    async def principal(self, token: str) -> str | None:
        """Who a bearer token belongs to; None if unknown, revoked or expired."""
        if not token.startswith("stk_"):
            return None
        secret_hash = hash_of(token)
        known = self._known.get(secret_hash)
        if known is None:
            rows = await self._truth.store.select(
                schema.TOKENS, {"secret_hash": secret_hash, "revoked": 0}, limit=1
            )
            if not rows:
                return None
            known = self._shelf(secret_hash).kept(rows[0]).record
            if len(self._known) >= CACHE_SIZE:
                self._known.clear()
            self._known[secret_hash] = known
        if known.expires_at_s is not None and known.expires_at_s <= self._truth.now():
            return None
        return f"token {known.name} ({known.token_id})"
