"""The faults of the matrix: what each needs, what it does to a running world, and how it is undone."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from tests.chaos.matrix.world import PLAIN, Needs, World, cut, family, frozen, pause
from tests.services import fill, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos._services import Service

    Strike = Callable[[World], None]
    Choose = Callable[[World], Service]

FROZEN_S = 5.0
"""Longer than a node may be silent here."""
HELD_S = 15.0
"""Of a driver or an interpreter: longer than either may be silent before somebody looks at it."""
AWAY_S = 2.0
"""How long it takes until whoever supervises a service starts it anew."""
LONG_AWAY_S = 70.0
"""Longer than the deadline of any single request."""
WAIT_S = 60.0


CHAIN = r"its argument|arguments, the first is|behind the earlier call"
"""What a call waits for that is asked itself."""
BUSY = r"was sent to worker|has it and has not finished|runs on|a lease of|has not returned"
NODE = rf"node\S* .*(silent|dead|died)|worker cannot be reached|connection to it was lost|{BUSY}"
GCS = r"gcs|database"
SCHEDULER = r"scheduler"


@dataclass(frozen=True, slots=True)
class Fault:
    """``strike`` does it and undoes it. Who waits for long meanwhile is told a reason that ``why`` matches.

    Where it ``hurts``, calls without retries may fail.
    """

    strike: Strike
    why: str
    needs: Needs = PLAIN
    hurts: bool = False
    ends_driver: bool = False
    stops_driver_s: float = 0.0
    """For how long the driver cannot ask why it waits."""

    def explains(self, reason: str) -> bool:
        """Whether a reason is a true one here."""
        return re.search(f"{self.why}|{CHAIN}", reason) is not None


def _kill_worker(world: World) -> None:
    os.kill(world.a_worker(), signal.SIGKILL)


def _freeze_worker(world: World) -> None:
    with frozen([world.a_worker()]):
        pause(FROZEN_S)


def _fork_server(world: World) -> int:
    """The process that forks the workers of some node."""
    return psutil.Process(world.a_worker()).ppid()


def _kill_fork_server(world: World) -> None:
    os.kill(_fork_server(world), signal.SIGKILL)


def _freeze_fork_server(world: World) -> None:
    with frozen([_fork_server(world)]):
        pause(FROZEN_S)


def _kill(choose: Choose) -> Strike:
    def strike(world: World) -> None:
        service = choose(world)
        service.kill()
        pause(AWAY_S)
        service.start()

    return strike


def _freeze(choose: Choose) -> Strike:
    def strike(world: World) -> None:
        with frozen([choose(world).pid]):
            pause(FROZEN_S)

    return strike


def _kill_leader(world: World) -> None:
    world.apart.scheduler.kill()
    pause(AWAY_S)
    _standby_leads(world)
    world.apart.scheduler.start(ready=False)


def _freeze_leader(world: World) -> None:
    with frozen([world.apart.scheduler.pid]):
        pause(FROZEN_S)
        _standby_leads(world)


def _standby_leads(world: World) -> None:
    (standby,) = world.apart.standbys
    standby.until_ready()  # it leads


def _kill_driver(world: World) -> None:
    world.driver.kill()


def _freeze_driver(world: World) -> None:
    with frozen([world.driver.process.pid]):
        pause(HELD_S)


def _kill_redis(world: World) -> None:
    assert world.redis is not None
    world.redis.stop()
    pause(AWAY_S)
    world.redis.start()


def _freeze_redis(world: World) -> None:
    assert world.redis is not None
    world.redis.pause()
    try:
        pause(FROZEN_S)
    finally:
        world.redis.resume()


def _flush_redis(world: World) -> None:
    assert world.redis is not None
    for _ in range(3):
        world.redis.flush()
        pause(AWAY_S)


def _kill_postgres(away_s: float) -> Strike:
    def strike(world: World) -> None:
        assert world.postgres is not None
        world.postgres.stop()
        pause(away_s)
        world.postgres.start()

    return strike


def _fill_postgres(world: World) -> None:
    """Fill its disk. It may end itself by that, until somebody has made room and starts it again."""
    assert world.postgres is not None
    ballast = world.postgres.directory / "ballast"
    fill(ballast)
    try:
        pause(FROZEN_S)
    finally:
        ballast.unlink()
        world.postgres.stop()
        world.postgres.start()


def _freeze_postgres(world: World) -> None:
    assert world.postgres is not None
    assert world.postgres._process is not None
    with frozen(family(world.postgres._process.pid)):
        pause(FROZEN_S)


def _cut_link(world: World) -> None:
    cut(world.link)
    try:
        pause(FROZEN_S)
    finally:
        cut(world.link, heal=True)


def _fill_disk(world: World) -> None:
    assert world.disk is not None
    ballast = world.disk / "ballast"
    fill(ballast)
    try:
        pause(FROZEN_S)
    finally:
        ballast.unlink()


def _fill_shm(world: World) -> None:
    assert world.shm is not None
    ballast = world.shm / "ballast"
    fill(ballast)
    try:
        pause(FROZEN_S)
    finally:
        ballast.unlink()


def _hold_gil(where: str) -> Strike:
    def strike(world: World) -> None:
        name = f"hold-gil-{where}"
        world.driver.order(name, str(HELD_S))
        order = world.driver.folder / name
        until(lambda: not order.exists(), WAIT_S, "the order is taken", interval_s=0.05)
        pause(HELD_S)

    return strike


def _a_nodelet(world: World) -> Service:
    return world.dice.choice(world.apart.nodelets)


def _a_gcs(world: World) -> Service:
    return world.dice.choice(world.apart.replicas)


def _go_on(_: World) -> None:
    pause(FROZEN_S)


def _http(fault: str) -> Fault:
    return Fault(_go_on, f"{BUSY}|{GCS}|{SCHEDULER}", Needs(faults=f"* /v1/*: {fault}"))


def _redis(strike: Strike) -> Fault:
    return Fault(strike, f"{GCS}|Redis", Needs(redis=True))


def _postgres(strike: Strike) -> Fault:
    return Fault(strike, GCS, Needs(postgres=True))


_REPLICAS = Needs(postgres=True, replicas=2)

FAULTS: dict[str, Fault] = {
    "none": Fault(_go_on, BUSY),
    "worker killed": Fault(_kill_worker, BUSY, hurts=True),
    "worker frozen": Fault(_freeze_worker, BUSY),
    "fork server killed": Fault(_kill_fork_server, BUSY, hurts=True),
    "fork server frozen": Fault(_freeze_fork_server, BUSY),
    "nodelet killed": Fault(_kill(_a_nodelet), NODE, hurts=True),
    "nodelet frozen": Fault(_freeze(_a_nodelet), NODE, hurts=True),
    "scheduler killed": Fault(_kill(lambda world: world.apart.scheduler), SCHEDULER),
    "scheduler frozen": Fault(_freeze(lambda world: world.apart.scheduler), SCHEDULER),
    "scheduler killed, standby": Fault(_kill_leader, SCHEDULER, Needs(standby=True)),
    "scheduler frozen, standby": Fault(_freeze_leader, SCHEDULER, Needs(standby=True)),
    "gcs killed": Fault(_kill(lambda world: world.apart.gcs), GCS),
    "gcs frozen": Fault(_freeze(lambda world: world.apart.gcs), GCS),
    "gcs killed, replica": Fault(_kill(_a_gcs), GCS, _REPLICAS),
    "gcs frozen, replica": Fault(_freeze(_a_gcs), GCS, _REPLICAS),
    "driver killed": Fault(_kill_driver, BUSY, ends_driver=True),
    "driver frozen": Fault(_freeze_driver, BUSY, stops_driver_s=HELD_S),
    "Redis killed": _redis(_kill_redis),
    "Redis frozen": _redis(_freeze_redis),
    "Redis flushed": _redis(_flush_redis),
    "PostgreSQL killed": _postgres(_kill_postgres(AWAY_S)),
    "PostgreSQL gone for long": _postgres(_kill_postgres(LONG_AWAY_S)),
    "PostgreSQL full": Fault(
        _fill_postgres, GCS, Needs(postgres=True, small_database_disk=True), hurts=True
    ),
    "PostgreSQL frozen": _postgres(_freeze_postgres),
    "HTTP dropped": _http("drop 0.05"),
    "HTTP delayed": _http("delay 0.2@0.2"),
    "HTTP doubled": _http("double 0.2"),
    "network cut": Fault(_cut_link, NODE, Needs(link=True), hurts=True),
    "disk full": Fault(_fill_disk, f"{GCS}|disk|space", Needs(small_disk=True), hurts=True),
    "shared memory full": Fault(
        _fill_shm, rf"{BUSY}|shared memory|arena", Needs(small_shm=True), hurts=True
    ),
    "GIL held in a call": Fault(_hold_gil("call"), BUSY),
    "GIL held in the driver": Fault(_hold_gil("driver"), BUSY, stops_driver_s=HELD_S),
}
