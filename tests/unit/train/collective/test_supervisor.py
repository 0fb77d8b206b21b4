"""The supervisor: which news, and which silence, ends a group, and who is named. Time is given to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_train.collective import supervisor as module
from stoker_train.collective.errors import CollectiveError, Failure, MemberLostError
from stoker_train.collective.headers import Call
from stoker_train.collective.members import Member
from stoker_train.collective.supervisor import Status, Supervisor
from stoker_wire.messages.events import KvChange
from stoker_wire.messages.work import Actor, ActorState

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S, STALL_S = 30.0, 4.0
MEMBERS = {r: Member(rank=r, actor_id=f"a_{r}", class_name="W", pid=r) for r in range(4)}


class Io:
    """An IO thread that starts nothing."""

    running = True

    def __init__(self) -> None:
        self.background = SimpleNamespace(spawn=self._spawn)

    def _spawn(self, work: Any, **_: Any) -> Any:
        work.close()
        return SimpleNamespace(cancel=lambda: None)

    def run(self, work: Any, _: float) -> int:
        work.close()
        return 0

    def call_soon(self, function: Callable[[], None]) -> None:
        function()


class Lane:
    """A lane in which an operation runs since ``began_s``."""

    def __init__(self, label: str = "", sequence: int = 5, began_s: float = 100.0) -> None:
        self.label, self.sequence, self.ranks, self.broken = label, sequence, (0, 1, 2, 3), ""
        self.failure: Failure | None = None
        self.current: Any = SimpleNamespace(
            call=Call("all_reduce", "sum"), began_s=began_s, limit_s=LIMIT_S, reported=0
        )

    def fail(self, failure: Failure) -> None:
        self.failure = failure


class Watched(Supervisor):
    """A supervisor of rank 0 that keeps what it would tell."""

    def __init__(self) -> None:
        super().__init__("g", 0, timeout_s=LIMIT_S, stall_s=STALL_S)
        self._members = dict(MEMBERS)
        self.told: list[tuple[str, object]] = []
        self.is_heard = True
        self.lane = Lane()
        self.add(self.lane)  # type: ignore[arg-type]

    def tell(self, what: str, value: object) -> None:
        self.told.append((what, value))
        if what == "ask" and self.is_heard:
            self.at(0, 5)

    def hears(self, key: str, value: object) -> None:
        packed = msgspec.msgpack.encode(value)
        self._on_key(KvChange(namespace="n", key=key, value=packed))

    def at(self, rank: int, begun: int, **running: str) -> None:
        self.hears(f"at/{rank}", Status(rank, {"": begun}, running))

    def ticks(self, *times_s: float) -> list[str]:
        """What was told at those times."""
        self.told.clear()
        for now_s in times_s:
            self._tick(now_s)
        return [what for what, _ in self.told]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    job = SimpleNamespace(namespace="n", job_id="j")
    runtime = SimpleNamespace(io=Io(), job=job, clients=SimpleNamespace(gcs=None))
    monkeypatch.setattr(module.current, "runtime", lambda: runtime)
    return Watched()


def actor(rank: int, state: ActorState = ActorState.DEAD, incarnation: int = 0) -> Actor:
    return Actor(
        actor_id=f"a_{rank}", job_id="j", class_name="W", state=state, incarnation=incarnation
    )


def test_the_death_of_a_members_actor_ends_all_lanes(watched: Watched) -> None:
    late = Lane("set 0,1")
    watched._on_death(actor(9))
    watched.hears("left/1", Status(1, {"": 5}, {}))
    watched._on_death(actor(1))  # it had left before
    watched._on_death(actor(0))  # its own: that it reads this shows that it lives
    assert watched.failure is None
    watched._on_death(actor(2))
    watched._on_death(actor(3))
    watched.add(late)  # type: ignore[arg-type]
    for lane in (watched.lane, late):
        assert lane.failure is not None
        error = lane.failure.error()
        assert isinstance(error, MemberLostError)
        assert (error.extra, "W a_2, pid 2" in str(error)) == (
            {"ranks": [2], "actors": ["a_2"]},
            True,
        )
    with pytest.raises(MemberLostError, match="rank 2 of group 'g' died"):
        watched.check()
    assert watched.told == []  # each member hears of it by itself


def test_an_abort_is_taken_over_and_a_question_answered(watched: Watched) -> None:
    watched.hears("ask", 1)
    ((what, status),) = watched.told
    assert (what, status) == ("at/0", Status(0, {"": 5}, {"": "all_reduce sum"}))
    watched.hears("abort", Failure(code="collective_failed", text="enough", ranks=(3,)))
    with pytest.raises(CollectiveError, match="enough"):
        watched.check()


def test_what_this_member_aborts_is_told(watched: Watched) -> None:
    watched.fail(Failure(code="collective_failed", text="x" * 5000, actors=("a_1",)))
    ((what, told),) = watched.told
    assert what == "abort"
    assert len(msgspec.msgpack.encode(told)) < 1000  # more is not in the news of a key


def test_a_status_stays_small_enough_to_be_heard(watched: Watched) -> None:
    for number in range(20):
        lane = Lane(f"set {number}")
        lane.current.call = Call("x" * 300)
        watched.add(lane)  # type: ignore[arg-type]
    assert len(msgspec.msgpack.encode(watched._status())) < 1000


def test_a_member_that_left_is_missed_only_by_what_it_has_not_done(watched: Watched) -> None:
    watched.hears("left/1", Status(1, {"": 5}, {}))
    assert watched.ticks(101.0) == []
    assert watched.failure is None
    watched.lane.sequence = 6
    watched.ticks(101.2)
    with pytest.raises(CollectiveError, match="rank 1 has left group 'g'"):
        watched.check()


def test_a_stall_is_reported_once_per_interval_and_ends_nothing(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    assert watched.ticks(101.0, 103.9) == []
    assert watched.ticks(104.1, 104.4) == ["ask"]
    watched.at(1, 5, **{"": "all_reduce sum"})
    watched.at(2, 4)
    watched.ticks(109.2, 109.4)
    watched._tick(111.9)
    reports = [one.getMessage() for one in caplog.records]
    assert len(reports) == 1
    assert "rank 2 (W a_2, pid 2) has begun 4 of them and is in no collective" in reports[0]
    assert "rank 3 (W a_3, pid 3) does not answer" in reports[0]
    assert "rank 1 (" not in reports[0]
    assert watched.failure is None


def test_the_limit_names_who_did_not_come_and_who_is_silent(watched: Watched) -> None:
    watched.lane.current.reported = 100
    assert watched.ticks(124.9) == []
    assert watched.ticks(125.1, 126.0) == ["ask"]
    watched.at(1, 5)
    watched.at(3, 4, other="recv")
    assert watched.ticks(129.9) == []
    watched.ticks(130.0)
    assert watched.failure is not None
    assert (watched.failure.code, watched.failure.ranks) == ("collective_timeout", (2, 3))
    text = watched.failure.text
    assert text.startswith("ranks [2, 3] of group 'g' did not come within 30 s\n")
    assert "rank 3 (W a_3, pid 3) has begun 4 of them and waits in recv" in text
    assert "rank 2 (W a_2, pid 2) does not answer" in text


def test_an_exchange_that_does_not_end_blames_nobody(watched: Watched) -> None:
    watched.lane.current.reported = 100
    watched.ticks(126.0)
    for rank in (1, 2, 3):
        watched.at(rank, 5)
    watched.ticks(130.0)
    assert watched.failure is not None
    assert watched.failure.ranks == ()
    assert watched.failure.text.startswith("an exchange of group 'g' did not end within 30 s")
    assert "all members are in it" in watched.failure.text


def test_nobody_is_blamed_while_the_control_store_does_not_answer(watched: Watched) -> None:
    watched.is_heard = False
    watched.lane.current.reported = 100
    watched.ticks(126.0, 130.0)
    assert watched.failure is not None
    assert watched.failure.ranks == ()
    assert "the control store does not answer" in watched.failure.text


@pytest.mark.parametrize(
    ("answers", "code", "ranks"),
    [((1, 2), "collective_member_lost", (3,)), ((1, 2, 3), "collective_failed", ())],
)
def test_a_broken_connection_waits_for_the_news_of_a_death(
    watched: Watched, answers: tuple[int, ...], code: str, ranks: tuple[int, ...]
) -> None:
    watched.lane.broken = "Connection closed by peer"
    watched._broken[watched.lane] = 101.0  # type: ignore[index]
    assert watched.ticks(101.1, 102.0) == ["ask"]
    for rank in answers:
        watched.at(rank, 5)
    assert watched.failure is None
    watched.ticks(103.6)
    assert watched.failure is not None
    assert (watched.failure.code, watched.failure.ranks) == (code, ranks)
    assert "Connection closed by peer" in watched.failure.text
