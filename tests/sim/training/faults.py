"""Faults of a world: processes that die and freeze, nodes and links that are lost, wishes at bad moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.membership import Commit, Membership, SetBatch, Stop, Suspend

if TYPE_CHECKING:
    from tests.sim.training.replicas import Replica
    from tests.sim.training.world import World

KINDS = ["kill", "kill", "stop", "node", "controller", "ask", "replace", "replace", "cut"]


class Faults:
    """The faults of a world, drawn by its seed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.returned_early = False
        """A loop has returned before its end: what it says of the training is not the end's word."""

    def run(self) -> None:
        """Do one thing that goes wrong, and another later."""
        world = self.world
        if world.over or world.now_s > world.faults_until_s:
            for one in world.replicas.values():
                one.stopped = False
            return
        kind = world.random.choice(KINDS + ["fatal"] * world.fatal)
        match kind:
            case "controller":
                self.crash()
            case "node":
                node = world.random.choice(world.nodes)
                gone = {one for one in world.scheduler.granted if one.node_id == node}
                if gone:
                    world.scheduler.take_slots(gone)
            case "ask":
                self.ask()
            case "fatal":
                self.fail()
            case _:
                alive = [one for one in world.replicas.values() if one.alive]
                if kind == "replace":  # of one that does not train nothing comes
                    alive = [one for one in alive if one.life == "training"] or alive
                if alive:
                    self.hit(kind, world.random.choice(alive))
        world.outcome.faults[kind] += 1
        world.later(world.random.expovariate(1 / 4.0), self.run)

    def hit(self, kind: str, one: Replica) -> None:
        """Do something to one replica."""
        world = self.world
        match kind:
            case "kill":
                world.die(one)
            case "stop":
                one.stopped = True
                world.later(world.random.uniform(0.1, 8.0), lambda: self.resume(one))
            case "replace":
                world.replaced.setdefault(one.worker, world.now_s)
                world.step(ev.Replaced(world.now_s, one.worker))
            case "cut" if world.heard.pop(one.worker, None) is not None:
                # Its link breaks: the controller takes it for dead, and has it ended.
                world.kill(one.worker)
                world.step(ev.Died(world.now_s, one.worker, "the connection is lost"))

    def resume(self, one: Replica) -> None:
        """Have a frozen replica go on."""
        one.stopped = False
        if one.alive and one.group is not None and not one.group.formed:
            self.world.try_form(one.group)

    def ask(self) -> None:
        """Ask for something, as a user or a policy does."""
        world = self.world
        match world.random.randrange(5):
            case 0 if world.random.random() < 0.2:
                action: object = Stop("enough")
            case 1:
                action = Suspend()
            case 2:
                action = Commit()
            case _:
                action = SetBatch(world.random.randint(4, 16), 4)
        world.step(ev.Asked(world.now_s, action))  # type: ignore[arg-type]

    def fail(self) -> None:
        """Have the loop raise or return early, memory run out, or another controller come."""
        world = self.world
        number = world.random.randrange(4)
        if number == 0 and world.record is not None:
            world.record = Membership("job", world.record.generation + 100, ())
        training = [one for one in world.replicas.values() if one.alive and one.life == "training"]
        if not training:
            return
        one = training[0]
        if number == 1:
            one.report(ev.Failed(0.0, one.worker, "ValueError: no"))
        elif number == 2:
            one.report(ev.OutOfMemory(0.0, one.worker, 4, world.random.choice([None, 2])))
        elif number == 3:
            self.returned_early = True
            one.returned(stopped=True)
            for other in training[1:]:
                other.report(ev.Waiting(0.0, other.worker, other.generation, other.step, 5.0))

    def crash(self) -> None:
        """Kill the controller: its replicas are ended, then another attempt begins."""
        world = self.world
        if world.state is None or world.random.random() < 0.6:
            return
        world.state = None
        world.records.suspect(world.ledger)
        if world.random.random() < 0.5:
            world.scheduler.offer = None
        for one in world.replicas.values():
            if one.alive:
                world.later(world.random.uniform(0.0, 2.0), lambda one=one: world.die(one))
        world.later(world.random.uniform(2.5, 6.0), self.revive)

    def revive(self) -> None:
        """Begin the next attempt."""
        if self.world.state is None and not self.world.over:
            self.world.start_controller()
