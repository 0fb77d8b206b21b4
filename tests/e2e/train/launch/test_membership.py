"""The rendezvous of agents whose members the driver names: sets, fences, who leaves. Agents are threads."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from stoker_train.launch.kv_line import KvLine
from stoker_train.launch.membership import LeftError, MembersRendezvous
from stoker_train.launch.spec import Members, members_key
from stoker_wire.messages.control import KvPut
from tests.e2e._cluster import head
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 40.0


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvLine]:
    with head(tmp_path_factory.mktemp("m"), num_cpus=1) as made:
        yield KvLine.to(made.info.gcs_url, token=made.info.token)


class World:
    """A run: what its driver would write, and agents as threads."""

    def __init__(self, line: KvLine) -> None:
        self.line = line
        self.run_id = f"run-{uuid.uuid4().hex}"
        self.number = 0
        self.agents: list[MembersRendezvous] = []

    def name(self, *members: str) -> None:
        self.number += 1
        value = msgspec.json.encode(Members(self.number, members))
        self.line.do(KvPut(key=members_key(self.run_id, self.number), value=value))

    def agent(self, name: str, join_s: float = WAIT_S) -> MembersRendezvous:
        made = MembersRendezvous(self.line, self.run_id, name, "127.0.0.1", join_s)
        self.agents.append(made)
        return made


class Join(threading.Thread):
    """One agent's ``next_rendezvous``, and its outcome."""

    def __init__(self, agent: MembersRendezvous) -> None:
        super().__init__(daemon=True)
        self.agent = agent
        self.info: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.info = self.agent.next_rendezvous()
        except BaseException as error:
            self.error = error

    def done(self) -> Any:
        """What it returned; raises what it raised."""
        self.join(2 * WAIT_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.info


@pytest.fixture
def world(line: KvLine) -> Iterator[World]:
    made = World(line)
    yield made
    for agent in made.agents:
        agent.shutdown()


def test_members_meet_and_the_next_set_is_another_world(world: World) -> None:
    a, b = world.agent("a"), world.agent("b")
    first = [Join(a), Join(b)]
    world.name("a", "b")
    met = [one.done() for one in first]
    assert sorted(one.rank for one in met) == [0, 1] and {one.world_size for one in met} == {2}
    assert a.num_nodes_waiting() == 0 and not a.is_closed() and a.get_backend() == "stoker"
    c = world.agent("c")
    late = Join(c)
    world.name("a", "b", "c")
    until(lambda: a.num_nodes_waiting() == 1, WAIT_S, "a hears of the next set")
    again = [Join(a), Join(b), late]
    met = [one.done() for one in again]
    assert sorted(one.rank for one in met) == [0, 1, 2] and a.members.number == 2
    met[0].store.set("k", "v")
    assert met[2].store.get("k") == b"v"


def test_who_is_left_out_leaves_and_the_others_go_on(world: World) -> None:
    a, b = world.agent("a"), world.agent("b")
    first = [Join(a), Join(b)]
    world.name("a", "b")
    for one in first:
        one.done()
    world.name("b")
    assert a.wait_superseded(WAIT_S)
    with pytest.raises(LeftError):
        Join(a).done()
    assert Join(b).done().world_size == 1


def test_a_newcomer_waits_for_the_first_set_that_it_is_in(world: World) -> None:
    world.name("a")
    world.name("a", "x")
    newcomer = Join(world.agent("b"))
    world.name("b")
    assert newcomer.done().world_size == 1


def test_a_set_that_is_superseded_holds_nobody(world: World) -> None:
    a = world.agent("a")
    waiting = Join(a)
    world.name("a", "dead")
    until(lambda: a.members.number == 1, WAIT_S, "a waits in the set of the dead one")
    world.name("a")
    assert waiting.done().world_size == 1 and a.members.number == 2


def test_the_store_of_a_set_ends_with_it(world: World) -> None:
    a = world.agent("a")
    join = Join(a)
    world.name("a")
    store = join.done().store
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("never")
        except dist.DistStoreError as error:
            errors.append(error)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    world.name("b")
    waits.join(WAIT_S)
    assert len(errors) == 1 and "number 1" in str(errors[0]) and "is over" in str(errors[0])


def test_a_driver_that_names_nobody_is_waited_for_with_a_deadline(world: World) -> None:
    with pytest.raises(RendezvousTimeoutError, match="did not name a within"):
        Join(world.agent("a", join_s=0.3)).done()
