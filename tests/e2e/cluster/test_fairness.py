"""Nobody's single call waits for another's flood: neither between drivers nor within one."""

from __future__ import annotations

import threading
from pathlib import Path

import stoker
from tests.e2e._cluster import driver, embedded, head, line_of
from tests.services import until

WAIT_S = 60.0
FLOOD = 2000
LONG_FLOOD = 10_000
"""Of 5 ms each: it is cut long before its end."""


@stoker.remote
def hold(opened: str) -> None:
    until(Path(opened).exists, WAIT_S, "the gate opens", interval_s=0.01)


@stoker.remote
def note(file: str, text: str) -> None:
    with open(file, "a") as notes:
        notes.write(f"{text}\n")


@stoker.remote
def note_too(file: str, text: str) -> None:
    with open(file, "a") as notes:
        notes.write(f"{text}\n")


def test_a_single_call_overtakes_a_flood_of_another_function_or_thread(tmp_path: Path) -> None:
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    with embedded(tmp_path / "s", num_cpus=1, num_gpus=0):
        stoker.get([note.remote(str(tmp_path / "warm"), "") for _ in range(20)], timeout=WAIT_S)
        refs = [hold.remote(str(gate))]
        refs += [note.remote(str(notes), "flood") for _ in range(FLOOD)]
        refs.append(note_too.remote(str(notes), "function"))
        thread = threading.Thread(target=lambda: refs.append(note.remote(str(notes), "thread")))
        thread.start()
        thread.join(WAIT_S)
        gate.touch()
        stoker.get(refs, timeout=WAIT_S)
    order = notes.read_text().split()
    assert len(order) == FLOOD + 2
    assert order.index("function") < FLOOD / 2
    assert order.index("thread") < FLOOD / 2


FLOODING = """
import sys, time
import stoker

stoker.init(log_to_driver=False)

@stoker.remote
def work(file):
    time.sleep(0.005)
    with open(file, "a") as notes:
        notes.write("x")

stoker.get(work.remote({file!r}))
refs = [work.remote({file!r}) for _ in range({count})]
print("flooding", flush=True)
stoker.get(refs)
"""


def test_a_single_call_gets_a_worker_while_another_drivers_tasks_are_queued(
    tmp_path: Path,
) -> None:
    done = tmp_path / "done"
    with head(tmp_path / "s", num_cpus=1) as cluster:
        stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
        try:
            with driver(cluster, FLOODING.format(file=str(done), count=LONG_FLOOD)) as flood:
                line_of(flood, "flooding")
                for _ in range(3):
                    stoker.get(note.remote(str(tmp_path / "mine"), ""), timeout=WAIT_S)
                    stoker.get(note_too.remote(str(tmp_path / "mine"), ""), timeout=WAIT_S)
                assert len(done.read_text()) < LONG_FLOOD, "the flood had to end first"
        finally:
            stoker.shutdown()
