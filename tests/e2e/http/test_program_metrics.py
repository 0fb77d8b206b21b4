"""What tasks and actors count is at their node's ``/metrics``."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker.util.metrics import Counter, Gauge, Histogram
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cluster")
WAIT_S = 60


def until_shown(holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Return the metrics of programs at the node once they are as wanted."""
    (node,) = stoker.nodes()

    def shown() -> dict[str, float]:
        with urllib.request.urlopen(f"{node['url']}/metrics", timeout=WAIT_S) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("test_"))
        found = {name.replace("test_", "", 1): float(value) for name, value in pairs}
        return found if holds(found) else {}

    return until(shown, WAIT_S, "the node shows the metrics", interval_s=0.2)


@stoker.remote
def work(number: int) -> None:
    Counter("test_calls", "Calls.", tag_keys=("kind",)).inc(tags={"kind": "task"})
    Histogram("test_took", boundaries=[1, 10]).observe(number)


@stoker.remote
class Level:
    def __init__(self) -> None:
        self.level = Gauge("test_level")

    def set(self, value: float) -> None:
        self.level.set(value)


def test_values_of_all_processes_are_at_the_node() -> None:
    job = f'job_id="{stoker.get_runtime_context().job_id}"'
    stoker.get([work.remote(number) for number in range(20)])
    Counter("test_calls", "Calls.", tag_keys=("kind",)).inc(tags={"kind": "driver"})
    levels = [Level.remote() for _ in range(2)]
    stoker.get([level.set.remote(number) for number, level in enumerate(levels)])
    tasks, driver = f'calls_total{{{job},kind="task"}}', f'calls_total{{{job},kind="driver"}}'

    def holds(shown: dict[str, float]) -> bool:
        gauges = sorted(value for name, value in shown.items() if name.startswith("level{"))
        return (shown.get(tasks), shown.get(driver), gauges) == (20.0, 1.0, [0.0, 1.0])

    shown = until_shown(holds)
    assert shown[f'took_bucket{{{job},le="10.0"}}'] == 11.0
    assert shown[f"took_sum{{{job}}}"] == 190.0


def test_what_an_actor_counted_last_is_not_lost_with_it() -> None:
    @stoker.remote
    class Last:
        def count(self) -> None:
            Counter("test_last").inc()
            stoker.exit_actor()

    last = Last.remote()
    with pytest.raises(stoker.exceptions.ActorError):
        stoker.get(last.count.remote())
    until_shown(lambda shown: any(name.startswith("last_total") for name in shown))
