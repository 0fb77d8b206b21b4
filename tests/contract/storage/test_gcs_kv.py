"""Keys of the gcs: comparison, counters, expiry, deletion by prefix and watches, on every store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_gcs.registry.kv.registry import DELETE_BATCH, KeyValues
from stoker_gcs.state import schema
from stoker_wire.errors import (
    BadRequestError,
    CompactedError,
    ConflictError,
    IdempotencyError,
    NotFoundError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.messages.common import MAX_NAME
from stoker_wire.messages.control import (
    MAX_KEY,
    Event,
    KvAdd,
    KvCompareSet,
    KvDelete,
    KvDeletePrefix,
    KvEntry,
    KvGet,
    KvItem,
    KvOperation,
    KvPut,
    KvReply,
    Page,
)
from stoker_wire.messages.events import KvChange
from stoker_wire.messages.queries import KvListQuery
from stoker_wire.settings import Settings
from tests.contract.gcs_support import TOKEN, eventually, gcs, migrate
from tests.contract.storage._kv import PATH, do, events_of, read, value_of
from tests.services import ReservedPort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.service import Running


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def url(request: pytest.FixtureRequest) -> str:
    """The URL of each store."""
    if request.param == "memory":
        return "memory://"
    url: str = request.getfixturevalue(f"{request.param}_url")
    await migrate(url)
    return url


@pytest.fixture
async def both(url: str) -> AsyncIterator[tuple[Running, Client]]:
    async with gcs(url) as made:
        yield made


@pytest.fixture
def kv(both: tuple[Running, Client]) -> Client:
    return both[1]


def revision_in(caught: pytest.ExceptionInfo[ConflictError]) -> Any:
    return caught.value.extra["revision"]


class TestConditions:
    async def test_a_revision_is_the_number_of_the_event_of_the_last_change(
        self, kv: Client
    ) -> None:
        first = await kv.call("PUT", f"{PATH}/a/b", b"1", reply=KvEntry)
        second = (await do(kv, KvPut(key="a/b", value=b"22"))).entry
        assert second is not None and second.revision > first.revision
        page = await kv.call("GET", "/v1/events", query={"kind": "kv."}, reply=Page[Event])
        assert [event.seq for event in page.items] == [first.revision, second.revision]
        assert await read(kv, "a/b") == KvItem(
            namespace="ns", key="a/b", nbytes=2, revision=second.revision, value=b"22"
        )
        listed = await kv.call("GET", PATH, reply=Page[KvEntry])
        assert listed.items == (second,)
        async with kv.open("GET", f"{PATH}/a/b") as reply:
            assert reply.headers["X-Stoker-Revision"] == str(second.revision)

    async def test_a_condition_that_fails_is_a_conflict_with_the_revision(self, kv: Client) -> None:
        entry = (await do(kv, KvPut(key="k", value=b"a", if_revision=0))).entry
        assert entry is not None
        for body, why in (
            (KvPut(key="k", if_absent=True), "'k' exists"),
            (KvPut(key="k", if_revision=entry.revision + 1), f"has revision {entry.revision}, not"),
            (KvPut(key="k", if_revision=0), f"has revision {entry.revision}, not 0"),
            (KvPut(key="k", if_value=b"b"), "another value"),
            (KvDelete(key="k", if_revision=entry.revision + 1), "has revision"),
        ):
            with pytest.raises(ConflictError, match=why) as caught:
                await do(kv, body)
            assert revision_in(caught) == entry.revision
        for query in ({"if_absent": 1}, {"if_revision": entry.revision + 1}):
            with pytest.raises(ConflictError) as caught:
                await kv.call("PUT", f"{PATH}/k", b"x", query=query, raw=True)
            assert revision_in(caught) == entry.revision
        with pytest.raises(ConflictError):
            await kv.call("DELETE", f"{PATH}/k", query={"if_revision": entry.revision + 1})
        for body in (KvPut(key="no", if_value=b""), KvPut(key="no", if_revision=5)):
            with pytest.raises(ConflictError, match=r"'no' .* does not exist") as caught:
                await do(kv, body)
            assert revision_in(caught) == 0
        assert await value_of(kv, "k") == b"a"
        changed = (await do(kv, KvPut(key="k", value=b"b", if_value=b"a"))).entry
        assert changed is not None
        again = KvPut(key="k", value=b"c", if_revision=changed.revision, if_value=b"b")
        last = (await do(kv, again)).entry
        assert last is not None and await value_of(kv, "k") == b"c"
        assert (await do(kv, KvDelete(key="k", if_revision=last.revision))).count == 1
        with pytest.raises(NotFoundError, match="no key 'k' in namespace 'ns'"):
            await do(kv, KvDelete(key="k"))

    async def test_a_key_may_be_as_long_as_any_database_takes_it(self, kv: Client) -> None:
        longest, namespace = "\U0001f511" * 300, "\U0001f511" * 200  # of 4 bytes each: 2000 in all
        path = f"/v1/kv/{namespace}"
        assert (await kv.call("POST", path, KvPut(key=longest), reply=KvReply)).entry is not None
        with pytest.raises(BadRequestError, match="2000 bytes together"):
            await kv.call("POST", path, KvPut(key=f"{longest}x"), reply=KvReply)
        await kv.call("PUT", f"{PATH}/{'x' * MAX_KEY}", b"1", raw=True)
        for where, body in (
            (f"{PATH}/{'x' * (MAX_KEY + 1)}", b"1"),
            (f"/v1/kv/{'n' * (MAX_NAME + 1)}/k", b"1"),
        ):
            with pytest.raises(BadRequestError, match="expected at most"):
                await kv.call("PUT", where, body, raw=True)
        with pytest.raises(BadRequestError, match=f"<= {MAX_KEY}"):
            await do(kv, KvPut(key="x" * (MAX_KEY + 1)))
        with pytest.raises(BadRequestError, match="namespace"):
            await kv.call("POST", f"/v1/kv/{'n' * (MAX_NAME + 1)}", KvPut(key="k"), reply=KvReply)

    async def test_compare_set_is_what_torch_needs(self, kv: Client) -> None:
        def body(expected: bytes, desired: bytes) -> KvCompareSet:
            return KvCompareSet(key="k", expected=expected, desired=desired)

        refused = await do(kv, body(b"old", b"new"))
        assert (refused.entry, refused.value) == (None, b"old")
        assert await read(kv, "k") is None
        assert (await do(kv, body(b"", b"first"))).entry is not None
        refused = await do(kv, body(b"", b"second"))
        assert (refused.entry, refused.value) == (None, b"first")
        assert (await do(kv, body(b"first", b"second"))).entry is not None
        assert await value_of(kv, "k") == b"second"

    async def test_a_race_has_one_winner(self, kv: Client) -> None:
        async def wins(body: KvOperation) -> bool:
            try:
                return (await do(kv, body)).entry is not None
            except ConflictError:
                return False

        names = [b"%d" % i for i in range(20)]
        won = await asyncio.gather(
            *(wins(KvPut(key="k", value=name, if_absent=True)) for name in names)
        )
        assert won.count(True) == 1
        before = await read(kv, "k")
        assert before is not None and before.value == names[won.index(True)]
        won = await asyncio.gather(
            *(wins(KvPut(key="k", value=name, if_revision=before.revision)) for name in names)
        )
        assert won.count(True) == 1
        now = await value_of(kv, "k")
        assert now == names[won.index(True)]
        swaps = [KvCompareSet(key="k", expected=now, desired=b"by" + name) for name in names]
        won = await asyncio.gather(*map(wins, swaps))
        assert won.count(True) == 1
        assert await value_of(kv, "k") == b"by" + names[won.index(True)]

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"op": "put", "key": ""}, "key"),
            ({"op": "put", "key": "a\0b"}, "key"),
            ({"op": "put", "key": "k", "ttl_s": 0}, "ttl_s"),
            ({"op": "put", "key": "k", "ttl": 1}, "ttl"),
            ({"op": "increment", "key": "k"}, "op"),
            ({"op": "get", "keys": []}, "keys"),
            ({"key": "k"}, "op"),
        ],
    )
    async def test_wrong_input_names_the_field(
        self, client: Client, body: object, field: str
    ) -> None:
        with pytest.raises(BadRequestError) as caught:
            await client.call("POST", PATH, body)
        assert caught.value.field == field


class TestCounters:
    async def test_a_counter_begins_at_0_and_takes_any_whole_number(self, kv: Client) -> None:
        sums = [(await do(kv, KvAdd(key="n", amount=a))).value for a in (1, 5, -10, 0)]
        assert sums == [b"1", b"6", b"-4", b"-4"]
        assert await value_of(kv, "n") == b"-4"
        await do(kv, KvPut(key="n", value=b"007"))
        assert (await do(kv, KvAdd(key="n"))).value == b"8"

    async def test_what_is_no_number_of_64_bits_is_refused_and_stays(self, kv: Client) -> None:
        for value in (b"", b"1.5", b" 1", b"one", b"\xff", b"9" * 20):
            await do(kv, KvPut(key="n", value=value))
            with pytest.raises(BadRequestError, match="no whole number") as caught:
                await do(kv, KvAdd(key="n"))
            assert caught.value.field == "key"
            assert await value_of(kv, "n") == value
        await do(kv, KvPut(key="n", value=b"%d" % (2**63 - 1)))
        with pytest.raises(BadRequestError, match="64 bits"):
            await do(kv, KvAdd(key="n"))

    async def test_many_at_once_are_all_counted(self, kv: Client) -> None:
        replies = await asyncio.gather(*(do(kv, KvAdd(key="n", amount=2)) for _ in range(50)))
        assert sorted(int(reply.value or b"") for reply in replies) == list(range(2, 101, 2))
        assert await value_of(kv, "n") == b"100"

    async def test_a_retry_counts_once_and_gets_the_same_reply(self, kv: Client) -> None:
        replies = await asyncio.gather(*(do(kv, KvAdd(key="n"), key="once") for _ in range(5)))
        await do(kv, KvAdd(key="n"))
        replies.append(await do(kv, KvAdd(key="n"), key="once"))
        assert {msgspec.json.encode(reply) for reply in replies} == {
            msgspec.json.encode(replies[0])
        }
        assert replies[0].value == b"1" and await value_of(kv, "n") == b"2"
        with pytest.raises(IdempotencyError):
            await do(kv, KvAdd(key="n", amount=7), key="once")

    async def test_a_retry_is_not_refused_for_what_it_did_itself(self, kv: Client) -> None:
        put = KvPut(key="k", value=b"mine", if_absent=True)
        first = await do(kv, put, key="p")
        assert await do(kv, put, key="p") == first
        swap = KvCompareSet(key="k", expected=b"mine", desired=b"new")
        swapped = await do(kv, swap, key="c")
        assert swapped.entry is not None and await do(kv, swap, key="c") == swapped
        plain = KvPut(key="k", value=b"plain")
        assert (await do(kv, plain, key="u")) == (await do(kv, plain, key="u"))
        assert (await do(kv, KvDelete(key="k"), key="d")).count == 1
        assert (await do(kv, KvDelete(key="k"), key="d")).count == 1
        await do(kv, KvPut(key="p/1"))
        gone = KvDeletePrefix(prefix="p/")
        assert [(await do(kv, gone, key="x")).count for _ in range(2)] == [1, 1]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class TestExpiry:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def keys(self, both: tuple[Running, Client], clock: Clock) -> KeyValues:
        """Keys beside those of the service, whose sweep sees all of them as expired long ago."""
        return KeyValues(both[0].app.state, Settings(), clock)

    @pytest.fixture(autouse=True)
    def no_sweep(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The service sweeps nothing: the clock of these keys is another one."""

        async def nothing(_: KeyValues) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(KeyValues, "sweep", nothing)

    async def exists(self, keys: KeyValues, key: str) -> bool:
        listed = {entry.key for entry in (await keys.page("ns", KvListQuery())).items}
        several = await keys.get_several("ns", KvGet(keys=(key, "another")))
        try:
            await keys.get("ns", key, 0.0)
        except NotFoundError:
            assert key not in listed and not several.items
            return False
        assert key in listed and [item.key for item in several.items] == [key]
        return True

    async def test_an_expired_key_is_gone_before_it_is_swept(
        self, keys: KeyValues, clock: Clock
    ) -> None:
        reply = await keys.put("ns", KvPut(key="k", value=b"1", ttl_s=10.0))
        assert reply.entry is not None and reply.entry.expires_at_s == 1010.0
        clock.now_s = 1009.9
        assert await self.exists(keys, "k")
        clock.now_s = 1010.0
        assert not await self.exists(keys, "k")
        with pytest.raises(NotFoundError):
            await keys.delete("ns", KvDelete(key="k"))
        assert (await keys.delete_prefix("ns", KvDeletePrefix(prefix=""))).count == 0
        assert (
            await keys.compare_set("ns", KvCompareSet(key="k", expected=b"1", desired=b"2"))
        ).value == b"1"
        with pytest.raises(ConflictError, match="does not exist"):
            await keys.put("ns", KvPut(key="k", if_revision=reply.entry.revision))
        assert (await keys.add("ns", KvAdd(key="k"))).value == b"1"
        assert await self.exists(keys, "k")
        clock.now_s = 9999.0
        assert await self.exists(keys, "k"), "the new key has no time of the old one"

    async def test_a_put_renews_or_clears_the_time_and_add_keeps_it(
        self, keys: KeyValues, clock: Clock
    ) -> None:
        for body in (KvPut(key="k", ttl_s=10.0), KvPut(key="k", value=b"0", ttl_s=20.0)):
            await keys.put("ns", body)
        clock.now_s = 1015.0
        added = await keys.add("ns", KvAdd(key="k"))
        assert added.entry is not None and added.entry.expires_at_s == 1020.0
        longer = await keys.add("ns", KvAdd(key="k", ttl_s=100.0))
        assert longer.entry is not None and longer.entry.expires_at_s == 1115.0
        await keys.put("ns", KvPut(key="k"))
        clock.now_s = 1_000_000.0
        assert await self.exists(keys, "k")

    async def test_an_expired_key_is_free_for_exactly_one(
        self, keys: KeyValues, clock: Clock
    ) -> None:
        await keys.put("ns", KvPut(key="k", ttl_s=1.0))
        clock.now_s += 1.0

        async def takes(name: bytes) -> bool:
            try:
                await keys.put("ns", KvPut(key="k", value=name, if_absent=True))
            except ConflictError:
                return False
            return True

        won = await asyncio.gather(*(takes(b"%d" % i) for i in range(10)))
        assert won.count(True) == 1
        assert (await keys.get("ns", "k", 0.0)).value == b"%d" % won.index(True)

    async def test_the_sweep_removes_what_has_expired_with_an_event_each(
        self, keys: KeyValues, clock: Clock, kv: Client
    ) -> None:
        ttls = {"a": 1.0, "b": 2.0, "c": 9.0, "d": None}
        for name, ttl_s in ttls.items():
            await keys.put("ns", KvPut(key=name, ttl_s=ttl_s))
        since = (await kv.call("GET", PATH, reply=Page[KvEntry])).seq
        clock.now_s += 5.0
        assert await keys.remove_expired() == 2
        assert await keys.remove_expired() == 0
        events = await events_of(kv, 2, since=since)
        assert {event.subject for event in events} == {"ns/a", "ns/b"}
        for event in events:
            change = msgspec.convert(event.payload, KvChange)
            assert event.kind == "kv.deleted" and change.deleted and change.expired
        assert [await self.exists(keys, name) for name in "abcd"] == [False, False, True, True]

    async def test_a_key_that_was_put_again_outlives_a_sweep_that_saw_it_expired(
        self, both: tuple[Running, Client], keys: KeyValues, clock: Clock
    ) -> None:
        await keys.put("ns", KvPut(key="k", ttl_s=1.0))
        store, select = both[0].app.state.store, both[0].app.state.store.select
        clock.now_s += 5.0
        this_task = asyncio.current_task()

        async def then_renewed(*args: Any, **options: Any) -> Any:
            rows = await select(*args, **options)
            if asyncio.current_task() is this_task:
                await keys.put("ns", KvPut(key="k", value=b"new"))
            return rows

        store.select = then_renewed  # type: ignore[method-assign]
        assert await keys.remove_expired() == 1
        store.select = select  # type: ignore[method-assign]
        assert (await keys.get("ns", "k", 0.0)).value == b"new"


