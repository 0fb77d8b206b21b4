"""The loader: each sample of an epoch once, whatever becomes of ranks, batches and shares."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import IterableDataset

from stoker.exceptions import BadRequestError, ConflictError
from stoker_train.elastic.core.ledger import Entry, Ledger
from stoker_train.elastic.core.sampler import epoch_order, shares
from stoker_train.elastic.data.cursor import Cursor
from stoker_train.elastic.data.loader import ElasticLoader, MicroBatch, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterator


class Squares:
    """A map-style data set of which sample n is (n, n * n)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class InShards:
    """The same by shard and offset."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def shards(self) -> list[int]:
        return self.counts

    def read(self, shard: int, offset: int, count: int) -> Iterator[tuple[int, int]]:
        first = sum(self.counts[:shard]) + offset
        assert offset + count <= self.counts[shard]
        return ((n, n * n) for n in range(first, first + count))


class Stream(IterableDataset[Any]):
    """The same as an iterable that can only be begun, in another order in each epoch."""

    def __init__(self, length: int, has: int | None = None) -> None:
        self.length, self.has, self.epoch = length, has, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = epoch_order(self.length, 1, self.epoch, True).tolist()
        return ((n, n * n) for n in order[: self.has])


@dataclass
class Job:
    """A brute-force model of a job: its ranks, what they agree on, and every sample they were fed."""

    make_dataset: Callable[[], Any]
    length: int
    seed: int
    shuffle: bool
    workers: int = 0
    batch: int = 4
    local: int = 3
    weights: list[float] = field(default_factory=lambda: [1.0])
    generation: int = 1
    ranks: list[Rank] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    fed: list[list[int]] = field(default_factory=list)
    """The samples of each step that counts, in their order."""
    commits: list[dict[str, Any]] = field(default_factory=list)

    def resize(self, survivors: list[int], world: int) -> None:
        state = self.ranks[survivors[0]].cursor.state_dict() if survivors else None
        self.ranks = [self.ranks[one] for one in survivors]
        while len(self.ranks) < world:
            rank = Rank(self)
            if state is not None:
                rank.cursor.load_state_dict(state)
            self.ranks.append(rank)
        self.weights = [1.0] * world
        self.generation += 1

    def restore(self, commit: dict[str, Any]) -> None:
        for rank in self.ranks:
            rank.cursor.load_state_dict(commit)
        self.ledger.truncate(commit["step"])
        del self.fed[commit["step"] :]
        self.commits = [one for one in self.commits if one["step"] <= commit["step"]]

    def begin_epoch(self, epoch: int) -> None:
        self.ledger.set_length(epoch, self.length)
        for rank in self.ranks:
            rank.cursor.begin_epoch(epoch)
        self.commits.append(self.ranks[0].cursor.state_dict())

    def step(self) -> bool:
        """Do a step on all ranks; False at the epoch's end."""
        parts = [rank.read() for rank in self.ranks]
        if any(part is None for part in parts):
            assert all(part is None for part in parts)
            return False
        cursor = self.ranks[0].cursor
        count = min(self.batch, self.length - cursor.first)
        self.fed.append([one for part in parts if part is not None for one in part])
        assert len(self.fed[-1]) == count
        entry = Entry(
            cursor.epoch, cursor.step, cursor.first, count, self.generation, self.batch, 0.1
        )
        self.ledger.extend([entry])
        for rank in self.ranks:
            rank.end_step(count)
        return True


