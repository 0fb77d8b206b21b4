"""The numbering of the event log: how many numbers there are on both sides of its gaps."""

from __future__ import annotations

import random

import pytest

from stoker_gcs.state.numbering import Gap, Numbering, gap_of


@pytest.mark.parametrize(
    "gaps", [(), (Gap(0, 7),), (Gap(3, 9),), (Gap(20, 25), (Gap(5, 11))), (Gap(4, 5),)]
)
def test_counting_agrees_with_a_list_of_all_numbers(gaps: tuple[Gap, ...]) -> None:
    numbering = Numbering(gaps)
    numbers = [
        number
        for number in range(1, 60)
        if not any(gap.last < number < gap.following for gap in gaps)
    ]
    assert [number for number in range(1, 60) if not numbering.skips(number)] == numbers
    for after in range(60):
        for upto in range(after, 60):
            between = [number for number in numbers if after < number <= upto]
            assert numbering.count(after, upto) == len(between)
    for at, number in enumerate(numbers):
        for count in range(at + 1):
            after = numbering.back(number, count)
            assert numbering.count(max(0, after), number) == count
        for count in range(1, len(numbers) - at):
            assert numbering.ahead(number, count) == numbers[at + count]
    assert numbering.back(numbers[-1], len(numbers) + 5) < 0


def test_a_log_with_a_wide_gap_is_forgotten_in_few_batches() -> None:
    numbering = Numbering((Gap(1_000, 10**15),))
    last, at, batches = 10**15 + random.Random(3).randrange(500), 0, 0
    upto = numbering.back(last, 100)
    while at < upto:
        at, batches = min(upto, numbering.ahead(at, 300)), batches + 1
    assert batches < 10


def test_a_gap_is_read_from_its_row() -> None:
    assert gap_of("gap:12", "99") == Gap(12, 99)
