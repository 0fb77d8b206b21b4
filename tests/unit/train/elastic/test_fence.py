"""Two controllers of one job over one store: only what the one that took over last writes is there."""

from __future__ import annotations

import random

import pytest

from stoker_train.elastic.core.ledger import Entry, Ledger, chunk_key, decode
from stoker_train.elastic.fence import INDEX, FencedKey, FencedLedger, decode_index
from stoker_wire.errors import ConflictError, FencedError
from tests.sim.training.records import Keys


class Losing(Keys):
    """A store in memory. ``lost`` answers of puts are lost: they are done, and raise."""

    lost = 0

    def put(self, name: str, data: bytes, *, over: bytes | None) -> bool:
        done = super().put(name, data, over=over)
        if done and self.lost:
            self.lost -= 1
            raise ConnectionError("the answer is lost")
        return done


def entries(first: int, count: int, generation: int) -> list[Entry]:
    return [Entry(0, step, 4 * step, 4, generation, 4, 0.1) for step in range(first, first + count)]


def test_random_histories_of_controllers_leave_what_the_newest_wrote(seed: int) -> None:
    rng, keys = random.Random(seed), Keys()
    ones: list[tuple[FencedLedger, Ledger]] = []
    expected: list[Entry] = []
    for _ in range(80):
        if not ones or rng.random() < 0.05:
            new = FencedLedger(keys, len(ones) + 1)
            ones.append((new, decode(new.take())))
            assert list(ones[-1][1].entries) == expected
        # Some that are past come back, and write.
        number = len(ones) - 1 if rng.random() < 0.6 else rng.randrange(len(ones))
        writer, ledger = ones[number]
        ledger.truncate(max(0, ledger.next_step - rng.choice([0, 0, 3, 1500])))
        ledger.extend(entries(ledger.next_step, rng.choice([1, 40, 1200]), number))
        try:
            staged = writer.stage(ledger.changes())
            assert list(keys.entries()) == expected, "nothing counts before the index says so"
            writer.publish(staged)
            if number == len(ones) - 1:  # else it had nothing to write
                expected = list(ledger.entries)
        except FencedError:
            assert number < len(ones) - 1
        else:
            writer.sweep()
        assert list(keys.entries()) == expected


def test_a_write_whose_answer_was_lost_is_no_ones_but_ones_own() -> None:
    keys = Losing()
    one = FencedKey(keys, "progress", 1)
    one.take(lambda _: b'{"attempt": 1}')
    keys.lost = 1
    with pytest.raises(ConnectionError):
        one.write(b'{"attempt": 1, "steps": 1}')
    one.write(b'{"attempt": 1, "steps": 2}')
    two = FencedKey(keys, "progress", 2)
    two.take(lambda found: b'{"attempt": 2, "steps": 2}')
    assert not one.holds() and two.holds()
    with pytest.raises(FencedError, match="attempt 2"):
        one.write(b'{"attempt": 1, "steps": 3}')
    with pytest.raises(FencedError, match="attempt 2"):
        one.take(lambda _: b'{"attempt": 1}')
    assert keys.values["progress"] == b'{"attempt": 2, "steps": 2}'


def test_only_the_result_of_the_controller_that_has_the_job_counts() -> None:
    keys = Keys()
    one, two = FencedLedger(keys, 1), FencedLedger(keys, 2)
    one.take()
    one.close()
    assert decode_index(keys.values[INDEX]).result == 1
    two.take()
    assert decode_index(keys.values[INDEX]).result == 0, "it goes on"
    with pytest.raises(FencedError):
        one.close()
    two.close()
    assert decode_index(keys.values[INDEX]).result == 2


def test_progress_with_metrics_that_are_no_numbers_is_taken_over_and_written() -> None:
    keys = Losing()
    one, two = FencedKey(keys, "progress", 1), FencedKey(keys, "progress", 2)
    bad = b'{"metrics": {"loss": NaN, "norm": -Infinity}, "attempt": %d}'
    one.take(lambda _: bad % 1)
    keys.lost = 1
    with pytest.raises(ConnectionError):
        one.write(bad % 1 + b" ")
    one.write(bad % 1)
    two.take(lambda _: bad % 2)
    with pytest.raises(FencedError, match="attempt 2"):
        one.write(bad % 1)


def test_a_name_whose_put_has_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys()
    ledger = FencedLedger(keys, 1)
    ledger.take()
    names: list[str] = []

    def put_new(name: str, data: bytes) -> None:
        names.append(name)
        if len(names) == 2:
            raise ConnectionError("the answer is lost")

    monkeypatch.setattr(keys, "put_new", put_new)
    with pytest.raises(ConnectionError):
        ledger.stage({chunk_key(0): b"a", chunk_key(1): b"b"})
    ledger.stage({chunk_key(0): b"c", chunk_key(1): b"d"})
    assert len(set(names)) == 4, names


def test_what_was_staged_is_not_published_once_the_ledger_is_closed() -> None:
    keys = Keys()
    writer, ledger = FencedLedger(keys, 1), Ledger()
    writer.take()
    ledger.extend(entries(0, 4, 1))
    staged = writer.stage(ledger.changes())
    writer.close()
    with pytest.raises(ConflictError, match="closed"):
        writer.publish(staged)
    assert decode_index(keys.values[INDEX]).result == 1