class Rank:
    """One rank: a loop over its loader that is led from outside."""

    def __init__(self, job: Job) -> None:
        self.job, self.cursor = job, Cursor()
        self.empty = 0
        self.loader = ElasticLoader(
            job.make_dataset(),
            self.cursor,
            self.plan,
            seed=job.seed,
            shuffle=job.shuffle,
            num_workers=job.workers,
            empty_step=self.empty_step,
        )
        self.batches: Iterator[Any] | None = None
        self.is_empty = False

    def plan(self) -> StepPlan:
        count = min(self.job.batch, self.job.length - self.cursor.first)
        offset, size = shares(count, self.job.weights)[self.job.ranks.index(self)]
        return StepPlan(count, offset, size, self.job.local)

    def read(self) -> list[int] | None:
        """The samples of this rank's part of the next step; None at the end of the epoch."""
        if self.cursor.first < self.job.length and self.plan().size == 0:
            self.is_empty = True  # in the loader's next turn, which the model cannot stop at
            return []
        if self.batches is None:
            self.batches = iter(self.loader)
        samples: list[int] = []
        while True:
            batch = next(self.batches, None)
            if batch is None:
                self.batches = None
                return None
            numbers, squares = batch
            assert torch.equal(squares, numbers * numbers)
            assert len(numbers) == self.loader.micro.size <= self.job.local
            samples += numbers.tolist()
            if self.loader.micro.is_last:
                return samples

    def end_step(self, count: int) -> None:
        if self.is_empty:
            self.is_empty, self.batches = False, None
        self.cursor.advance(count)

    def empty_step(self) -> None:
        raise AssertionError("the model asks for no step in which it has no share")


@pytest.mark.parametrize(
    ("make", "shuffle"),
    [
        (lambda: Squares(53), True),
        (lambda: Squares(53), False),
        (lambda: InShards([7, 0, 19, 1, 26]), True),
        (lambda: Stream(53), False),
    ],
    ids=["map", "map in order", "shards", "iterable"],
)
def test_each_sample_once_through_resizes_crashes_and_restores(
    make: Callable[[], Any], shuffle: bool, seed: int
) -> None:
    draw = random.Random(seed)
    for _ in range(6):
        job = Job(make, 53, seed, shuffle)
        job.resize([], draw.randint(1, 4))
        for epoch in range(3):
            job.begin_epoch(epoch)
            while job.step():
                disturb(draw, job)
        job.ledger.finish()
        assert job.ledger.verify() == []
        used = [one for step in job.fed for one in step]
        orders = {
            "Squares": lambda epoch: epoch_order(53, seed, epoch, shuffle).tolist(),
            "Stream": lambda epoch: epoch_order(53, 1, epoch, True).tolist(),
        }
        kind = type(make()).__name__
        for epoch in range(3):
            mine = used[53 * epoch : 53 * (epoch + 1)]
            assert sorted(mine) == list(range(53))
            if kind in orders:  # one order, whatever the ranks were
                assert mine == orders[kind](epoch)


def disturb(draw: random.Random, job: Job) -> None:
    world = len(job.ranks)
    match draw.randrange(12):
        case 0:
            job.batch = draw.randint(1, 17)
        case 1:
            job.local = draw.randint(1, 9)
        case 2:
            job.weights = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(world)]
            job.weights[draw.randrange(world)] = 1.0
        case 3:
            job.resize(list(range(draw.randint(1, world))), draw.randint(world, 4))
        case 4:
            stay = sorted(draw.sample(range(world), draw.randint(1, world)))
            job.resize(stay, len(stay))
        case 5 | 6:  # a rank dies: the others go back to a commit of this epoch
            epoch = job.ranks[0].cursor.epoch
            stay = sorted(draw.sample(range(world), draw.randint(1, world)))
            job.restore(draw.choice([one for one in job.commits if one["epoch"] == epoch][-2:]))
            job.resize(stay, draw.randint(len(stay), 4))
        case 7:  # all die: a new set goes on from the checkpoint
            epoch = job.ranks[0].cursor.epoch
            commit = draw.choice([one for one in job.commits if one["epoch"] == epoch])
            job.restore(commit)
            job.resize([0], 1)
            job.resize([0], draw.randint(1, 4))
        case 8 | 9:
            job.commits.append(job.ranks[0].cursor.state_dict())


def test_workers_that_read_ahead_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    job = Job(lambda: Squares(61), 61, seed, True, workers=1)
    job.resize([], 2)
    job.begin_epoch(0)
    changes = {2: "batch", 4: "weights", 6: "crash"}
    steps = 0
    while job.step():
        steps += 1
        match changes.get(steps):
            case "batch":
                job.batch = 5
            case "weights":
                job.weights = [1.0, 2.0]
            case "crash":
                job.restore(job.commits[0])
        if draw.random() < 0.3:
            job.ranks[0].loader.discard()
    for rank in job.ranks:
        rank.loader.close()
    job.ledger.finish()
    assert job.ledger.verify() == []
    used = [one for step in job.fed for one in step]
    assert used == epoch_order(61, seed, 0, True).tolist()
    # What workers have read ahead and dropped is counted nowhere.
    assert sum(one.count for one in job.ledger.entries) == 61


