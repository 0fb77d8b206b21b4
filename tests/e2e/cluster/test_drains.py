"""Drains end to end: a node that has tasks, actors and objects is emptied and leaves, and nobody notices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

import stoker
from stoker.cli.scheduling.explain import explain
from stoker.cli.scheduling.nodes import drain
from stoker.exceptions import ActorDiedError, StokerError
from tests.e2e import _cluster
from tests.e2e._site import HERE, WAIT_S, Site, site_of
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=["shared", "apart"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """``apart``: as if each node were a machine of its own."""
    with site_of(tmp_path_factory.mktemp("drain"), share=request.param == "shared") as made:
        yield made


@stoker.remote(**HERE, max_retries=0)
def block(number: int) -> Any:
    return np.full(1 << 18, number, dtype=np.int32)


@stoker.remote(**HERE, max_retries=0)
def slow(number: int) -> tuple[int, int]:
    time.sleep(0.1)
    return number, stoker.get_runtime_context().attempt


@stoker.remote(**HERE, max_restarts=1, max_task_retries=0)
class Counter:
    def __init__(self, folder: str) -> None:
        self.flags = Flags(Path(folder))

    def where(self) -> str:
        return str(stoker.get_runtime_context().node_id)

    def count(self, number: int) -> int:
        self.flags.note("counted", number)
        time.sleep(0.02)
        return number


def test_a_node_under_load_is_emptied_and_nobody_notices(site: Site, flags: Flags) -> None:
    old = site.add("old")
    refs = [block.remote(number) for number in range(6)]
    stoker.wait(refs, num_returns=len(refs), timeout=WAIT_S, fetch_local=False)
    counter = Counter.remote(str(flags.folder))
    assert get(counter.where.remote()) == old
    new = site.add("new")
    running = [slow.remote(number) for number in range(20)]
    calls = [counter.count.remote(number) for number in range(60)]
    until(lambda: len(flags.notes("counted")) > 3, WAIT_S, "the actor counts")
    site.drain(old)
    assert site.status(old)["state"] in ("DRAINING", "DRAINED")
    calls += [counter.count.remote(number) for number in range(60, 90)]
    assert get(running) == [(number, 0) for number in range(20)], "no attempt was lost"
    assert get(calls) == list(range(90))
    assert sorted(map(int, flags.notes("counted"))) == list(range(90)), "each ran once"
    record = site.until_gone("old", old)
    assert record["reason"].startswith("drained by cluster until"), record
    home = record["objects_at"]
    told = [line["text"] for line in site.call("GET", f"/v1/story/{old}")["lines"]]
    assert any(f"{home} takes over its objects" in text for text in told), told
    kept = site.objects(home)
    assert {ref.id for ref in refs} <= kept, "sole copies were moved"
    for number, ref in enumerate(refs[:3]):
        assert int(get(ref)[-1]) == number
    assert get(counter.where.remote()) == new
    actor = _cluster.actor_record(counter._info.actor_id)
    assert (actor["restarts"], actor["preemptions"]) == (0, 1), "it used up no restart"
    del refs, ref
    until(lambda: not kept & site.objects(home), WAIT_S, "what was moved is freed there")
    site.drain(new, 0.0)
    site.until_gone("new", new)


def test_a_task_that_the_deadline_ends_is_told_and_runs_elsewhere(site: Site, flags: Flags) -> None:
    old = site.add("late")

    @stoker.remote(**HERE, max_retries=0)
    def endless() -> list[str]:
        notice = stoker.preemption_notice()
        info = stoker.get_runtime_context()
        flags.note("runs", info.node_id)
        if info.attempt:
            return flags.notes("told")
        notice.wait(WAIT_S)
        flags.note("told", notice.reason)
        time.sleep(WAIT_S)
        return []

    ref = endless.remote()
    until(lambda: flags.notes("runs"), WAIT_S, "it runs")
    new = site.add("next")
    site.drain(old, 3.0)
    (told,) = get(ref)
    assert told.startswith(f"node {old} is drained by cluster until") and "a new disk" in told
    assert flags.notes("runs") == [old, new]
    site.until_gone("late", old)
    site.drain(new, 0.0)
    site.until_gone("next", new)


def test_what_cannot_be_moved_ends_at_the_deadline_and_says_why(site: Site) -> None:
    node_id = site.add("deadline")

    @stoker.remote(**HERE)
    class Still:
        def ping(self) -> int:
            return 1

    still = Still.remote()
    assert get(still.ping.remote()) == 1
    site.drain(node_id, 6.0)  # what is looked at before the deadline takes a moment
    status = until(
        lambda: one if (one := site.status(node_id))["left"] else None,
        WAIT_S,
        "it says what is left",
    )
    (left,) = status["left"]
    assert (left["kind"], left["id"]) == ("actor", still._info.actor_id)
    assert "max_restarts=0" in left["why"]
    assert "until" in status["summary"] and "1 thing is left" in status["summary"]
    said = CliRunner().invoke(explain, [node_id, *site.options])
    assert said.exit_code == 0 and left["why"] in said.output and left["id"] in said.output
    assert get(still.ping.remote()) == 1, "it goes on meanwhile"
    site.until_gone("deadline", node_id)
    assert site.status(node_id)["state"] == "DRAINED"
    error = _cluster.caught(lambda: get(still.ping.remote()), ActorDiedError)
    assert "drained by cluster until" in str(error) and "max_restarts=0" in str(error)


@stoker.remote(max_task_retries=-1, save_interval_s=None, **HERE)
class Keeper:
    """Saves what it has only when it is moved, which needs no ``max_restarts``."""

    def __init__(self) -> None:
        self.data = b""

    def take(self, data: bytes) -> None:
        self.data = data

    def read(self) -> tuple[int, str]:
        return len(self.data), stoker.get_runtime_context().get_node_id()

    def stay(self, folder: str) -> None:
        Flags(Path(folder)).raise_("stays")
        time.sleep(600)

    def __stoker_save__(self) -> bytes:
        return self.data

    def __stoker_restore__(self, state: bytes) -> None:
        self.data = state


@pytest.mark.parametrize("nbytes", [10, 1 << 20])
def test_an_actor_that_is_moved_takes_its_state_along(site: Site, nbytes: int) -> None:
    first = site.add(f"from{nbytes}")
    keeper = Keeper.remote()
    get(keeper.take.remote(b"x" * nbytes))
    second = site.add(f"to{nbytes}")
    site.drain(first)
    site.until_gone(f"from{nbytes}", first)
    assert get(keeper.read.remote()) == (nbytes, second)
    record = _cluster.actor_record(keeper._info.actor_id)
    assert (record["restarts"], record["preemptions"]) == (0, 1)
    stoker.kill(keeper)
    site.drain(second, 0.0)
    site.until_gone(f"to{nbytes}", second)


def test_what_was_answered_is_saved_though_another_call_outlasts_the_drain(
    site: Site, flags: Flags
) -> None:
    first = site.add("stuck")
    keeper = Keeper.options(max_concurrency=4, max_task_retries=0).remote()
    get(keeper.take.remote(b"x" * 10))
    stays = keeper.stay.remote(str(flags.folder))
    flags.wait("stays")
    second = site.add("unstuck")
    site.drain(first, 2.0)
    error = _cluster.caught(lambda: get(stays), StokerError)
    assert "its calls had not finished by then" in str(error)
    site.until_gone("stuck", first)
    assert get(keeper.read.remote()) == (10, second)
    record = _cluster.actor_record(keeper._info.actor_id)
    assert (record["restarts"], record["preemptions"]) == (0, 1)
    stoker.kill(keeper)
    site.drain(second, 0.0)
    site.until_gone("unstuck", second)


@stoker.remote(**HERE, max_retries=0)
def keep(name: str) -> str:
    stoker.put(np.arange(1 << 18), lifetime="detached", name=name)
    return str(stoker.get_runtime_context().node_id)


def test_the_only_copy_of_a_detached_object_leaves_its_node_too(site: Site) -> None:
    old = site.add("attic")
    assert get(keep.remote("weights")) == old
    site.drain(old)
    site.until_gone("attic", old)
    ref = stoker.get_ref("weights")
    try:
        assert (get(ref) == np.arange(1 << 18)).all()
    finally:
        stoker.free(ref)


def test_uncordon_cancels_a_drain(site: Site, flags: Flags) -> None:
    node_id = site.add("spared")

    @stoker.remote(**HERE)
    def patient() -> str:
        flags.raise_("runs")
        flags.wait("go")
        return "done"

    running = patient.remote()
    flags.wait("runs")
    done = CliRunner().invoke(drain, [node_id, "--reason", "a new disk", *site.options])
    assert done.exit_code == 0 and "a new disk" in done.output, done.output
    until(lambda: site.status(node_id)["left"], WAIT_S, "the task keeps it")
    site.call("POST", f"/v1/nodes/{node_id}/uncordon")
    assert site.status(node_id)["state"] == "NONE"
    flags.raise_("go")
    assert get(running) == "done" and get(patient.remote()) == "done"
    done = CliRunner().invoke(drain, [node_id, "--deadline", "0", "--wait", *site.options])
    assert done.exit_code == 0, done.output
    site.until_gone("spared", node_id)
