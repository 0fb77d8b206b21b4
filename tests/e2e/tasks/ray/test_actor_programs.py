"""Programs of actors in the manner of Ray's documentation: they mean the same with Ray's names here."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import Any

import pytest

import stoker.ray as ray
from stoker.ray.exceptions import ActorDiedError, RayActorError
from stoker.ray.util import ActorPool
from stoker.ray.util.queue import Empty, Queue

pytestmark = pytest.mark.usefixtures("cluster")
WAIT_S = 60


@ray.remote
class Counter:
    START = 5

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def inc(self, by: int = 1) -> int:
        self.value += by
        return self.value

    def get(self) -> int:
        return self.value

    @ray.method(num_returns=2)
    def both(self) -> tuple[int, int]:
        return self.value, -self.value

    def numbers(self, count: int) -> Any:
        for number in range(count):
            yield number + 0

    def leave(self) -> None:
        ray.actor.exit_actor()

    def exit(self) -> None:
        sys.exit(1)

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_calls_of_an_actor_are_in_order() -> None:
    counter = Counter.remote()
    assert ray.get([counter.inc.remote() for _ in range(5)]) == [1, 2, 3, 4, 5]
    assert ray.get(list(counter.both.remote())) == [5, -5]
    assert [ray.get(ref) for ref in counter.numbers.options(num_returns="streaming").remote(3)] == [
        0,
        1,
        2,
    ]


def test_a_named_actor_is_found_or_made() -> None:
    first = Counter.options(name="shared", get_if_exists=True).remote(1)
    second = Counter.options(name="shared", get_if_exists=True).remote(2)
    assert ray.get([first.get.remote(), second.get.remote()]) == [1, 1]
    assert ray.get(ray.get_actor("shared", "e2e").get.remote()) == 1
    assert "shared" in ray.util.list_named_actors()
    ray.kill(first)
    with pytest.raises(RayActorError):
        ray.get(second.get.remote())


def test_an_unknown_name_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nobody"):
        ray.get_actor("nobody")


@pytest.mark.parametrize("method", ["leave", "exit", "crash"])
def test_an_actor_ends(method: str) -> None:
    counter = Counter.remote()
    ended = getattr(counter, method).remote()
    with pytest.raises(RayActorError):
        ray.get(ended, timeout=WAIT_S)
    with pytest.raises(RayActorError):
        ray.get(counter.get.remote(), timeout=WAIT_S)


def test_the_methods_that_every_actor_has() -> None:
    counter = Counter.remote(3)
    assert ray.get(counter.__ray_ready__.remote()) in (None, True)
    assert ray.get(counter.__ray_call__.remote(lambda self, by: self.value + by, 4)) == 7
    counter.__ray_terminate__.remote()
    with pytest.raises(ActorDiedError):
        ray.get(counter.get.remote(), timeout=WAIT_S)


def test_an_actor_is_started_again() -> None:
    counter = Counter.options(max_restarts=1, max_task_retries=1).remote(1)
    ray.get(counter.inc.remote())
    ray.kill(counter, no_restart=False)
    assert ray.get(counter.get.remote(), timeout=WAIT_S) == 1


def test_an_async_actor_overlaps_its_calls() -> None:
    @ray.remote
    class Gate:
        def __init__(self) -> None:
            self.event = asyncio.Event()

        async def wait(self) -> str:
            await self.event.wait()
            return "passed"

        async def open(self) -> None:
            self.event.set()

    gate = Gate.remote()
    waiting = [gate.wait.remote() for _ in range(3)]
    gate.open.remote()
    assert ray.get(waiting, timeout=WAIT_S) == ["passed"] * 3


def test_concurrency_groups() -> None:
    @ray.remote(concurrency_groups={"health": 1})
    class Busy:
        def __init__(self) -> None:
            self.told = threading.Event()

        def work(self) -> str:
            assert self.told.wait(WAIT_S)
            return "worked"

        @ray.method(concurrency_group="health")
        def ping(self) -> str:
            return "ok"

        @ray.method(concurrency_group="health")
        def tell(self) -> None:
            self.told.set()

    busy = Busy.remote()
    work = busy.work.remote()
    assert ray.wait([work, busy.ping.remote()], timeout=WAIT_S)[1] == [work]
    busy.tell.remote()
    assert ray.get(work, timeout=WAIT_S) == "worked"


def test_a_parameter_server() -> None:
    @ray.remote
    class Server:
        def __init__(self) -> None:
            self.weight = 0.0

        def apply(self, *gradients: float) -> float:
            self.weight += sum(gradients) / len(gradients)
            return self.weight

    @ray.remote
    class Worker:
        def gradient(self, weight: float) -> float:
            return (10.0 - weight) / 2

    server = Server.remote()
    workers = [Worker.remote() for _ in range(2)]
    weight: Any = 0.0
    for _ in range(12):
        weight = server.apply.remote(*[worker.gradient.remote(weight) for worker in workers])
    assert abs(ray.get(weight, timeout=WAIT_S) - 10) < 0.01


def test_a_tree_of_actors() -> None:
    @ray.remote
    class Supervisor:
        def __init__(self) -> None:
            self.workers = [Counter.remote(number) for number in range(2)]

        def work(self) -> list[int]:
            return ray.get([worker.inc.remote() for worker in self.workers])

    assert ray.get(Supervisor.remote().work.remote(), timeout=WAIT_S) == [1, 2]


def test_a_pool_of_actors() -> None:
    pool = ActorPool([Counter.remote() for _ in range(2)])
    assert list(pool.map(lambda actor, value: actor.inc.remote(value), [1, 1])) == [1, 1]
    assert sorted(pool.map_unordered(lambda actor, value: actor.inc.remote(value), [2, 2])) == [
        3,
        3,
    ]


def test_a_queue_between_tasks() -> None:
    queue = Queue(maxsize=10)

    @ray.remote
    def produce(queue: Any) -> None:
        for number in range(3):
            queue.put(number)

    ray.get(produce.remote(queue))
    assert [queue.get(timeout=WAIT_S) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Empty):
        queue.get_nowait()
    queue.shutdown()


def test_actors_in_a_graph_are_called_in_the_order_of_their_binding() -> None:
    @ray.remote
    def add(a: int, b: int) -> int:
        return a + b

    first, second = Counter.bind(10), Counter.bind(10)
    first.inc.bind(2)
    first.inc.bind(4)
    second.inc.bind(6)
    graph = add.bind(first.get.bind(), second.get.bind())
    assert [ray.get(graph.execute(), timeout=WAIT_S) for _ in range(2)] == [32, 32]
    living = Counter.remote(1)
    assert ray.get(living.inc.bind(add.bind(1, 2)).execute(), timeout=WAIT_S) == 4


def test_an_object_may_belong_to_an_actor() -> None:
    """As in Ray up to 2.55, which has dropped it since."""
    counter = Counter.remote()
    ref = ray.put([1, 2], _owner=counter)
    assert ray.get(ref) == [1, 2]


def test_the_context_of_an_actor() -> None:
    @ray.remote
    class Facts:
        def facts(self) -> Any:
            context = ray.get_runtime_context()
            me = context.current_actor
            return (
                bool(context.get_actor_id()),
                context.get_actor_name(),
                context.namespace,
                context.was_current_actor_reconstructed,
                context.get_task_name() if me is not None else "",
            )

    facts = Facts.options(name="facts").remote()
    known, name, namespace, restarted, task = ray.get(facts.facts.remote(), timeout=WAIT_S)
    assert (known, name, namespace, restarted) == (True, "facts", "e2e", False)
    assert task.endswith("facts")


def test_handles_and_methods_travel() -> None:
    @ray.remote
    def call(method: Any) -> int:
        return ray.get(method.remote())

    counter = Counter.remote(1)
    assert ray.get([call.remote(counter.inc), call.remote(counter.get)], timeout=WAIT_S)[0] == 2
    assert isinstance(counter, ray.actor.ActorHandle)
