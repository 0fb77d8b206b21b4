"""Extenders in the core: asked once, waited for by name, obeyed until their answer is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.extenders import ExtenderAnswer
from stoker_scheduler.core.model.gangs import GangStrategy, make_gang
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.placement.explain import explain
from stoker_scheduler.core.placement.feasibility import Rule
from stoker_scheduler.core.placement.verdicts import PlacementRequest, choose
from stoker_scheduler.core.queueing import extenders
from tests.unit.scheduler.core_driver import POLICY, Core, of

if TYPE_CHECKING:
    import pytest

WANTED = make_requirements({"CPU": 1}, extenders=("x",))
LARGE = make_requirements({"CPU": 2}, extenders=("x",))


def answer(core: Core, kind: Requirements, *, valid_s: float = 5.0, **gains: float) -> None:
    refusals = {n: "extender x: no" for n in core.state.nodes if n not in gains}
    made = ExtenderAnswer(gains, refusals, core.at_s + valid_s)
    core.feed(ev.ExtendersAnswered(at_s=core.at_s, requirements=kind, answer=made))


def asked(core: Core) -> list[Requirements]:
    return [command.requirements for command in of(cmd.AskExtenders, core.out)]


def test_a_request_waits_for_the_answer_and_goes_where_it_says() -> None:
    core = Core({"CPU": 4}, {"CPU": 4}, {"CPU": 4})
    first, second = core.ask(requirements=WANTED), core.ask("p_2", requirements=WANTED)
    assert asked(core) == [WANTED], "once for equal requirements"
    assert core.granted(first) is None
    text = explain(core.state, WANTED, "train").summary
    assert text == "1 CPU for 'train' waits for extender x"
    answer(core, WANTED, n_2=0.0, n_3=5.0)
    for request in (first, second):
        (lease_id,) = core.granted(request) or ()
        assert core.state.leases[lease_id].node_id == "n_3"
    third = core.ask("p_3", requirements=WANTED)
    assert core.granted(third) and asked(core) == [WANTED], "the answer still holds"
    (refused,) = [v for v in explain(core.state, WANTED, "").verdicts if v.node_id == "n_1"]
    assert refused.rules == (Rule.EXTENDER,) and refused.detail == "extender x: no"


def test_an_answer_is_asked_for_again_when_it_is_over_and_something_waits() -> None:
    core = Core({"CPU": 4})
    request = core.ask(requirements=WANTED)
    answer(core, WANTED)
    assert core.granted(request) is None and asked(core) == [WANTED]
    core.wait(4)
    assert asked(core) == [WANTED]
    core.wait(2)
    assert asked(core) == [WANTED, WANTED]
    answer(core, WANTED, n_1=0.0)
    assert core.granted(request)
    core.wait(20)
    assert asked(core) == [WANTED, WANTED], "nothing waits"
    assert not core.state.extender_answers
    late = core.ask("p_2", requirements=WANTED)
    assert core.granted(late) is None and len(asked(core)) == 3


def test_a_node_that_joins_later_waits_for_the_next_answer() -> None:
    core = Core({"CPU": 4})
    request = core.ask(requirements=WANTED)
    answer(core, WANTED)
    core.feed(ev.NodeJoined(at_s=core.at_s, spec=make_node_spec("n_9", {"CPU": 4})))
    assert core.granted(request) is None
    verdicts = {v.node_id: v.rules for v in explain(core.state, WANTED, "").verdicts}
    assert verdicts == {"n_1": (Rule.EXTENDER,), "n_9": (Rule.EXTENDER_PENDING,)}
    core.wait(6)
    answer(core, WANTED, n_9=0.0)
    assert core.granted(request)


def test_a_gang_waits_for_the_answers_about_all_of_its_bundles() -> None:
    core = Core({"CPU": 4}, {"CPU": 4})
    gang = make_gang([WANTED, LARGE, make_requirements({"CPU": 1})], GangStrategy.PACK)
    core.feed(ev.GroupAdded(at_s=0.0, group_id="pg_1", job_id="job_1", gang=gang))
    core.ask_gang(gang)
    assert asked(core) == [LARGE, WANTED]
    assert "waits for extender x" in explain(core.state, gang, "").summary
    answer(core, WANTED, n_1=0.0)
    assert not core.held()
    answer(core, LARGE, n_2=0.0)
    assert core.held()[0] == "n_1" and core.held()[1] == "n_2"


def test_no_more_answers_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extenders, "MAX_ANSWERS", 2)
    core = Core({"CPU": 64})
    kinds = [make_requirements({"CPU": n}, extenders=("x",)) for n in (1, 2, 3, 4)]
    waits = core.ask("p_0", requirements=kinds[0])
    answer(core, kinds[0])
    for kind in kinds[1:]:
        core.ask(requirements=kind)
        answer(core, kind, n_1=0.0)
    assert list(core.state.extender_answers) == [kinds[0], kinds[3]], "what is awaited stays"
    assert core.granted(waits) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([WANTED, LARGE]),
            st.dictionaries(st.sampled_from(["n_1", "n_2", "n_3"]), st.floats(0, 3), max_size=3),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_the_ranking_places_where_a_full_scan_would_by_the_last_answer(
    steps: list[tuple[Requirements, dict[str, float], bool]],
) -> None:
    core = Core({"CPU": 2}, {"CPU": 4}, {"CPU": 4, "GPU": 1})
    for index, (kind, gains, give_back) in enumerate(steps):
        answer(core, kind, **gains)
        request = PlacementRequest(kind)
        expected = choose(core.state.nodes.values(), request, POLICY.score)
        before = set(core.state.leases)
        asking = core.ask(f"p_{index}", requirements=kind)
        new = [i for i in core.state.leases if i not in before]
        assert [core.state.leases[i].node_id for i in new] == ([expected] if expected else [])
        core.feed(ev.LeaseRequestCancelled(at_s=core.at_s, request_id=asking))
        if give_back and core.state.leases:
            core.release(next(iter(core.state.leases)))