async def test_the_leader_sweeps_by_itself(kv: Client) -> None:
    await do(kv, KvPut(key="short", ttl_s=0.05))
    await do(kv, KvPut(key="long", ttl_s=1000.0))
    put, gone = (await events_of(kv, 3))[0::2]
    assert (put.kind, gone.kind, gone.subject) == ("kv.put", "kv.deleted", "ns/short")
    assert gone.payload["expired"] is True
    assert await value_of(kv, "long") == b""


class TestPrefixes:
    async def test_all_keys_with_the_prefix_go_and_no_others(self, kv: Client) -> None:
        count = DELETE_BATCH * 2 + 7
        names = [f"p/{i:04}" for i in range(count)]
        await asyncio.gather(*(do(kv, KvPut(key=name)) for name in [*names, "p", "q/1", "P/0"]))
        since = (await kv.call("GET", PATH, reply=Page[KvEntry])).seq
        assert (await do(kv, KvDeletePrefix(prefix="p/"))).count == count
        listed = await kv.call("GET", PATH, reply=Page[KvEntry])
        assert [entry.key for entry in listed.items] == ["P/0", "p", "q/1"]
        events = await events_of(kv, count, since=since)
        assert [event.payload["key"] for event in events] == names
        assert (await do(kv, KvDeletePrefix(prefix="p/"))).count == 0
        assert (await do(kv, KvDeletePrefix(prefix=""))).count == 3

    async def test_two_at_once_remove_each_key_once(self, kv: Client) -> None:
        names = [f"p/{i}" for i in range(60)]
        await asyncio.gather(*(do(kv, KvPut(key=name)) for name in names))

        async def one(name: str) -> int:
            try:
                return (await do(kv, KvDelete(key=name))).count
            except NotFoundError:
                return 0

        counts = await asyncio.gather(
            *(one(name) for name in names[::3]),
            *((_counted(kv)) for _ in range(3)),
            *(one(name) for name in names[1::3]),
        )
        assert sum(counts) == len(names)
        assert (await kv.call("GET", PATH, reply=Page[KvEntry])).items == ()


