"""The faults of the matrix: what each needs, what it does to a running world, and how it is undone."""

from __future__ import annotations

import os
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
AWAY_S = 2.0
"""How long it takes until whoever supervises a service starts it anew."""
LONG_AWAY_S = 70.0
"""Longer than the deadline of any single request."""
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """``strike`` does it and undoes it."""

    strike: Strike
    needs: Needs = PLAIN
    ends_driver: bool = False


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


def _kill_driver(world: World) -> None:
    world.driver.kill()


def _freeze_driver(world: World) -> None:
    with frozen([world.driver.process.pid]):
        pause(FROZEN_S)


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
        world.driver.order(name, str(FROZEN_S))
        taken = world.driver.folder / name
        until(lambda: not taken.exists(), WAIT_S, "the order is taken", interval_s=0.05)
        pause(FROZEN_S)

    return strike


def _go_on(_: World) -> None:
    pause(FROZEN_S)


def _http(fault: str) -> Fault:
    return Fault(_go_on, Needs(faults=f"* /v1/*: {fault}"))


FAULTS: dict[str, Fault] = {
    "none": Fault(_go_on),
    "worker killed": Fault(_kill_worker),
    "worker frozen": Fault(_freeze_worker),
    "fork server killed": Fault(_kill_fork_server),
    "fork server frozen": Fault(_freeze_fork_server),
    "nodelet killed": Fault(_kill(lambda world: world.dice.choice(world.apart.nodelets))),
    "nodelet frozen": Fault(_freeze(lambda world: world.dice.choice(world.apart.nodelets))),
    "scheduler killed": Fault(_kill(lambda world: world.apart.scheduler)),
    "scheduler frozen": Fault(_freeze(lambda world: world.apart.scheduler)),
    "gcs killed": Fault(_kill(lambda world: world.apart.gcs)),
    "gcs frozen": Fault(_freeze(lambda world: world.apart.gcs)),
    "driver killed": Fault(_kill_driver, ends_driver=True),
    "driver frozen": Fault(_freeze_driver),
    "Redis killed": Fault(_kill_redis, Needs(redis=True)),
    "Redis frozen": Fault(_freeze_redis, Needs(redis=True)),
    "Redis flushed": Fault(_flush_redis, Needs(redis=True)),
    "PostgreSQL killed": Fault(_kill_postgres(AWAY_S), Needs(postgres=True)),
    "PostgreSQL gone for long": Fault(_kill_postgres(LONG_AWAY_S), Needs(postgres=True)),
    "PostgreSQL full": Fault(_fill_postgres, Needs(postgres=True, small_database_disk=True)),
    "PostgreSQL frozen": Fault(_freeze_postgres, Needs(postgres=True)),
    "HTTP dropped": _http("drop 0.05"),
    "HTTP delayed": _http("delay 0.2@0.2"),
    "HTTP doubled": _http("double 0.2"),
    "network cut": Fault(_cut_link, Needs(link=True)),
    "disk full": Fault(_fill_disk, Needs(small_disk=True)),
    "shared memory full": Fault(_fill_shm, Needs(small_shm=True)),
    "GIL held in a task": Fault(_hold_gil("task")),
    "GIL held in the driver": Fault(_hold_gil("driver")),
}
