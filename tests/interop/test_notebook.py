"""Stoker in the kernel of a notebook: ``make interop``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

manager = pytest.importorskip(
    "jupyter_client.manager", reason="jupyter_client is not installed: make interop"
)
pytest.importorskip("ipykernel", reason="ipykernel is not installed: make interop")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("default")
WAIT_S = 60.0
CODE = """
import asyncio, os, signal, stoker, sys, threading, time
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

@stoker.remote
def say_once(path, text):
    while not os.path.exists(path):
        time.sleep(0.01)
    print(text)

@stoker.remote
def have_said(path, text):
    stoker.get(say_once.remote(path, text))

@stoker.remote
class Speaker:
    def __init__(self, path):
        print("made")
        threading.Thread(target=self.say_later, args=(path,)).start()

    def say_later(self, path):
        while not os.path.exists(path):
            time.sleep(0.01)
        print("from a thread")

    def say(self, path, text):
        while not os.path.exists(path):
            time.sleep(0.01)
        print(text)

@stoker.remote
def count_slowly(n):
    for _ in stoker.tqdm(range(n), desc="<slow>"):
        time.sleep(0.3)
"""


class Cell:
    """What one cell printed, showed and raised; a frontend adds what comes after its end as well."""

    def __init__(self) -> None:
        self.printed = ""
        self.shown: dict[str, str] = {}
        self.displays: dict[str, list[str]] = {}
        """The HTML that was displayed, one after another in the same place."""
        self.error: list[str] = []
        self.is_idle = False

    def take(self, message: dict[str, Any]) -> None:
        """Take a message that names this cell."""
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                self.printed += content["text"]
            case "execute_result":
                self.shown = content["data"]
            case "display_data":
                assert content["transient"]["display_id"] not in self.displays
                self.displays[content["transient"]["display_id"]] = [content["data"]["text/html"]]
            case "update_display_data":
                html = content["data"]["text/html"]
                self.displays[content["transient"]["display_id"]].append(html)
            case "error":
                self.error = content["traceback"]
            case "status":
                self.is_idle = content["execution_state"] == "idle"


class Kernel:
    """A kernel that runs cells one after another."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._cells: dict[str, Cell] = {}

    def run(self, code: str) -> Cell:
        """Run a cell to its end and return its output."""
        cell = self.begin(code)
        self.until(lambda: cell.is_idle)
        return cell

    def begin(self, code: str) -> Cell:
        """Have a cell run after those before it."""
        cell = self._cells[self._client.execute(code, store_history=False)] = Cell()
        return cell

    def until(self, is_done: Callable[[], bool]) -> None:
        """Give each message to the cell that it names, until ``is_done``."""
        end_s = time.monotonic() + WAIT_S
        while not is_done():
            message = self._client.get_iopub_msg(timeout=max(0.0, end_s - time.monotonic()))
            cell = self._cells.get(message["parent_header"].get("msg_id", ""))
            if cell is not None:
                cell.take(message)


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


def test_a_task_prints_below_the_cell_that_called_it(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "go"
    first = kernel.run(f"print('first'); ref = say_once.remote({str(path)!r}, 'late'); refs = []")
    nested = kernel.run(f"refs.append(have_said.remote({str(path)!r}, 'nested'))")
    path.touch()
    second = kernel.run("refs.append(square.remote(7)); stoker.get([ref, *refs]); print('second')")
    kernel.until(lambda: all(t in c.printed for t, c in (("late", first), ("nested", nested))))
    kernel.until(lambda: "squared 7" in second.printed)
    assert first.printed.startswith("first\n")
    assert "late" not in nested.printed + second.printed
    assert "nested" not in first.printed + second.printed
    assert "(say_once pid=" in first.printed and "second\n" in second.printed


def test_an_actor_prints_below_the_cells_that_called_it(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "go"
    made = kernel.run(f"speaker = Speaker.remote({str(path)!r})")
    kernel.until(lambda: "made" in made.printed)
    called = kernel.run(f"said = speaker.say.remote({str(path)!r}, 'late')")
    path.touch()
    last = kernel.run("await said; await speaker.say.remote('/', 'soon')")
    kernel.until(lambda: "late" in called.printed and "soon" in last.printed)
    kernel.until(lambda: "from a thread" in made.printed)
    assert "late" not in made.printed + last.printed


def test_a_cell_that_collects_its_output_has_it(kernel: Kernel) -> None:
    cell = kernel.run(
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    stoker.get(square.remote(8))\n"
        "    end_s = time.monotonic() + 30\n"
        "    while 'squared 8' not in out.getvalue() and time.monotonic() < end_s:\n"
        "        time.sleep(0.01)\n"
        "print(out.getvalue().count('squared 8'))"
    )
    assert cell.printed == "1\n"


def test_bars_are_widgets_below_their_cells(kernel: Kernel) -> None:
    own = kernel.run("for _ in stoker.tqdm(range(3), desc='own'): time.sleep(0.15)")
    (drawn,) = own.displays.values()
    assert not own.printed
    assert len(drawn) > 1 and "3/3" in drawn[-1] and all("<progress" in html for html in drawn)
    called = kernel.run("ref = count_slowly.remote(4)")
    later = kernel.run("stoker.get(ref)")
    kernel.until(lambda: any("4/4" in drawn[-1] for drawn in called.displays.values()))
    (drawn,) = called.displays.values()
    assert len(drawn) > 1 and "&lt;slow&gt;" in drawn[-1]
    assert not later.displays and "stoker-bar" not in called.printed + later.printed
    gone = kernel.run("for _ in stoker.tqdm(range(3), leave=False): time.sleep(0.15)")
    (drawn,) = gone.displays.values()
    assert "<progress" in drawn[0] and not drawn[-1]


def test_a_long_get_shows_how_many_are_there(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "go"
    kernel.run("waits = stoker.runtime.current.runtime().objects.waits; waits.notice_s = 0.5")
    cell = kernel.begin(
        "refs = [square.remote(9), *(say_once.remote({path!r}, 'now') for _ in range(2))]\n"
        "stoker.get(refs)".replace("{path!r}", repr(str(path)))
    )
    kernel.until(lambda: any("1/3" in drawn[-1] for drawn in cell.displays.values()))
    path.touch()
    kernel.until(lambda: not any(drawn[-1] for drawn in cell.displays.values()))
    kernel.until(lambda: cell.is_idle)
    assert not cell.error
    assert not kernel.run("waits.notice_s = 5.0; stoker.get(refs)").displays


def test_nodes_and_jobs_are_shown_as_tables(kernel: Kernel) -> None:
    shown = kernel.run("stoker.nodes()").shown["text/html"]
    assert "<table>" in shown and "ALIVE" in shown
    kernel.run(
        "from stoker.jobs import JobSubmissionClient\njobs = JobSubmissionClient().list_jobs()"
    )
    listed = kernel.run("jobs").shown["text/html"]
    assert "<table>" in listed and "RUNNING" in listed
    one = kernel.run("JobSubmissionClient().get_job(info.job_id)").shown["text/html"]
    assert "<caption>Job</caption>" in one
    assert kernel.run("import json; len(json.loads(json.dumps(stoker.nodes())))").shown


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
