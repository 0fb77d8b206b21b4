"""The key-value store: small raw values by namespace and key, for rendezvous and user code.

Every change is one transaction with its event, whose sequence number is the key's revision. An operation
that depends on what the key holds is a rule (:mod:`stoker_gcs.registry.kv.rules`), written only if the key
still has the revision that the rule saw, and decided again if not. With it goes a row that remembers the
request, so that one that is sent again, to this replica or another, before or after a restart, gets the
first one's reply.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from stoker_gcs.registry.kv import rules
from stoker_gcs.registry.kv.quota import Quota
from stoker_gcs.state import schema
from stoker_gcs.store.changes import (
    Change,
    Delete,
    Expired,
    Insert,
    Prefix,
    Unexpired,
    Update,
    Upsert,
    WriteConflict,
)
from stoker_wire.errors import BadRequestError, IdempotencyError, PayloadTooLargeError, StokerError
from stoker_wire.messages.control import KvDelete, KvEntry, KvItem, KvPut, KvReply, Page
from stoker_wire.messages.events import KV_INLINE_NBYTES, EventKind, KvChange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Append, Condition, Operation, Row, Value
    from stoker_wire.messages.control import (
        KvAdd,
        KvCompareSet,
        KvDeletePrefix,
        KvGet,
    )
    from stoker_wire.messages.queries import KvListQuery
    from stoker_wire.settings import Settings

SWEEP_EVERY_S = 1.0
SWEEP_BATCH = 500
DELETE_BATCH = 100
REMEMBERED_S = 600.0
"""How long a request that is sent again is recognised: clients try for far less."""
MAX_NAME_BYTES = 2000
"""Of a namespace and a key: an index of PostgreSQL takes no more than 2704."""
_COUNTER_NBYTES = 20
_SHOWN = 100
_RETRY_PAUSE_S = 0.01
_ENTRY = ("namespace", "key", "nbytes", "revision", "expires_at_s")
_log = logging.getLogger(__name__)
_decode_reply = msgspec.msgpack.Decoder(KvReply).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A request that may be sent again: who sent it, where and under which key; and its body's hash."""

    name: str
    fingerprint: bytes


