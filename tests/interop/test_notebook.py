"""Stoker in the kernel of a notebook: ``make interop``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

manager = pytest.importorskip(
    "jupyter_client.manager", reason="jupyter_client is not installed: make interop"
)
pytest.importorskip("ipykernel", reason="ipykernel is not installed: make interop")

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("default")
WAIT_S = 60.0
CODE = """
import asyncio, os, signal, stoker
from stoker.runtime.process.current_runtime import LIFECYCLE

@stoker.remote
def square(x):
    print("squared", x, flush=True)
    return x * x

@stoker.remote
class Counter:
    def __init__(self):
        self.n = 0

    def add(self):
        self.n += 1
        return self.n
"""


class Cell:
    """What one cell printed, showed and raised."""

    def __init__(self) -> None:
        self.printed = ""
        self.shown: dict[str, str] = {}
        self.error: list[str] = []


class Kernel:
    """A kernel that runs cells one after another."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, code: str) -> Cell:
        """Run a cell to its end and return its output."""
        cell = Cell()

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    cell.printed += content["text"]
                case "execute_result":
                    cell.shown = content["data"]
                case "error":
                    cell.error = content["traceback"]

        self._client.execute_interactive(
            code, timeout=WAIT_S, output_hook=take, store_history=False
        )
        return cell


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernels, client = manager.start_new_kernel(startup_timeout=WAIT_S)
    try:
        kernel = Kernel(client)
        assert not kernel.run(CODE).error
        assert not kernel.run("info = stoker.init(num_cpus=2)").error
        yield kernel
        kernel.run("stoker.shutdown()")
    finally:
        client.stop_channels()
        kernels.shutdown_kernel(now=True)


def test_cells_await_refs_and_methods(kernel: Kernel) -> None:
    assert kernel.run("await square.remote(3)").shown["text/plain"] == "9"
    assert not kernel.run("counter = Counter.remote()").error
    assert kernel.run("await counter.add.remote()").shown["text/plain"] == "1"
    both = kernel.run("await asyncio.gather(square.remote(4), counter.add.remote())")
    assert both.shown["text/plain"] == "[16, 2]"


def test_init_again_says_what_is_connected(kernel: Kernel) -> None:
    again = kernel.run("assert stoker.init(num_cpus=2).job_id == info.job_id")
    assert not again.error
    assert "Stoker is connected to http" in again.printed
    assert kernel.run("stoker.init('http://127.0.0.1:1')").error


def test_refs_actors_and_clusters_are_shown_as_html(kernel: Kernel) -> None:
    assert "<table>" in kernel.run("stoker.put(1)").shown["text/html"]
    assert "Counter" in kernel.run("Counter.remote()").shown["text/html"]
    shown = kernel.run("info").shown
    assert "<table>" in shown["text/html"]
    token = kernel.run("print(info.token)").printed.strip()
    assert token and not any(token in text for text in shown.values())


def test_a_lost_cluster_is_one_line_and_init_starts_another(kernel: Kernel) -> None:
    lost = kernel.run(
        "block = square.options(resources={'none': 1}).remote(1)\n"
        "os.kill(LIFECYCLE.cluster.pid, signal.SIGKILL)\n"
        "stoker.get(block)"
    )
    assert len(lost.error) == 1
    assert "\n" not in lost.error[0] and "stoker.init()" in lost.error[0]
    assert not kernel.run("info = stoker.init(num_cpus=2)").error
    assert kernel.run("await square.remote(5)").shown["text/plain"] == "25"
