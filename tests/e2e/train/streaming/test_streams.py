"""Streams over real readers: once and in order though they are killed, and nothing that stays."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError
from stoker_train.streaming.core.segments import Segment
from tests.e2e.train.streaming.conftest import Killer, Marked, write_files

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("_nothing_stays")
SIZES = [3000, 0, 20, 9000, 1, 500]


def numbers(records: Any) -> list[int]:
    return [record["n"] for record in records]


def test_each_record_comes_once_and_in_order_though_readers_are_killed(
    tmp_path: Path, seed: int
) -> None:
    wanted = write_files(tmp_path, SIZES)
    killer = Killer(tmp_path / "pids", seed)
    with stoker.data.stream(
        tmp_path / "*.jsonl",
        Marked(killer.folder),
        window=600,
        readers=2,
        piece_nbytes=4096,
        max_failures=50,
        num_cpus=0.5,
    ) as stream:
        got = []
        for record in stream:
            got.append(record["n"])
            if len(got) % 100 == 0 and killer.kills < 8:
                killer.maybe_kill(0.3)
        assert got == wanted
        assert stream.epoch == 1
        assert stream.stats.max_in_flight <= 600
        # One that has read its last piece may be killed unseen.
        assert stream.stats.replaced >= min(1, killer.kills - 2)
        assert stream.stats.records == len(wanted)


def test_a_shuffled_epoch_goes_on_from_a_state_with_other_readers(
    tmp_path: Path, seed: int
) -> None:
    wanted = write_files(tmp_path, SIZES)

    def stream(readers: int, **options: Any) -> stoker.data.Stream:
        return stoker.data.stream(
            tmp_path / "*.jsonl",
            stoker.data.JsonLines(),
            shuffle=700,
            seed=seed,
            readers=readers,
            batch=32,
            piece_nbytes=8192,
            num_cpus=0.25,
            **options,
        )

    first = stream(1)
    whole = [numbers(batch) for batch in first]
    assert sorted(chain(*whole)) == wanted
    second = [numbers(batch) for batch in first]
    assert sorted(chain(*second)) == wanted
    assert second != whole
    count = random.Random(seed).randrange(1, len(whole))
    begun = stream(3, prefetch=2)
    got = [numbers(batch) for batch in islice(begun, count)]
    resumed = stream(2)
    resumed.load_state_dict(begun.state_dict())
    got += [numbers(batch) for batch in resumed]
    assert got == whole
    assert resumed.epoch == 1
    assert [numbers(batch) for batch in resumed] == second


def test_what_was_left_of_two_shards_is_dealt_to_three(tmp_path: Path) -> None:
    wanted = write_files(tmp_path, [700, 40, 300])

    def stream(rank: int, world: int) -> stoker.data.Stream:
        return stoker.data.stream(
            str(tmp_path / "*.jsonl"),
            stoker.data.JsonLines(),
            shard=(rank, world),
            equal="pad",
            shuffle=50,
            readers=1,
            piece_nbytes=1000,
        )

    two = [stream(rank, 2) for rank in range(2)]
    got = [one for each in two for one in numbers(islice(each, 130))]
    states = [one.state_dict() for one in two]
    parts = []
    for rank in range(3):
        one = stream(rank, 3)
        one.load_state_dict(states)
        parts.append(numbers(one))
    assert len({len(part) for part in parts}) == 1
    every = Counter(chain(got, *parts))
    assert set(every) == set(wanted)
    assert every.total() - len(wanted) < 2 + 3


def test_parts_without_a_record_are_passed_over(tmp_path: Path) -> None:
    """A line may be longer than many parts, and the last have no end."""
    lines = [line for n in range(40) for line in (f"{n} é" + "x" * 700 * (n % 4), "", str(n))]
    (tmp_path / "a.txt").write_bytes("\r\n".join(lines).encode())
    with stoker.data.stream(
        tmp_path / "a.txt", stoker.data.Lines(), piece_nbytes=97, window=60, cache="memory"
    ) as stream:
        for _ in range(2):
            assert list(stream) == lines


def test_a_second_epoch_in_memory_opens_no_file(tmp_path: Path) -> None:
    wanted = write_files(tmp_path, [2000, 100])
    files = [tmp_path / "part-00.jsonl", tmp_path / "part-01.jsonl"]
    with stoker.data.stream(
        files, stoker.data.JsonLines(), shuffle=200, cache="memory", piece_nbytes=4096
    ) as stream:
        first = numbers(stream)
        opened = stream.stats.opened
        assert opened >= len(stream.pieces)
        for file in files:
            file.unlink()
        again = numbers(stream)
        assert stream.stats.opened == opened
        assert stream.stats.cached >= len(stream.pieces)
        assert sorted(first) == sorted(again) == wanted
        assert first != again


def test_what_is_lost_from_memory_is_read_again(tmp_path: Path) -> None:
    wanted = write_files(tmp_path, [900])
    with stoker.data.stream(
        str(tmp_path / "*.jsonl"), stoker.data.JsonLines(), cache="memory", piece_nbytes=4096
    ) as stream:
        assert numbers(stream) == wanted
        opened, cache = stream.stats.opened, stream._cache
        assert cache is not None
        ((_, _, ref),) = cache.chunks(Segment(1)) or []
        stoker.free(ref)
        assert numbers(stream) == wanted
        again = stream.stats.opened
        assert again > opened
        assert numbers(stream) == wanted
        assert stream.stats.opened == again


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_that_breaks_leaves_nothing_and_can_go_on(tmp_path: Path, prefetch: int) -> None:
    wanted = write_files(tmp_path, [3000])
    stream = stoker.data.stream(
        str(tmp_path / "*.jsonl"), stoker.data.JsonLines(), window=100, prefetch=prefetch
    )
    got = []
    for record in stream:
        got.append(record["n"])
        if len(got) == 150:
            break
    assert stream._reading is None
    got += numbers(stream)
    assert got == wanted


def test_a_loader_of_torch_reads_it_without_workers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    wanted = write_files(tmp_path, [100])
    stream = stoker.data.stream(str(tmp_path / "*.jsonl"), stoker.data.JsonLines())
    loader = torch.utils.data.DataLoader(stream.to_torch(), batch_size=8)
    assert torch.cat([batch["n"] for batch in loader]).tolist() == wanted
    # Not in a worker of its own here: a process with threads is not to be forked in a test.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data, "get_worker_info", lambda: object())
        with pytest.raises(BadRequestError, match="worker") as caught:
            next(iter(stream.to_torch()))
    assert caught.value.field == "num_workers"


def test_it_works_in_actors_which_have_a_shard_each(tmp_path: Path) -> None:
    wanted = write_files(tmp_path, [500, 400])

    @stoker.remote(num_cpus=0)
    def loop(rank: int) -> list[int]:
        with stoker.data.stream(
            str(tmp_path / "*.jsonl"),
            stoker.data.JsonLines(),
            shard=(rank, 2),
            readers=1,
            piece_nbytes=1000,
        ) as stream:
            return [record["n"] for record in stream]

    parts = stoker.get([loop.remote(rank) for rank in range(2)])
    assert sorted(chain(*parts)) == wanted