class KeyValues:
    """Values by namespace and key. The subject of a key's events is ``namespace/key``.

    ``clock`` says when keys expire (default: the state's).
    """

    def __init__(
        self, state: StateStore, settings: Settings, clock: Callable[[], float] | None = None
    ) -> None:
        self._state = state
        self._max_value_bytes = settings.kv_value_max_bytes
        self._quota = Quota(
            state,
            schema.KV,
            "namespace",
            max_count=settings.kv_namespace_max_keys,
            max_bytes=settings.kv_namespace_max_bytes,
            fix="delete keys, or raise STOKER_KV_NAMESPACE_MAX_KEYS or STOKER_KV_NAMESPACE_MAX_BYTES",
        )
        self._now = clock or state.now
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def put(self, namespace: str, body: KvPut, request: RequestKey | None = None) -> KvReply:
        """Set a key; ConflictError, with its revision, if a condition does not hold."""
        await self._check(namespace, body.key, len(body.value))
        expires_at_s = self._expiry(body.ttl_s)
        if body.if_absent or body.if_revision is not None or body.if_value is not None:
            rule = partial(rules.put, namespace, body, expires_at_s=expires_at_s)
            return await self._change(namespace, body.key, rule, request)
        write = Upsert(
            schema.KV, _row(namespace, body.key, body.value, expires_at_s), stamp="revision"
        )
        decision = rules.Write(body.value, expires_at_s)
        try:
            return await self._write(namespace, body.key, write, decision, request)
        except WriteConflict:
            return await self._remembered(request)

    async def add(self, namespace: str, body: KvAdd, request: RequestKey | None = None) -> KvReply:
        """Add to a counter; BadRequestError if the key holds no whole number."""
        await self._check(namespace, body.key, _COUNTER_NBYTES)
        rule = partial(rules.add, body, expires_at_s=self._expiry(body.ttl_s))
        return await self._change(namespace, body.key, rule, request)

    async def compare_set(
        self, namespace: str, body: KvCompareSet, request: RequestKey | None = None
    ) -> KvReply:
        """Set a key that holds what is expected; the reply says what it holds otherwise."""
        await self._check(namespace, body.key, len(body.desired))
        rule = partial(rules.compare_set, body, expires_at_s=self._expiry(body.ttl_s))
        return await self._change(namespace, body.key, rule, request)

    async def _check(self, namespace: str, key: str, nbytes: int) -> None:
        """Raise for a key that cannot be kept: its name or value is too long, or its namespace is full."""
        if len(namespace.encode()) + len(key.encode()) > MAX_NAME_BYTES:
            raise BadRequestError(
                f"the key {key[:_SHOWN]!r} is too long\n"
                f"it and its namespace may have {MAX_NAME_BYTES} bytes together",
                field="key",
            )
        if nbytes > self._max_value_bytes:
            raise PayloadTooLargeError(
                f"the value of key {key!r} is too large\n"
                f"it has {nbytes} bytes, and {self._max_value_bytes} are the limit "
                "(STOKER_KV_VALUE_MAX_BYTES): keep it with stoker.put(), and its name here",
                field="value",
            )

        async def held() -> int | None:
            row = await self._row(namespace, key)
            return None if row is None else int(row["nbytes"])

        await self._quota.admit(f"namespace {namespace!r}", namespace, nbytes, held)

    async def delete(
        self, namespace: str, body: KvDelete, request: RequestKey | None = None
    ) -> KvReply:
        """Remove a key; NotFoundError if there is none, ConflictError if it has another revision."""
        return await self._change(
            namespace, body.key, partial(rules.delete, namespace, body), request
        )

    async def delete_prefix(
        self, namespace: str, body: KvDeletePrefix, request: RequestKey | None = None
    ) -> KvReply:
        """Remove all keys with a prefix, batch after batch in the order of the keys."""
        if request is not None and (known := await self._find(request)) is not None:
            return known
        where: dict[str, Condition] = {
            "namespace": namespace,
            "expires_at_s": Unexpired(self._now()),
        }
        if body.prefix:
            where["key"] = Prefix(body.prefix)
        count, size = 0, DELETE_BATCH
        after: tuple[str, ...] = ()
        while True:
            rows = await self._state.store.select(
                schema.KV, where, after=after, limit=size, columns=("namespace", "key")
            )
            if not rows:
                break
            removed = [self._removed(namespace, row["key"]) for row in rows]
            change = Change(
                tuple(
                    Delete(schema.KV, {"namespace": namespace, "key": row["key"]}, must_exist=True)
                    for row in rows
                ),
                tuple(removed),
            )
            try:
                await self._state.writer.apply(change)
            except WriteConflict:
                # Somebody else removed one of them: smaller batches, until that one is found.
                if len(rows) > 1:
                    size = max(1, len(rows) // 2)
                    continue
            else:
                count += len(rows)
            size, after = DELETE_BATCH, (namespace, rows[-1]["key"])
        reply = KvReply(count=count)
        if request is not None:
            try:
                await self._state.writer.apply(Change((self._remember(request, reply),)))
            except WriteConflict:
                return await self._remembered(request)
        return reply

    async def get(self, namespace: str, key: str, wait_s: float) -> KvItem:
        """Return a key; wait up to ``wait_s`` for it to exist, then raise NotFoundError."""
        found = await self._read(namespace, (key,), wait_s)
        if not found:
            raise rules.absent(namespace, key)
        return found[0]

    async def get_several(self, namespace: str, body: KvGet) -> KvReply:
        """Return several keys once all exist, or after the wait those that do, in the order asked."""
        return KvReply(items=tuple(await self._read(namespace, body.keys, body.wait_s)))

    async def _read(self, namespace: str, keys: Sequence[str], wait_s: float) -> list[KvItem]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        found: dict[str, KvItem] = {}
        wanted = tuple(dict.fromkeys(keys))
        with self._state.log.signal(*(f"{namespace}/{key}" for key in wanted)) as signal:
            while True:
                signal.clear()
                await self._read_into(found, namespace, [k for k in wanted if k not in found])
                left_s = deadline - loop.time()
                if len(found) == len(wanted) or left_s <= 0:
                    return [found[key] for key in wanted if key in found]
                try:
                    await asyncio.wait_for(signal.wait(), left_s)
                except TimeoutError:
                    continue

    async def _read_into(
        self, found: dict[str, KvItem], namespace: str, keys: Sequence[str]
    ) -> None:
        if len(keys) == 1:
            row = await self._row(namespace, keys[0])
            rows = [] if row is None else [row]
        else:
            rows = await self._state.store.select(
                schema.KV, {"namespace": namespace, "key": tuple(keys)}, limit=len(keys)
            )
        for row in rows:
            item = self._item(row)
            if item is not None:
                found[item.key] = item

    async def page(self, namespace: str, query: KvListQuery) -> Page[KvEntry]:
        """Return a page of the keys of a namespace that start with a prefix."""
        # Read before the rows: what is committed between belongs to the watch from here.
        seq = self._state.log.last
        where: dict[str, Condition] = {
            "namespace": namespace,
            "expires_at_s": Unexpired(self._now()),
        }
        if query.prefix:
            where["key"] = Prefix(query.prefix)
        rows, cursor = await self._state.rows(schema.KV, query, where)
        total, exact = await self._state.total(schema.KV, query, where)
        items = tuple(KvEntry(**{name: row[name] for name in _ENTRY}) for row in rows)
        return Page(items=items, next_cursor=cursor, seq=seq, total=total, total_exact=exact)

    async def sweep(self) -> None:
        """Remove what has expired, until cancelled; runs on the leading replica."""
        while True:
            try:
                while await self.remove_expired() == SWEEP_BATCH:
                    continue
                forget = Delete(schema.KV_REQUESTS, {"expires_at_s": Expired(self._now())})
                if await self._state.store.count(forget.table, forget.where, most=1):
                    await self._state.writer.apply(Change((forget,)))
            except StokerError as error:
                _log.warning("the sweep of keys waits: %s", error)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def remove_expired(self) -> int:
        """Remove one batch of keys that have expired, with their events; return how many it read."""
        rows = await self._state.store.select(
            schema.KV,
            {"expires_at_s": Expired(self._now())},
            limit=SWEEP_BATCH,
            columns=("namespace", "key", "revision"),
            any_order=True,  # else SQLite walks through all keys in theirs
        )
        changes = [
            Change(
                (Delete(schema.KV, {name: row[name] for name in row}, must_exist=True),),
                (self._removed(row["namespace"], row["key"], expired=True),),
            )
            for row in rows
        ]
        done = await asyncio.gather(
            *(self._state.writer.apply(change) for change in changes), return_exceptions=True
        )
        for result in done:
            # One that was put again meanwhile stays.
            if isinstance(result, BaseException) and not isinstance(result, WriteConflict):
                raise result
        return len(rows)

    async def _change(
        self,
        namespace: str,
        key: str,
        rule: Callable[[KvItem | None], rules.Decision],
        request: RequestKey | None,
    ) -> KvReply:
        """Apply a rule to a key; decide again, until the deadline of the caller, if another came first.

        Those of this process take turns, so that only other replicas and plain puts can come first.
        """
        turn = self._turns.setdefault((namespace, key), asyncio.Lock())
        async with turn:
            while True:
                row = await self._row(namespace, key)
                held = None if row is None else self._item(row)
                try:
                    decision = rule(held)
                except StokerError:
                    # A request that was done already must not be refused for what it did itself.
                    if request is not None and (known := await self._find(request)) is not None:
                        return known
                    raise
                if isinstance(decision, rules.Keep):
                    known = None if request is None else await self._find(request)
                    return known or KvReply(value=decision.shown)
                operation = _operation(namespace, key, row, decision)
                try:
                    return await self._write(namespace, key, operation, decision, request)
                except WriteConflict as conflict:
                    if conflict.table == schema.KV_REQUESTS.name:
                        return await self._remembered(request)
                await asyncio.sleep(random.uniform(0.0, _RETRY_PAUSE_S))

    async def _write(
        self,
        namespace: str,
        key: str,
        operation: Operation,
        decision: rules.Write | rules.Remove,
        request: RequestKey | None,
    ) -> KvReply:
        """Write a decision, its event and the memory of its request in one transaction."""
        if isinstance(decision, rules.Remove):
            event = self._removed(namespace, key)
            reply = KvReply(count=1)
        else:
            value, expires_at_s = decision.value, decision.expires_at_s
            put = KvChange(
                namespace=namespace,
                key=key,
                nbytes=len(value),
                value=value if len(value) <= KV_INLINE_NBYTES else None,
                expires_at_s=expires_at_s,
            )
            event = self._state.event(EventKind.KV_PUT, f"{namespace}/{key}", put)
            entry = KvEntry(
                namespace=namespace,
                key=key,
                nbytes=len(value),
                revision=0,
                expires_at_s=expires_at_s,
            )
            reply = KvReply(entry=entry, value=decision.shown)
        operations = [operation] if request is None else [self._remember(request, reply), operation]
        events = await self._state.writer.apply(Change(tuple(operations), (event,)))
        return _at_revision(reply, events[-1].seq)

    def _removed(self, namespace: str, key: str, *, expired: bool = False) -> Append:
        gone = KvChange(namespace=namespace, key=key, deleted=True, expired=expired)
        return self._state.event(EventKind.KV_DELETED, f"{namespace}/{key}", gone)

    def _remember(self, request: RequestKey, reply: KvReply) -> Insert:
        row: dict[str, Value] = {
            "request": request.name,
            "fingerprint": request.fingerprint,
            "revision": 0,
            "reply": _encode(reply),
            "expires_at_s": self._now() + REMEMBERED_S,
        }
        return Insert(schema.KV_REQUESTS, row, stamp="revision")

    async def _remembered(self, request: RequestKey | None) -> KvReply:
        known = None if request is None else await self._find(request)
        assert known is not None, "only the row of a request can have been in the way"
        return known

    async def _find(self, request: RequestKey) -> KvReply | None:
        row = await self._state.store.get(schema.KV_REQUESTS, {"request": request.name})
        if row is None:
            return None
        if bytes(row["fingerprint"]) != request.fingerprint:
            raise IdempotencyError(
                "this Idempotency-Key was used before with another body\n"
                "use a new key for a new request",
                field="Idempotency-Key",
            )
        return _at_revision(_decode_reply(row["reply"]), int(row["revision"]))

    async def _row(self, namespace: str, key: str) -> Row | None:
        return await self._state.store.get(schema.KV, {"namespace": namespace, "key": key})

    def _item(self, row: Row) -> KvItem | None:
        """Return the key of a row; None if it has expired."""
        expires_at_s = row["expires_at_s"]
        if expires_at_s is not None and expires_at_s <= self._now():
            return None
        return KvItem(value=bytes(row["value"]), **{name: row[name] for name in _ENTRY})

    def _expiry(self, ttl_s: float | None) -> float | None:
        return None if ttl_s is None else self._now() + ttl_s


def _row(namespace: str, key: str, value: bytes, expires_at_s: float | None) -> dict[str, Value]:
    return {
        "namespace": namespace,
        "key": key,
        "nbytes": len(value),
        "revision": 0,
        "value": value,
        "expires_at_s": expires_at_s,
    }


def _operation(
    namespace: str, key: str, row: Row | None, decision: rules.Write | rules.Remove
) -> Operation:
    """Return the operation of a decision, which is done only if the key's row is still this one."""
    if isinstance(decision, rules.Remove):
        seen = 0 if row is None else row["revision"]
        where: dict[str, Condition] = {"namespace": namespace, "key": key, "revision": seen}
        return Delete(schema.KV, where, must_exist=True)
    values = _row(namespace, key, decision.value, decision.expires_at_s)
    if row is None:
        return Insert(schema.KV, values, stamp="revision")
    where_key: dict[str, Value] = {"namespace": values.pop("namespace"), "key": values.pop("key")}
    return Update(
        schema.KV, where_key, values, expect={"revision": row["revision"]}, stamp="revision"
    )


def _at_revision(reply: KvReply, revision: int) -> KvReply:
    if reply.entry is None:
        return reply
    return msgspec.structs.replace(
        reply, entry=msgspec.structs.replace(reply.entry, revision=revision)
    )
