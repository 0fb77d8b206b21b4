"""Members: which records of an actor mean that a member's process is over."""

from __future__ import annotations

import pytest

from stoker_train.collective.members import Member
from stoker_wire.messages.work import Actor, ActorState

MEMBER = Member(rank=1, actor_id="a_1", class_name="W", incarnation=2, pid=7)


@pytest.mark.parametrize(
    ("actor_id", "state", "incarnation", "ended"),
    [
        ("a_1", ActorState.ALIVE, 2, False),
        ("a_1", ActorState.DEAD, 2, True),
        ("a_1", ActorState.RESTARTING, 3, True),
        ("a_1", ActorState.RESTARTING, 2, False),
        ("a_1", ActorState.DEAD, 4, True),
        ("a_2", ActorState.DEAD, 2, False),
    ],
)
def test_a_member_is_over_with_its_incarnation(
    actor_id: str, state: ActorState, incarnation: int, *, ended: bool
) -> None:
    record = Actor(
        actor_id=actor_id, job_id="j", class_name="W", state=state, incarnation=incarnation
    )
    assert MEMBER.is_ended_by(record) is ended


def test_a_member_that_is_no_actor_has_no_record_but_a_title() -> None:
    driver = Member(rank=0, peer_id="d_1", pid=8)
    assert not driver.is_ended_by(
        Actor(actor_id="", job_id="j", class_name="W", state=ActorState.DEAD)
    )
    assert (driver.title, MEMBER.title) == ("d_1, pid 8", "W a_1, pid 7")
