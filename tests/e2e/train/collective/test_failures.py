"""``stoker.collective`` where it fails: calls that differ, and members that die, hang or never come."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker import collective
from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError, NotFoundError
from tests.e2e._cluster import WAIT_S, caught
from tests.e2e.train.collective.crew import by_value, outcome, until_waiting
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.train.collective.crew import Crew


def test_what_does_not_match_is_named_by_all_and_the_group_goes_on(
    crew: Callable[[int], Crew],
) -> None:
    def work() -> list[str]:
        import numpy as np

        import stoker

        group = stoker.collective.group()
        odd = group.rank == 1
        said = []
        for call in (
            lambda: group.all_reduce(np.ones(4 + odd), name="grad"),
            lambda: group.all_reduce(np.ones(4, dtype="f4" if odd else "f8")),
            lambda: group.all_reduce(np.ones(4), "max" if odd else "sum"),
            lambda: group.broadcast(np.ones(4), 1) if odd else group.barrier(),
            lambda: group.send(np.ones(2), 1) if not odd else group.recv(np.ones(3), 0),
        ):
            try:
                call()
            except stoker.collective.MismatchError as error:
                said.append(str(error))
        assert group.all_reduce(np.ones(1))[0] == 2
        return said

    two = crew(2)
    two.form()
    first, second = two.run(work)
    assert first == second
    assert len(first) == 5
    assert "rank 0 at #2: all_reduce sum float64 (4,) 'grad'" in first[0]
    assert "rank 1 at #2: all_reduce sum float64 (5,) 'grad'" in first[0]
    assert ["float32" in first[1], "max" in first[2], "barrier" in first[3]] == [True] * 3
    assert "rank 1 at #1: send float64 (3,)" in first[4]


def test_a_member_killed_in_a_collective_fails_all_others_and_they_can_form_anew(
    crew: Callable[[int], Crew],
) -> None:
    def threads() -> int:
        import threading

        return sum(one.name == "collective-all" for one in threading.enumerate())

    four = crew(4)
    four.form()
    collective.init_group(four.members[:3], name="spared", timeout_s=WAIT_S)
    victim, pid = four.members[3], four.pids()[3]
    refs = [member.run.remote(outcome) for member in four.members[:3]]
    until_waiting(four, 0, 1, 2)
    os.kill(pid, signal.SIGKILL)
    for kind, text, ranks in stoker.get(refs, timeout=WAIT_S):
        assert (kind, ranks) == ("MemberLostError", [3])
        assert victim.actor_id in text
        assert f"pid {pid}" in text
    four.members.remove(victim)
    again = four.run(outcome)
    assert [(kind, ranks) for kind, _, ranks in again] == [("MemberLostError", [3])] * 3
    # What hung in the connections ends as they close, one member after the other.
    until(lambda: four.run(threads) == [1] * 3, WAIT_S, "only the lane of the other group is left")

    def spared() -> list[int]:
        import stoker

        return list(stoker.collective.group("spared").all_gather_object(1))

    assert four.run(spared) == [[1, 1, 1]] * 3
    four.form()  # under the same name: the failed one gives way
    assert four.run(outcome) == [("", "", [])] * 3


def test_a_member_that_is_stopped_is_named_when_its_time_is_over(
    crew: Callable[[int], Crew],
) -> None:
    three = crew(3)
    three.form(timeout_s=6.0)
    pid = three.pids()[0]  # rank 0, who serves the store of the group
    os.kill(pid, signal.SIGSTOP)
    try:
        refs = [member.run.remote(outcome) for member in three.members[1:]]
        for kind, text, ranks in stoker.get(refs, timeout=WAIT_S):
            assert (kind, ranks) == ("CollectiveTimeoutError", [0])
            assert text.startswith("rank 0 of group 'default' did not come within 6 s")
            assert f"pid {pid}) does not answer" in text
    finally:
        os.kill(pid, signal.SIGCONT)
    # What the others had sent before may still arrive, so that one call succeeds.
    until(
        lambda: stoker.get(three.members[0].run.remote(outcome), timeout=WAIT_S)[0],
        WAIT_S,
        "the one that was stopped hears that the group is over",
    )


def test_a_stall_is_reported_with_who_has_not_come(crew: Callable[[int], Crew]) -> None:
    def stalled() -> list[str]:
        import stoker

        return stoker.collective.group().stalled()

    three = crew(3)
    three.form(stall_s=0.5)
    refs = [member.run.remote(outcome) for member in three.members[:2]]

    def named() -> str | None:
        (text, *_) = stoker.get(three.members[0].run.remote(stalled), timeout=WAIT_S) or [""]
        return text if "rank 2" in text and "does not answer" not in text else None

    text = until(named, WAIT_S, "rank 2 is known not to have come")
    assert text is not None
    assert "all_reduce sum float64 (1000,) 'grad' is #2 of the group" in text
    assert "has begun 1 of them and is in no collective" in text
    assert "rank 1 (" not in text
    assert (
        stoker.get([*refs, three.members[2].run.remote(outcome)], timeout=WAIT_S)
        == [("", "", [])] * 3
    )
    assert stoker.get(three.members[0].run.remote(stalled), timeout=WAIT_S) == []


def test_an_abort_and_a_leave_end_the_waits_of_others(crew: Callable[[int], Crew]) -> None:
    def abort() -> None:
        import stoker

        stoker.collective.group().abort("the loss is NaN")

    def leave() -> None:
        import stoker

        stoker.collective.destroy_group()

    by_value(abort, leave)
    two = crew(2)
    for end, text in ((abort, "aborted by rank 1"), (leave, "rank 1 has left group 'default'")):
        two.form()
        ref = two.members[0].run.remote(outcome)
        until_waiting(two, 0)
        stoker.get(two.members[1].run.remote(end), timeout=WAIT_S)
        kind, said, ranks = stoker.get(ref, timeout=WAIT_S)
        assert (kind, ranks) == ("CollectiveError", [1])
        assert text in said


def test_who_is_missing_or_there_twice_is_named(crew: Callable[[int], Crew]) -> None:
    def join(rank: int, attempt: int, timeout_s: float) -> None:
        import stoker

        stoker.collective.join(
            "half", rank=rank, world_size=2, attempt=attempt, join_timeout_s=timeout_s
        )

    def find() -> None:
        import stoker

        stoker.collective.group("half")

    two = crew(2)
    one, other = two.members
    alone = caught(
        lambda: stoker.get(one.run.remote(join, 0, 0, 1.0), timeout=WAIT_S), GetTimeoutError
    )
    assert "ranks [1] did not come" in str(alone)
    with pytest.raises(NotFoundError, match="in no group 'half'"):
        stoker.get(one.run.remote(find), timeout=WAIT_S)
    with pytest.raises(BadRequestError, match="has no rank 2"):
        stoker.get(one.run.remote(join, 2, 0, 1.0), timeout=WAIT_S)
    # What the rank that waited in vain had announced is gone: the same attempt can be made again.
    both = [one.run.remote(join, 0, 0, WAIT_S), other.run.remote(join, 1, 0, WAIT_S)]
    stoker.get(both, timeout=2 * WAIT_S)
    with pytest.raises(ConflictError, match="is in a group 'half' already"):
        stoker.get(one.run.remote(join, 0, 1, 1.0), timeout=WAIT_S)
    for wrong in ([], [one, one]):
        with pytest.raises(BadRequestError, match="give one or more, each once"):
            collective.init_group(wrong)
