"""Programs with ``ray.util.iter``, which Ray 2.60 still has: what is read of shards is the same there."""

from __future__ import annotations

from typing import Any

import pytest

import stoker.ray as ray
from stoker.exceptions import SerializationError
from stoker.ray.util.iter import LocalIterator, ParallelIteratorWorker, from_items, from_range

pytestmark = pytest.mark.usefixtures("cluster")


def test_items_of_shards_come_in_turn_and_reading_goes_on_where_it_was() -> None:
    shards = ray.util.iter.from_iterators([range(5), range(2), "ab"])
    assert repr(shards) == "ParallelIterator[from_iterators[shards=3]]"
    gathered = shards.gather_sync()
    assert gathered.take(5) == [0, 0, "a", 1, 1]
    assert gathered.take(9) == ["b", 2, 3, 4]
    assert shards.take(2) == [0, 0]
    assert from_range(7, 2).batch_across_shards().take(9) == [[0, 3], [1, 4], [2, 5], [6]]
    with pytest.raises(TypeError, match="gather_sync"):
        list(shards)


def test_operators_run_in_the_shards_and_keep_their_state_there() -> None:
    class Sum:
        def __init__(self) -> None:
            self.total = 0

        def __call__(self, value: int) -> tuple[int, int]:
            self.total += value
            return self.total, value

    numbers = from_items([1, 2, 3, 4, 5], num_shards=2)
    for _ in range(2):
        assert list(numbers.for_each(Sum()).gather_sync()) == [
            *((1, 1), (2, 2), (4, 3), (6, 4), (9, 5))
        ]
    words = from_items(["a b", "c a", "b"], num_shards=2).combine(str.split)
    assert list(words.filter(lambda word: word != "b").gather_sync()) == ["a", "c", "a"]
    assert list(from_range(10, 2).batch(3).for_each(sum).gather_sync()) == [3, 18, 7, 17]
    doubled = numbers.for_each(lambda n: 2 * n, max_concurrency=2, resources={"num_cpus": 0.5})
    assert sorted(doubled.gather_async()) == [2, 4, 6, 8, 10]
    assert sorted(from_range(6, 2).local_shuffle(3, seed=1).gather_sync()) == list(range(6))


def test_a_shard_is_read_by_the_task_that_it_is_sent_to() -> None:
    @ray.remote
    def total(shard: Any) -> int:
        return sum(shard)

    shards = from_range(1000, 3).shards()
    assert ray.get([total.remote(shard) for shard in shards]) == [55278, 166167, 278055]
    begun = from_range(4, 1).get_shard(0)
    assert next(begun) == 0
    with pytest.raises(SerializationError, match="has begun"):
        total.remote(begun)


@pytest.mark.parametrize(("batch_ms", "num_async"), [(0, 1), (0, 3), (20, 2)])
def test_items_come_as_they_are_there(batch_ms: int, num_async: int) -> None:
    gathered = from_range(30, 3).gather_async(batch_ms=batch_ms, num_async=num_async)
    assert sorted(gathered) == list(range(30))
    shard = from_range(30, 3).get_shard(1, batch_ms, num_async)
    assert list(shard) == list(range(10, 20))


def test_shards_are_joined_chosen_and_dealt_out_anew() -> None:
    numbers = from_range(8, 2).for_each(lambda n: n + 1)
    both = numbers.union(from_items([10, 20], 1))
    assert both.num_shards() == 3
    assert sorted(both.gather_sync()) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 20]
    assert list(numbers.select_shards([1]).gather_sync()) == [5, 6, 7, 8]
    parted = from_range(8, 2).repartition(3)
    assert sorted(parted.gather_sync()) == list(range(8))
    with pytest.raises(ValueError, match="shard"):
        numbers.get_shard(2)


def test_actors_of_ones_own_class_are_shards() -> None:
    @ray.remote
    class Source(ParallelIteratorWorker):
        def __init__(self, start: int) -> None:
            self.start = start
            super().__init__(lambda: range(start, start + 2), repeat=True)

        def begin(self) -> int:
            return self.start

    actors = [Source.remote(0), Source.remote(10)]
    assert ray.util.iter.from_actors(actors).take(6) == [0, 10, 1, 11, 0, 10]
    assert ray.get([actor.begin.remote() for actor in actors]) == [0, 10]


def test_operators_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    numbers: LocalIterator[int] = LocalIterator(lambda: range(5))
    assert list(numbers.for_each(lambda n: n + 1).filter(lambda n: n % 2)) == [1, 3, 5]
    assert list(numbers.batch(2).flatten()) == [0, 1, 2, 3, 4]
    assert list(numbers.transform(reversed)) == [4, 3, 2, 1, 0]  # type: ignore[arg-type]
    assert sorted(numbers.shuffle(3)) == [0, 1, 2, 3, 4]
    weighted = numbers.union(LocalIterator(lambda: "abc"), round_robin_weights=[2, 1])
    assert list(weighted) == [0, 1, "a", 2, 3, "b", 4, "c"]
    first, second = LocalIterator(lambda: range(3)).duplicate(2)
    assert [next(first), next(second), *first, *second] == [0, 0, 1, 2, 1, 2]
    LocalIterator(lambda: "ab").show()
    assert capsys.readouterr().out == "a\nb\n"


def test_a_serializer_of_ones_own_is_used_until_it_is_taken_back() -> None:
    class Closed:
        def __init__(self, value: int) -> None:
            self.value = value

        def __reduce__(self) -> Any:
            raise TypeError("closed")

    ray.util.register_serializer(Closed, serializer=lambda c: c.value, deserializer=Closed)
    assert ray.get(ray.put(Closed(3))).value == 3
    ray.util.deregister_serializer(Closed)
    with pytest.raises(TypeError, match="closed"):
        ray.put(Closed(3))