async def _counted(client: Client) -> int:
    return (await do(client, KvDeletePrefix(prefix="p/"))).count


class TestWatches:
    async def test_a_watch_has_the_changes_of_its_keys_and_small_values(self, kv: Client) -> None:
        await do(kv, KvPut(key="a/before"))
        since = (await kv.call("GET", PATH, reply=Page[KvEntry])).seq
        await do(kv, KvPut(key="b/other"))
        await kv.call("PUT", "/v1/kv/ns2/a/1", b"other", reply=KvEntry)
        await kv.call("PUT", "/v1/kv/ns%2Fa/a/x", b"other", reply=KvEntry)
        await do(kv, KvPut(key="a/1", value=b"\x00\xff"))
        await do(kv, KvPut(key="a/2", value=b"x" * 1025))
        await do(kv, KvAdd(key="a/n", amount=3))
        await do(kv, KvDelete(key="a/1"))
        events = await events_of(kv, 4, since=since, prefix="a/")
        changes = [msgspec.convert(event.payload, KvChange) for event in events]
        assert [(c.key, c.value, c.nbytes, c.deleted) for c in changes] == [
            ("a/1", b"\x00\xff", 2, False),
            ("a/2", None, 1025, False),
            ("a/n", b"3", 1, False),
            ("a/1", None, 0, True),
        ]
        assert [event.kind for event in events] == ["kv.put"] * 3 + ["kv.deleted"]
        item = await read(kv, "a/n")
        assert item is not None and item.revision == events[2].seq

    @pytest.mark.logs(r"the loop reconcile waits")  # where it had not begun yet
    async def test_a_watch_that_begins_too_early_is_told(
        self, both: tuple[Running, Client]
    ) -> None:
        running, client = both
        for _ in range(3):
            await do(client, KvAdd(key="n"))
        await running.app.state.log.compact(1)
        with pytest.raises(CompactedError, match="list again"):
            await events_of(client, 1, since=0)

    async def test_what_is_put_while_a_list_is_read_is_in_the_watch_from_it(
        self, both: tuple[Running, Client]
    ) -> None:
        running, client = both
        store, select = running.app.state.store, running.app.state.store.select

        async def then_put(table: Any, *args: Any, **options: Any) -> Any:
            rows = await select(table, *args, **options)
            if table is schema.KV and not options.get("any_order"):  # not what the gcs sweeps
                store.select = select  # type: ignore[method-assign]
                await do(client, KvPut(key="late"))
            return rows

        store.select = then_put  # type: ignore[method-assign]
        page = await client.call("GET", PATH, reply=Page[KvEntry])
        assert page.items == ()
        [event] = await events_of(client, 1, since=page.seq)
        assert event.subject == "ns/late"

    async def test_it_goes_on_after_a_restart_without_loss_or_doubling(
        self, durable_url: str
    ) -> None:
        port = ReservedPort()
        found: list[Event] = []

        async def follow(client: Client) -> None:
            async for event in client.watch(PATH, 0, {"prefix": "n"}):
                found.append(event)

        async def seen(count: int) -> bool:
            return len(found) >= count

        async with Client(f"http://127.0.0.1:{port}", token=TOKEN, peer="watcher") as watcher:
            following = asyncio.ensure_future(follow(watcher))
            for start in range(3):
                async with gcs(durable_url, port=port.number) as (_, client):
                    for _ in range(5):
                        await do(client, KvAdd(key="n"))
                        await do(client, KvPut(key="other"))
                    if start != 1:  # what comes while nobody reads is not lost either
                        await eventually(lambda: seen(5), "the changes arrive")
            async with gcs(durable_url, port=port.number) as (_, client):
                await do(client, KvAdd(key="n", amount=100))
                await eventually(lambda: seen(16), "the last change arrives")
            following.cancel()
            await asyncio.wait((following,))
        values = [msgspec.convert(event.payload, KvChange).value for event in found]
        assert values == [b"%d" % n for n in range(1, 16)] + [b"115"]

    async def test_several_keys_are_waited_for_at_once(self, kv: Client) -> None:
        wanted = KvGet(keys=("a", "b", "a/c"), wait_s=30)
        waiting = asyncio.ensure_future(do(kv, wanted))
        for name in ("b", "a/c", "a"):
            assert not waiting.done()
            await do(kv, KvPut(key=name, value=name.encode()))
        items = (await waiting).items
        assert [(item.key, item.value) for item in items] == [
            ("a", b"a"),
            ("b", b"b"),
            ("a/c", b"a/c"),
        ]
        some = KvGet(keys=("a", "never"), wait_s=0.05)
        assert [item.key for item in (await do(kv, some)).items] == ["a"]
