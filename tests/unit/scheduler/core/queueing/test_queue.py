"""The order of requests: priority, fair share, time; what a wait that passes says and keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.state import State
from tests.unit.scheduler.core_driver import POLICY, Core, is_reply, of

if TYPE_CHECKING:
    from types import FrameType


def test_grants_as_far_as_possible_and_the_rest_is_requested_again() -> None:
    core = Core({"CPU": 2})
    first = core.ask(count=5, CPU=1)
    assert len(core.granted(first) or ()) == 2
    assert not core.state.pending


def test_a_blocked_head_does_not_block_what_fits() -> None:
    core = Core({"CPU": 4})
    core.ask("p_1", CPU=3)
    big, small = core.ask("p_2", CPU=4), core.ask("p_3", CPU=1)
    assert core.granted(big) is None and core.granted(small)


def test_priority_goes_first_then_the_least_served_then_the_first() -> None:
    core = Core({"CPU": 4})
    held = core.granted(core.ask("p_1", count=3, CPU=1)) or ()
    last = core.granted(core.ask("p_9", CPU=1)) or ()
    waiting = {
        "more": core.ask("p_1", CPU=1),
        "none": core.ask("p_2", CPU=1),
        "later": core.ask("p_3", CPU=1),
        "urgent": core.ask("p_1", CPU=1, priority=5),
    }
    order = []
    for lease_id in (*held[:2], *last, held[2]):
        core.release(lease_id)
        order += [name for name, r in waiting.items() if core.granted(r) and name not in order]
    assert order == ["urgent", "none", "later", "more"]


def test_waiting_raises_the_priority() -> None:
    core = Core({"CPU": 1})
    (held,) = core.granted(core.ask("p_1", CPU=1)) or ()
    old = core.ask("p_2", CPU=1, wait_s=500)
    core.wait(2.5 * POLICY.aging_s)
    urgent = core.ask("p_3", CPU=1, priority=1)
    core.release(held)
    assert core.granted(old) and core.granted(urgent) is None


def test_a_request_repeated_after_an_empty_wait_keeps_its_position() -> None:
    core = Core({"CPU": 1})
    (held,) = core.granted(core.ask("p_1", CPU=1)) or ()
    core.ask("p_2", CPU=1, wait_s=1)
    core.wait(0.5)
    other = core.ask("p_3", CPU=1)
    core.wait(1)
    again = core.ask("p_2", CPU=1)
    core.release(held)
    assert core.granted(again) and core.granted(other) is None


def test_an_empty_wait_says_why_and_how_many_are_ahead() -> None:
    core = Core({"CPU": 1})
    core.ask("p_1", CPU=1)
    core.ask("p_2", CPU=1)
    late = core.ask("p_3", CPU=1, wait_s=1)
    reply = next(c for c in core.wait(1.5) if is_reply(c, cmd.Reply, late))
    assert reply.lease_ids == () and reply.queue_position == 1
    assert "1 CPU fits on none of 1 node now" in reply.note


def work_of(call: Callable[[], object]) -> int:
    """Return how many operations ``call`` takes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_requests_whose_wait_passes_do_not_look_at_each_other() -> None:
    def work(requests: int) -> int:
        state = State(policy=POLICY, term="1")
        step(state, ev.NodeJoined(at_s=0.0, spec=make_node_spec("n_1", {"CPU": 4})))
        for index in range(requests):
            for requirements in (make_requirements({}), make_requirements({"CPU": 8})):
                asked = ev.LeaseRequested(
                    at_s=0.0,
                    request_id=f"r_{requirements.text}_{index}",
                    owner_id="gcs",
                    job_id="job_1",
                    requirements=requirements,
                    class_key=f"{index}",
                    count=1,
                    deadline_s=1.0,
                    wait_if_infeasible=True,
                )
                step(state, asked)
        done: list[cmd.Command] = []
        count = work_of(lambda: done.extend(step(state, ev.Tick(at_s=10.0))))
        notes = [reply.note for reply in of(cmd.Reply, done)]
        started = [note for note in notes if "being started on node n_1" in note]
        assert (len(notes), len(started)) == (2 * requests, requests)
        return count

    assert work(160) < 10 * work(20)


def test_a_queue_has_its_turn_however_many_accounts_and_kinds_of_another_wait() -> None:
    for kinds in (1, 100):
        core = Core({"CPU": 10})
        core.feed(ev.QueuesChanged(at_s=0.0, queues=(QueueSpec(name="a"), QueueSpec(name="b"))))
        held = core.granted(core.ask("p_b", count=10, CPU=1, queue="b")) or ()
        for number in range(1100):
            requirements = make_requirements({"CPU": 0.5 + number % kinds / 1000})
            request = ev.LeaseRequested(
                at_s=0.0,
                request_id=f"r_b{number}",
                owner_id=f"p_{number}",
                job_id="job_1",
                requirements=requirements,
                class_key=requirements.text,
                count=1,
                deadline_s=100.0,
                kind=ev.Kind.ACTOR,
                queue="b",
            )
            step(core.state, request)
        last = core.ask("p_a", CPU=1, queue="a")
        core.release(held[0])
        assert core.granted(last), kinds