def simple_loader(length: int, plan: StepPlan, **options: Any) -> tuple[ElasticLoader, Cursor]:
    cursor = Cursor()
    loader = ElasticLoader(Squares(length), cursor, lambda: plan, shuffle=False, **options)
    return loader, cursor


def test_micro_batches_are_told_apart() -> None:
    loader, cursor = simple_loader(10, StepPlan(10, 0, 10, 4))
    seen = []
    for numbers, _ in loader:
        seen.append((loader.micro, numbers.tolist()))
        if loader.micro.is_last:
            cursor.advance(10)
    assert [one.is_last for one, _ in seen] == [False, False, True]
    assert seen[1] == (MicroBatch(3, 1, 3), [4, 5, 6])
    assert loader.samples == 10


def test_a_rank_without_a_share_takes_its_part_in_the_step() -> None:
    calls = []
    cursor = Cursor()

    def empty_step() -> None:
        calls.append(cursor.step)
        cursor.advance(5)

    loader = ElasticLoader(
        Squares(10), cursor, lambda: StepPlan(5, 5, 0, 4), shuffle=False, empty_step=empty_step
    )
    assert list(loader) == []
    assert calls == [0, 1]


def test_a_restore_in_the_middle_of_a_step_drops_the_rest_of_it() -> None:
    loader, cursor = simple_loader(12, StepPlan(6, 0, 6, 2))
    seen = []
    for numbers, _ in loader:
        seen.append(numbers.tolist())
        if len(seen) == 5:
            cursor.load_state_dict({"epoch": 0, "step": 0, "first": 0})
        elif loader.micro.is_last:
            cursor.advance(6)
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], *([n, n + 1] for n in range(0, 12, 2))]


def test_an_epoch_that_was_gone_back_behind_ends() -> None:
    loader, cursor = simple_loader(12, StepPlan(6, 0, 6, 6))
    cursor.begin_epoch(2)
    for _ in loader:
        cursor.load_state_dict({"epoch": 1, "step": 0, "first": 6})
    assert cursor.epoch == 1


def test_a_loop_that_does_not_end_its_steps_is_told_so() -> None:
    loader, _ = simple_loader(12, StepPlan(6, 0, 6, 6))
    with pytest.raises(ConflictError, match=r"call ctx\.step"):
        for _ in loader:
            pass


def test_collate_fn_and_dicts() -> None:
    loader, cursor = simple_loader(
        4, StepPlan(4, 0, 4, 4), collate_fn=lambda samples: {"rows": len(samples)}, device="cpu"
    )
    for batch in loader:
        assert batch == {"rows": 4}
        cursor.advance(4)


def test_loading_draws_nothing_from_the_models_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loader, cursor = simple_loader(12, StepPlan(4, 0, 4, 4))
    for _ in loader:
        cursor.advance(4)
    assert torch.equal(torch.rand(3), expected)


def test_data_that_cannot_be_counted_is_refused() -> None:
    def refused(dataset: Any, **options: Any) -> BadRequestError:
        with pytest.raises(BadRequestError) as caught:
            ElasticLoader(dataset, Cursor(), lambda: StepPlan(1, 0, 1, 1), **options)
        return caught.value

    assert refused(iter([1, 2, 3])).field == "dataset"
    assert refused(Squares(7), base_batch=8).field == "base_batch"
    assert refused(Stream(7), shuffle=True).field == "shuffle"


@pytest.mark.parametrize("make", [lambda: Stream(8, has=6), lambda: InShards([8])])
def test_data_that_end_early_are_an_error(make: Callable[[], Any]) -> None:
    dataset = make()
    if isinstance(dataset, InShards):
        dataset.read = lambda shard, offset, count: iter(range(count - 1))  # type: ignore[assignment,return-value]
    cursor = Cursor()
    loader = ElasticLoader(dataset, cursor, lambda: StepPlan(4, 0, 4, 4), shuffle=False)
    with pytest.raises(BadRequestError, match="ended at sample"):
        for _ in loader:
            cursor.advance(4)
