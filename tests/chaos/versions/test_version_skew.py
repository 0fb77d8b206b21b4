"""Components that are one minor version apart work together, whichever is newer; two apart do not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.chaos._services import Apart, Service
from tests.chaos.versions.next_minor import launcher
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 40.0
COMPONENTS = ("gcs", "scheduler", "nodelet", "driver")
DRIVER = textwrap.dedent(
    """
    import asyncio
    import stoker
    from stoker import kv

    stoker.init(namespace="skew", runtime_env={"env_vars": {"A": "1"}})

    @stoker.remote
    def double(number, array=None):
        return 2 * number

    @stoker.remote
    def nested():
        return stoker.get(double.remote(4))

    @stoker.remote(num_returns="streaming")
    def count(upto):
        yield from range(upto)

    @stoker.remote(num_cpus=0, max_restarts=1)
    class Counter:
        def __init__(self, start): self.count = start
        def add(self): self.count += 1; return self.count

    big = stoker.put(bytes(300_000))
    assert stoker.get([double.remote(i, big) for i in range(50)], timeout=60) == [2 * i for i in range(50)]
    assert stoker.get(nested.remote(), timeout=60) == 8
    assert [stoker.get(one) for one in count.remote(5)] == [0, 1, 2, 3, 4]
    counter = Counter.options(name="counter").remote(10)
    assert stoker.get([counter.add.remote() for _ in range(3)], timeout=60) == [11, 12, 13]
    assert stoker.get(stoker.get_actor("counter").add.remote(), timeout=60) == 14
    group = stoker.placement_group([{"CPU": 1}])
    assert group.wait(60)
    stoker.remove_placement_group(group)
    with kv.watch("k/", timeout=60) as changes:
        kv.put("k/1", b"v")
        assert next(changes).value == b"v"
    assert kv.add("n", 2) == 2
    assert stoker.nodes()[0]["state"] == "ALIVE", stoker.nodes()
    stoker.kill(counter)
    stoker.shutdown()
    print("all right")
    """
)


class Skewed(Apart):
    """A cluster one of whose components is some minor versions ahead."""

    def __init__(self, folder: Path, newer: str, steps: int) -> None:
        self._newer, self._steps = newer, steps
        super().__init__(folder)

    def _service(self, name: str, module: str, *options: str) -> Service:
        made = super()._service(name, module, *options)
        if name.startswith(self._newer):
            made.launch_by(launcher(self._steps))
        return made

    def drive(self, program: str) -> subprocess.CompletedProcess[str]:
        """Run a driver, of the newer version if it is to be that one."""
        file = self.folder / "driver.py"
        file.write_text(program)
        start = "import runpy"
        if self._newer == "driver":
            start = f"from tests.chaos.versions.next_minor import become; become({self._steps}); import runpy"
        return subprocess.run(
            [sys.executable, "-c", f"{start}; runpy.run_path({str(file)!r}, run_name='__main__')"],
            env={**self.environ, "STOKER_ADDRESS": self.address},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Skewed]:
    newer, steps = request.param
    with session_root(tmp_path / "s"):
        made = Skewed(tmp_path, newer, steps)
        try:
            made.gcs.start()
            made.scheduler.start(ready=steps == 1)
            if steps == 1:
                made.add_nodelet(cpus=2)
            yield made
        finally:
            made.stop()


@pytest.mark.parametrize(
    "cluster", [(name, 1) for name in COMPONENTS], indirect=True, ids=COMPONENTS
)
def test_one_component_may_be_a_minor_version_ahead(cluster: Skewed) -> None:
    done = cluster.drive(DRIVER)
    assert "all right" in done.stdout, done.stderr


@pytest.mark.logs("two minor|no candidate|protocol 4.2")
def test_a_service_that_is_two_minor_versions_ahead_is_refused_and_says_whom_to_upgrade(
    tmp_path: Path,
) -> None:
    said = r"speaks protocol 4.2, gcs speaks 4.0"
    with session_root(tmp_path / "s"):
        made = Skewed(tmp_path, "scheduler", 2)
        try:
            made.gcs.start()
            made.scheduler.start(ready=False)
            until(lambda: said in made.scheduler.said(), WAIT_S, "the scheduler is refused")
            made.scheduler.stop()
            made._newer = "nodelet"
            nodelet = made._service(
                "nodelet", "stoker_nodelet", "--gcs-url", made.address, "--num-gpus", "0",
                "--session-dir", str(tmp_path / "n"),
            )  # fmt: skip
            made.nodelets.append(nodelet)
            nodelet.start(ready=False)
            until(lambda: said in nodelet.said(), WAIT_S, "the nodelet is refused")
            assert '"level": "error"' in nodelet.said(), "at once"
            assert "upgrade gcs" in nodelet.said() and "upgrade gcs" in made.scheduler.said()
            assert not nodelet.answers("/readyz")
        finally:
            made.stop()


@pytest.mark.parametrize("cluster", [("driver", 2)], indirect=True, ids=["driver"])
def test_two_minor_versions_ahead_is_an_error_that_names_both(cluster: Skewed) -> None:
    done = cluster.drive("import stoker\nstoker.init()")
    assert "speaks protocol 4.2, gcs speaks 4.0" in done.stderr, done.stderr
    assert "upgrade gcs" in done.stderr
