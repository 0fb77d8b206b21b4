"""The ledger: what it keeps over crashes, and that it sees every sample that was lost or doubled."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from stoker_train.elastic.core.ledger import (
    CHUNK_ENTRIES,
    HEAD,
    Entry,
    Ledger,
    decode,
    use_by_epoch,
    verify,
)


def right_ledger(draw: random.Random, epochs: int) -> tuple[list[Entry], dict[int, int]]:
    """A ledger of whole epochs with batches and generations that change."""
    entries: list[Entry] = []
    lengths = {}
    step = generation = 0
    for epoch in range(epochs):
        length = lengths[epoch] = draw.randint(1, 60)
        first = 0
        while first < length:
            batch = draw.randint(1, 12)
            generation += draw.random() < 0.2
            count = min(batch, length - first)
            entries.append(Entry(epoch, step, first, count, generation, batch, 0.1))
            step, first = step + 1, first + count
    return entries, lengths


def is_exact(entries: list[Entry], lengths: dict[int, int]) -> bool:
    """Whether each sample of each epoch was used once, and in order: by counting them all."""
    used = [(one.epoch, n) for one in entries for n in range(one.first, one.first + one.count)]
    wanted = [(epoch, n) for epoch in sorted(lengths) for n in range(lengths[epoch])]
    steps = [one.step for one in entries]
    generations = [one.generation for one in entries]
    return (
        used == wanted
        and Counter(used) == Counter(wanted)
        and steps == list(range(len(steps)))
        and generations == sorted(generations)
        and all(one.count > 0 for one in entries)
    )


def test_it_sees_what_counting_every_sample_sees(seed: int) -> None:
    draw = random.Random(seed)
    wrong = 0
    for _ in range(400):
        entries, lengths = right_ledger(draw, draw.randint(1, 3))
        assert verify(entries, lengths) == []
        damage(draw, entries)
        exact = is_exact(entries, lengths)
        problems = verify(entries, lengths)
        if not exact:
            wrong += 1
            assert problems, entries
    assert wrong > 100


def damage(draw: random.Random, entries: list[Entry]) -> None:
    place = draw.randrange(len(entries))
    one = entries[place]
    match draw.randrange(6):
        case 0:
            del entries[place]
        case 1:
            entries.insert(place, one)
        case 2:
            other = draw.randrange(len(entries))
            entries[place], entries[other] = entries[other], entries[place]
        case 3:
            entries[place] = msgspec.structs.replace(
                one, first=max(0, one.first + draw.choice([-1, 1]))
            )
        case 4:
            entries[place] = msgspec.structs.replace(one, count=one.count + draw.choice([-1, 1]))
        case 5:
            entries[place] = msgspec.structs.replace(one, generation=one.generation + 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"first": 5}, "step 1, epoch 0: samples 4 to 5 were left out"),
        ({"first": 3}, "step 1, epoch 0: samples 3 to 4 were used before"),
        ({"generation": 0}, "step 1, epoch 0: generation 0 comes after generation 1"),
        ({"step": 4}, "step 4, epoch 0: comes after step 0"),
        ({"count": 3}, "step 1, epoch 0: 3 samples in a batch of 4"),
        ({"count": 9, "batch": 9}, "step 1, epoch 0: samples 4 to 13 of an epoch of 12"),
        ({"epoch": 2, "first": 0}, "epoch 0: samples 4 to 12 were left out"),
    ],
)
def test_it_says_what_is_wrong_and_where(change: dict[str, int], says: str) -> None:
    entries = [Entry(0, n, 4 * n, 4, 1, 4, 0.1) for n in range(3)]
    assert verify(entries, {0: 12}) == []
    entries[1] = msgspec.structs.replace(entries[1], **change)
    assert says in verify(entries, {0: 12})


def test_a_job_that_runs_may_be_inside_an_epoch_and_one_that_has_ended_may_not() -> None:
    entries = [Entry(0, 0, 0, 4, 1, 4, 0.1)]
    assert verify(entries, {0: 8, 1: 8}, finished=False) == []
    assert verify(entries, {0: 8, 1: 8}) == [
        "epoch 0: samples 4 to 8 were left out",
        "epoch 1: none of its 8 samples was used",
    ]
    assert verify([], {}) == []


def test_a_long_list_of_problems_is_cut() -> None:
    problems = verify([Entry(0, 0, 0, 1, 1, 1, 0.1)] * 100, {0: 1})
    assert len(problems) == 21
    assert problems[-1].startswith("and ")


def test_what_is_written_is_read_back_over_crashes_of_the_writer(seed: int) -> None:
    """Truncations, extensions, and a writer that may be cut off between any two keys."""
    draw = random.Random(seed)
    kept: dict[str, bytes] = {}
    ledger, void_from = Ledger(), 0
    for _ in range(60):
        if draw.random() < 0.3 and len(ledger):
            back = ledger.next_step - draw.choice([1, 3, draw.randint(0, 2 * CHUNK_ENTRIES)])
            ledger.truncate(max(0, back))
            void_from = min(void_from, ledger.next_step)
        first = ledger.next_step
        if draw.random() < 0.1:
            more = -first % CHUNK_ENTRIES  # a chunk that is just full
        else:
            more = draw.choice([1, 2, draw.randint(0, 2 * CHUNK_ENTRIES)])
        ledger.extend(
            Entry(0, n, 2 * n, 2, 1, 2, draw.random()) for n in range(first, first + more)
        )
        ledger.set_length(0, 10 * draw.randint(1, 2))
        if draw.random() < 0.3:
            continue  # several changes, one write
        changes = list(ledger.changes().items())
        cut = draw.randrange(len(changes) + 1) if draw.random() < 0.2 else len(changes)
        for name, value in changes[:cut]:
            if value is None:
                kept.pop(name, None)
            else:
                kept[name] = value
        read = decode(kept)
        if cut == len(changes):
            assert read.entries == ledger.entries
            assert read.head == ledger.head
            assert read.changes() == {}
            void_from = len(ledger)
        else:
            # The controller has died, and the next one goes on from a checkpoint, of a step all of
            # whose entries were written before.
            step = draw.randint(0, min(len(read), len(ledger), void_from))
            read.truncate(step)
            assert read.entries == ledger.entries[:step]
            ledger, void_from = read, step


def test_entries_that_come_twice_count_once() -> None:
    ledger = Ledger()
    entries = [Entry(0, n, n, 1, 1, 1, 0.1) for n in range(5)]
    ledger.extend(entries[:3])
    ledger.extend(entries[1:])
    assert ledger.entries == entries
    assert ledger.truncate(2) == 3
    assert ledger.next_step == 2
    assert ledger.truncate(7) == 0


def test_only_what_changed_is_written_and_whole_chunks_stay() -> None:
    ledger = Ledger()
    ledger.extend(Entry(0, n, n, 1, 1, 1, 0.1) for n in range(CHUNK_ENTRIES + 1))
    assert list(ledger.changes()) == ["00000000", "00000001", HEAD]
    ledger.extend([Entry(0, CHUNK_ENTRIES + 1, CHUNK_ENTRIES + 1, 1, 1, 1, 0.1)])
    assert list(ledger.changes()) == ["00000001"]
    assert ledger.changes() == {}
    ledger.truncate(CHUNK_ENTRIES)
    assert ledger.changes()["00000001"] is None
    ledger.finish()
    assert list(ledger.changes()) == [HEAD]


def test_use_by_epoch() -> None:
    entries = [
        Entry(0, 0, 0, 4, 1, 4, 0.1),
        Entry(0, 1, 4, 2, 2, 8, 0.1),
        Entry(1, 2, 0, 8, 3, 8, 0.1),
    ]
    first, second = use_by_epoch(entries, {0: 6})
    assert (first.samples, first.length, first.steps) == (6, 6, 2)
    assert (first.first_generation, first.last_generation) == (1, 2)
    assert (first.least_batch, first.largest_batch) == (4, 8)
    assert (second.samples, second.length) == (8, None)
