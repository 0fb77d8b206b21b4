"""What a follower of a job says of environments."""

from __future__ import annotations

from stoker.cli.views.builds import builds_of, text_of
from stoker_wire.messages.control import Event
from stoker_wire.messages.node_api import BuildState, EnvironmentBuild


def test_a_build_is_a_line() -> None:
    build = EnvironmentBuild(
        node_id="n_1",
        job_id="job_1",
        key="k",
        what="pip (numpy)",
        state=BuildState.FAILED,
        message="no\nmore",
    )
    assert text_of(build) == "node n_1 could not install pip (numpy): no"


def test_other_events_and_those_of_other_versions_are_passed_over() -> None:
    payload = {
        "node_id": "n_1",
        "job_id": "job_1",
        "key": "k",
        "what": "setup",
        "state": "READY",
        "took_s": 3.0,
    }
    events = [
        Event(seq=1, at_s=0.0, kind="bookmark", subject=""),
        Event(
            seq=2,
            at_s=0.0,
            kind="environment.unheard",
            subject="job_1",
            payload={"state": "UNHEARD"},
        ),
        Event(seq=3, at_s=0.0, kind="environment.ready", subject="job_1", payload=payload),
    ]
    assert [text_of(build) for build in builds_of(events)] == ["node n_1 installed setup in 3.00s"]
