"""``stoker.kv``, ``util.ActorPool`` and ``util.Queue`` on a real cluster of this machine."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError, GetTimeoutError
from stoker.util import ActorPool, Empty, Full, Queue
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    stoker.init(num_cpus=4, log_to_driver=False)
    yield
    stoker.shutdown()


def _worker_class() -> Any:
    # Made here, because workers cannot import a test's module: a class of a function travels whole.
    class Worker:
        def __init__(self) -> None:
            self.calls = 0

        def square(self, x: int) -> int:
            self.calls += 1
            if x < 0:
                raise ValueError(f"{x} is negative")
            return x * x

        def after(self, key: str, x: int) -> int:
            if key:
                stoker.kv.wait(key, timeout=40)
            return x

        def count(self) -> int:
            return self.calls

    return stoker.remote(Worker)


def _pool(count: int = 2) -> tuple[ActorPool[Any], list[Any]]:
    cls = _worker_class()
    actors = [cls.remote() for _ in range(count)]
    return ActorPool(actors), actors


def _square(actor: Any, value: int) -> Any:
    return actor.square.remote(value)


def _after(actor: Any, value: tuple[str, int]) -> Any:
    return actor.after.remote(*value)


def _next(changes: stoker.kv.Watch) -> stoker.kv.Change:
    found: list[stoker.kv.Change] = []

    def arrived() -> bool:
        try:
            found.append(next(changes))
        except GetTimeoutError:
            return False
        return True

    until(arrived, 40.0, "the next change arrives")
    return found[0]


class TestKeys:
    def test_a_key_is_set_read_listed_and_removed(self) -> None:
        key = "odd/ key?%20ü"
        assert stoker.kv.get(key) is None
        assert stoker.kv.put(key, b"\x00\xff")
        assert stoker.kv.get(key) == b"\x00\xff"
        assert not stoker.kv.put(key, "text", if_absent=True)
        assert stoker.kv.put(key, "text")
        assert stoker.kv.get(key) == b"text"
        assert stoker.kv.keys("odd/") == [key]
        assert stoker.kv.get(key, namespace="another") is None
        assert stoker.kv.delete(key)
        assert not stoker.kv.delete(key)

    def test_wait_returns_when_the_key_is_set(self) -> None:
        timer = threading.Timer(0.2, stoker.kv.put, ("late", b"1"))
        timer.start()
        assert stoker.kv.wait("late", timeout=40) == b"1"
        timer.join()

    def test_wait_that_is_in_vain_names_the_key(self) -> None:
        with pytest.raises(GetTimeoutError, match="'never'"):
            stoker.kv.wait("never", timeout=0.1)

    def test_a_key_is_set_only_if_it_is_as_expected(self) -> None:
        assert stoker.kv.entry("cas") is None
        assert stoker.kv.put("cas", "1", if_revision=0)
        first = stoker.kv.entry("cas")
        assert first is not None and (first.value, first.expires_at_s) == (b"1", None)
        assert not stoker.kv.put("cas", "x", if_revision=first.revision - 1)
        assert not stoker.kv.put("cas", "x", if_value="0")
        assert stoker.kv.put("cas", "2", if_revision=first.revision, if_value=b"1")
        assert not stoker.kv.delete("cas", if_revision=first.revision)
        second = stoker.kv.entry("cas")
        assert second is not None and second.revision > first.revision
        assert stoker.kv.delete("cas", if_revision=second.revision)

    def test_compare_set_returns_what_the_key_holds_then(self) -> None:
        swap = stoker.kv.compare_set
        assert swap("swap", "old", "new") == b"old"
        assert swap("swap", "", "new") == b"new"
        assert swap("swap", "old", "newer") == b"new"
        assert swap("swap", b"new", b"newer") == b"newer" == stoker.kv.get("swap")

    def test_tasks_count_together(self) -> None:
        @stoker.remote
        def count(times: int) -> None:
            for _ in range(times):
                stoker.kv.add("sum", 2)

        stoker.get([count.remote(10) for _ in range(5)])
        assert stoker.kv.add("sum", -1) == 99
        stoker.kv.put("sum", "many")
        with pytest.raises(BadRequestError, match="no whole number"):
            stoker.kv.add("sum")

    def test_a_key_with_a_time_goes_by_itself_and_is_told(self) -> None:
        with stoker.kv.watch("brief", timeout=40) as changes:
            stoker.kv.put("brief", "1", ttl_s=0.3)
            stoker.kv.put("other", "1")
            put, gone = next(changes), next(changes)
        assert (put.key, put.value, put.deleted) == ("brief", b"1", False)
        assert (gone.key, gone.deleted, gone.expired) == ("brief", True, True)
        assert stoker.kv.get("brief") is None

    def test_keys_are_removed_by_prefix(self) -> None:
        for key in ("group/1", "group/2", "grouped"):
            stoker.kv.put(key, "")
        assert stoker.kv.delete_prefix("group/") == 2
        assert stoker.kv.keys("group") == ["grouped"]

    def test_several_keys_are_waited_for_and_those_that_are_missing_named(self) -> None:
        stoker.kv.put("here", b"1")
        timer = threading.Timer(0.2, stoker.kv.put, ("soon", b"2"))
        timer.start()
        found = stoker.kv.wait(["soon", "here"], timeout=40)
        assert found == {"soon": b"2", "here": b"1"}
        timer.join()
        assert stoker.kv.wait([], timeout=0) == {}
        missing = [f"never{i}" for i in range(7)]
        with pytest.raises(GetTimeoutError, match=r"7 of 8 keys .*'never0'.* and 2 more"):
            stoker.kv.wait([*missing, "here"], timeout=0.1)

    def test_a_watch_goes_on_after_a_timeout_and_from_a_revision(self) -> None:
        with stoker.kv.watch("seen/", timeout=0.2) as changes:
            with pytest.raises(GetTimeoutError, match="prefix 'seen/' was changed"):
                next(changes)
            began = changes.since
            for value in ("1", "2", "3"):
                stoker.kv.put("seen/key", value)
            seen = [_next(changes) for _ in range(3)]
            with pytest.raises(GetTimeoutError):
                next(changes)
        assert [change.value for change in seen] == [b"1", b"2", b"3"]
        assert list(changes) == []
        with stoker.kv.watch("seen/", since=seen[0].revision, timeout=40) as changes:
            assert [next(changes), next(changes)] == seen[1:]
            assert changes.since == seen[-1].revision > began

    @pytest.mark.parametrize(("key", "value", "field"), [("", b"", "key"), ("k", 3, "value")])
    def test_wrong_input_names_the_field(self, key: str, value: Any, field: str) -> None:
        with pytest.raises(BadRequestError) as caught:
            stoker.kv.put(key, value)
        assert caught.value.field == field


class TestActorPool:
    def test_map_keeps_the_order(self) -> None:
        pool, actors = _pool()
        assert list(pool.map(_square, range(9))) == [x * x for x in range(9)]
        assert sum(stoker.get([a.count.remote() for a in actors])) == 9
        assert list(pool.map(_square, [3])) == [9]

    def test_map_unordered_yields_what_is_done_first(self) -> None:
        pool, _ = _pool()
        results = pool.map_unordered(_after, [("gate", 0), ("", 1), ("", 2)])
        assert [next(results), next(results)] == [1, 2]
        stoker.kv.put("gate", b"1")
        assert list(results) == [0]

    def test_more_calls_than_actors_wait_their_turn(self) -> None:
        pool, _ = _pool(1)
        for x in range(3):
            pool.submit(_square, x)
        assert pool.has_next()
        assert not pool.has_free()
        assert pool.pop_idle() is None
        assert [pool.get_next() for _ in range(3)] == [0, 1, 4]
        assert not pool.has_next()
        with pytest.raises(StopIteration):
            pool.get_next()
        with pytest.raises(StopIteration):
            pool.get_next_unordered()

    def test_ordered_and_unordered_can_be_mixed(self) -> None:
        pool, _ = _pool(2)
        for x in range(4):
            pool.submit(_square, x)
        found = [pool.get_next_unordered(), pool.get_next()]
        found += [pool.get_next(), pool.get_next_unordered()]
        assert sorted(found) == [0, 1, 4, 9]

    def test_an_error_comes_out_and_the_actor_goes_on(self) -> None:
        pool, _ = _pool(1)
        pool.submit(_square, -1)
        pool.submit(_square, 2)
        with pytest.raises(ValueError, match="-1 is negative"):
            pool.get_next()
        assert pool.get_next() == 4

    def test_a_timeout_leaves_the_result_for_later(self) -> None:
        pool, _ = _pool(1)
        pool.submit(_after, ("open", 7))
        with pytest.raises(GetTimeoutError):
            pool.get_next(timeout=0.1)
        with pytest.raises(GetTimeoutError):
            pool.get_next_unordered(timeout=0.1)
        stoker.kv.put("open", b"1")
        assert pool.get_next(timeout=40) == 7

    def test_a_result_can_be_given_up(self) -> None:
        pool, _ = _pool(1)
        pool.submit(_after, ("shut", 7))
        pool.submit(_after, ("", 8))
        with pytest.raises(GetTimeoutError):
            pool.get_next(timeout=0.1, ignore_if_timedout=True)
        stoker.kv.put("shut", b"1")
        assert pool.get_next() == 8

    def test_actors_come_and_go(self) -> None:
        pool, (first, second) = _pool()
        assert pool.pop_idle() == first
        assert pool.pop_idle() == second
        assert pool.pop_idle() is None
        pool.submit(_square, 5)
        with pytest.raises(BadRequestError, match="no actors"):
            pool.get_next()
        pool.push(second)
        with pytest.raises(BadRequestError, match="already"):
            pool.push(second)
        assert pool.get_next() == 25

    def test_results_of_every_form(self) -> None:
        class Forms:
            @stoker.method(num_returns=2)
            def two(self, x: int) -> tuple[int, int]:
                if x < 0:
                    raise ValueError(f"{x} is negative")
                return x, x + 1

            def some(self, x: int) -> Any:
                yield from range(x)

            @stoker.method(num_returns=0)
            def nothing(self, x: int) -> None:
                pass

        pool = ActorPool([stoker.remote(Forms).remote()])

        def both(actor: Any, x: int) -> Any:
            return actor.two.remote(x)

        assert list(pool.map(both, [1, 2])) == [[1, 2], [2, 3]]
        assert sorted(pool.map_unordered(both, [1, 2])) == [[1, 2], [2, 3]]
        pool.submit(both, -1)
        with pytest.raises(ValueError, match="negative"):
            pool.get_next()
        (stream,) = pool.map(lambda actor, x: actor.some.remote(x), [3])
        assert stoker.get(list(stream)) == [0, 1, 2]
        with pytest.raises(TypeError, match="NoneType"):
            pool.submit(lambda actor, x: actor.nothing.remote(x), 1)
        known = stoker.put(5)
        assert list(pool.map(lambda actor, x: known, range(3))) == [5, 5, 5]
        assert pool.has_free()


class TestQueue:
    def test_more_getters_than_an_async_actor_runs_by_default_hold_up_no_putter(self) -> None:
        items = Queue[int](actor_options={"num_cpus": 0})
        waiting = [items.actor.get.remote(None) for _ in range(1001)]
        items.put(7, timeout=40)
        (ready,), _ = stoker.wait(waiting, timeout=40)
        assert stoker.get(ready) == [7]
        items.shutdown()

    def test_first_in_first_out(self) -> None:
        items = Queue[Any]()
        for item in (1, None, "x"):
            items.put(item)
        assert (items.size(), len(items), items.empty(), items.full()) == (3, 3, False, False)
        assert [items.get() for _ in range(3)] == [1, None, "x"]
        assert items.empty()
        items.shutdown()

    def test_a_full_queue_refuses_and_an_empty_one_has_nothing(self) -> None:
        items = Queue[int](maxsize=2)
        items.put_nowait(1)
        items.put(2, timeout=40)
        assert items.full()
        for refuse in (lambda: items.put_nowait(3), lambda: items.put(3, timeout=0.05)):
            with pytest.raises(Full):
                refuse()
        with pytest.raises(Full):
            items.put_nowait_batch([3])
        assert items.get_nowait_batch(2) == [1, 2]
        for refuse in (items.get_nowait, lambda: items.get(timeout=0.05)):
            with pytest.raises(Empty):
                refuse()
        with pytest.raises(Empty):
            items.get_nowait_batch(1)
        with pytest.raises(BadRequestError, match="timeout"):
            items.get(timeout=-1)
        items.shutdown()

    def test_a_waiting_get_and_a_waiting_put_go_on(self) -> None:
        items = Queue[int](maxsize=1)
        getter = items.actor.get.remote(40.0)
        items.put(5)
        assert stoker.get(getter, timeout=40) == [5]
        items.put(6)
        putter = items.actor.put.remote([7], 40.0)
        assert items.get() == 6
        assert stoker.get(putter, timeout=40) is True
        assert items.get(timeout=40) == 7
        items.shutdown()

    def test_tasks_share_it(self) -> None:
        items = Queue[int]()

        def produce(items: Queue[int], x: int) -> None:
            items.put(x)

        task = stoker.remote(produce)
        stoker.get([task.remote(items, x) for x in range(5)], timeout=40)
        assert sorted(items.get_nowait_batch(5)) == list(range(5))
        items.shutdown()

    async def test_coroutines_use_it(self) -> None:
        items = Queue[int](maxsize=1)
        await items.put_async(1)
        with pytest.raises(Full):
            await items.put_async(2, block=False)
        got, _ = await asyncio.gather(items.get_async(), items.put_async(2, timeout=40))
        assert (got, await items.get_async()) == (1, 2)
        with pytest.raises(Empty):
            await items.get_async(timeout=0.05)
        items.shutdown()

    def test_the_actor_takes_options(self) -> None:
        items = Queue[int](actor_options={"name": "shared-items"})
        items.put(4)
        assert until(lambda: stoker.get_actor("shared-items"), 40, "the queue's actor is found")
        with pytest.raises(stoker.exceptions.UnknownOptionError, match="num_cpus"):
            Queue(actor_options={"num_cpu": 1})
        items.shutdown()
