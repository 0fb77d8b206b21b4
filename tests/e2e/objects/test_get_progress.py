"""``get(progress=True)``: a bar that counts what is there, in a terminal, a pipe and a task."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e._cluster import environment, head, run_driver
from tests.e2e.cli._terminal import plain, terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

PROGRAM = """
import pathlib, sys, time, stoker
stoker.init(log_to_driver=False)

@stoker.remote(num_cpus=0)
def ready(i):
    return i

@stoker.remote(num_cpus=0, max_retries=0)
def waits(path):
    while not path.exists():
        time.sleep(0.02)
    return 7
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("progress"), num_cpus=2) as cluster:
        yield cluster


def test_a_bar_counts_on_a_terminal(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gate = tmp_path_factory.mktemp("gate") / "open"
    program = f"""{PROGRAM}
refs = [*(ready.remote(i) for i in range(3)), waits.remote(pathlib.Path({str(gate)!r}))]
print("VALUES", stoker.get(refs, progress=True))
print("ONE", stoker.get(refs[0], progress=True))
"""
    with terminal([sys.executable, "-c", program], environment(cluster)) as shown:
        shown.until("3/4")
        gate.touch()
        assert shown.end() == 0
    text = plain(shown.written)
    assert "get:  75% |" in text and "4/4" in text
    assert "VALUES [0, 1, 2, 7]" in text and "ONE 0" in text and "1/1" in text


def test_a_pipe_has_a_line_and_without_progress_there_is_none(cluster: LocalCluster) -> None:
    program = f"""{PROGRAM}
assert stoker.get([ready.remote(1)]) == [1]
sys.stderr.write("NOW\\n")
assert stoker.get([ready.remote(i) for i in range(20)], progress=True) == list(range(20))
"""
    shown = run_driver(cluster, program)
    assert shown.returncode == 0, shown.stderr
    before, after = shown.stderr.split("NOW\n")
    assert "get:" not in before and after.count("get: 100%") == 1 and "20/20" in after


def test_a_failure_and_a_timeout_end_the_bar(cluster: LocalCluster) -> None:
    program = f"""{PROGRAM}
import threading

@stoker.remote(max_retries=0)
def fails():
    raise ValueError("no")

for refs, timeout, kind in (
    ([ready.remote(1), fails.remote()], None, ValueError),
    ([ready.remote(1), waits.remote(pathlib.Path("/nonexistent"))], 2.0, stoker.exceptions.GetTimeoutError),
):
    try:
        stoker.get(refs, timeout=timeout, progress=True)
    except kind:
        sys.stdout.write("RAISED\\n")
    assert not any(t.name == "stoker-progress" for t in threading.enumerate())
"""
    shown = run_driver(cluster, program)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("RAISED") == 2
    assert "/2 [" in shown.stderr
